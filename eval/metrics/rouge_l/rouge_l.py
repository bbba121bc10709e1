"""ROUGE-L: F-measure of the longest common subsequence of words, by the rouge-score package.

With c words in common, p in the answer and r in the reference it is 2c / (p + r). Words are in lower case, stemmed,
and of the letters a-z and digits only, so the metric is for English. The whole text is one sequence.
"""

import datasets
import evaluate
from rouge_score import rouge_scorer


class RougeL(evaluate.Metric):
    """`rouge_l`: mean F-measure, 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Lin, ROUGE: A package for automatic evaluation of summaries, 2004.",
            inputs_description="predictions, references: one text per sample.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
        scores = [
            scorer.score(reference, prediction)["rougeL"].fmeasure
            for prediction, reference in zip(predictions, references)
        ]
        return {"rouge_l": sum(scores) / len(scores)}
