"""Share of answers whose last number equals the reference's number after `####`.

Numbers are compared as decimals: 1,234.50 is 1234.5. Currency signs, units and a full stop may touch a number. A minus
counts as a sign unless a number, a word or a closing bracket stands right before it, as in 16-3. A reference without
`####` counts by its last number.
"""

import re
from decimal import Decimal

import datasets
import evaluate

from hf_specdec import SpecDecError

NUMBER = re.compile(
    r"(?P<sign>(?<![\w.%)\]])[-−])?[$€£]?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


class Gsm8kAccuracy(evaluate.Metric):
    """`gsm8k_accuracy`: share of answers, 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Cobbe et al., Training verifiers to solve math word problems, arXiv:2110.14168.",
            inputs_description="predictions, references: one text per sample.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        hits = [last_number(prediction) == wanted(reference) for prediction, reference in zip(predictions, references)]
        return {"gsm8k_accuracy": sum(hits) / len(hits)}


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    number = Decimal(numbers[-1]["digits"].replace(",", ""))
    return -number if numbers[-1]["sign"] else number


def wanted(reference: str) -> Decimal:
    """The number that a reference asks for."""
    number = last_number(reference.rpartition("####")[2])
    if number is None:
        raise SpecDecError(
            f"gsm8k_accuracy found no number in the reference {reference[-80:]!r}; map `answer` of the task's "
            "`reference` to a column that ends in `#### NUMBER`."
        )
    return number
