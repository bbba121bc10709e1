"""Share of texts that are token for token the reference's, and where the others leave it."""

import datasets
import evaluate


class Identity(evaluate.Metric):
    """`identity`: share of identical texts; `divergence_positions`: per text the first that differs, or None."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: one list of token ids per text.",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, object]:
        positions = [divergence(*pair) for pair in zip(predictions, references)]
        return {"identity": positions.count(None) / len(positions), "divergence_positions": positions}


def divergence(prediction: list[int], reference: list[int]) -> int | None:
    """First position at which two texts differ; where one goes on after the other, the length of the shorter."""
    if prediction == reference:
        return None
    shorter = min(len(prediction), len(reference))
    return next((at for at in range(shorter) if prediction[at] != reference[at]), shorter)
