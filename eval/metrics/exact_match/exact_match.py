"""Share of answers that are the reference, white space at both ends aside."""

import datasets
import evaluate


class ExactMatch(evaluate.Metric):
    """`exact_match`: share of answers, 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: one text per sample.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        same = [prediction.strip() == reference.strip() for prediction, reference in zip(predictions, references)]
        return {"exact_match": sum(same) / len(same)}
