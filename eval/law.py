"""The law of a model's next few sampled tokens: enumerated, drawn from, and the G-test between the two.

Owns the statistics of `hf-specdec verify`. The law is cut down to few cells with `top_k`, at a temperature that
spreads it over them; its probabilities come from direct forward passes of the model, never from `generate`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2, ncx2, power_divergence
from transformers import GenerationConfig

from hf_specdec import SpecDecConfig

Cell = tuple[int, ...]

STEPS = 3
"""Tokens whose joint law is tested: the prompt's own, and two that may be drafted."""
TOP_K = 3
SPREAD = 2.0
"""At the test's temperature, the likeliest of the `TOP_K` tokens is on average `e ** SPREAD` as likely as the last."""
EDGE = -1
"""Stands for the tokens that are as good as tied for the last place among the `TOP_K`."""
IMPOSSIBLE: Cell = (-2,)
ROWS = 64
"""Texts that are drawn in one call."""
MIN_EXPECTED = 10
"""Cells that are expected less often are counted as one."""
POWER = 0.999
FEWEST_DRAWS, MOST_DRAWS = 128, 16_384


@dataclass(frozen=True)
class Draws:
    """Sampled texts by cell, and what speculation did while they were drawn."""

    counts: Counter[Cell]
    accepted: int = 0
    rejected: int = 0


class Law:
    """The target's law of `STEPS` tokens after a context.

    A cell is a sequence of tokens. Rounding decides which of several tokens that are tied for the last of the `TOP_K`
    places can be drawn; they count as one token, `EDGE`, and the cell ends there.

    Args:
        model: an enabled model in evaluation mode.
        context: token ids.
        margin: difference of two logits that counts as a tie.
    """

    def __init__(self, model: Any, context: Sequence[int], margin: float):
        self.model, self.context = model, list(context)
        self._logits: dict[Cell, dict[int, float]] = {}
        self._edges: dict[Cell, set[int]] = {}
        prefixes: list[Cell] = [()]
        for _ in range(STEPS):
            if prefixes:
                prefixes = self._look_ahead(prefixes, margin)
        spreads = [max(each.values()) - min(each.values()) for each in self._logits.values()]
        self.temperature = max(sum(spreads) / len(spreads) / SPREAD, 0.01)

    def _look_ahead(self, prefixes: list[Cell], margin: float) -> list[Cell]:
        """Note what may follow each prefix, in one forward pass; the prefixes that are a token longer."""
        ids = torch.tensor([[*self.context, *prefix] for prefix in prefixes], device=self.model.device)
        with torch.no_grad():
            rows = self.model(input_ids=ids).logits[:, -1].double().cpu()
        for prefix, row in zip(prefixes, rows):
            last = row.topk(min(TOP_K, len(row))).values[-1]
            tied = ((row - last).abs() <= margin).nonzero().flatten().tolist()
            self._edges[prefix] = set(tied) if len(tied) > 1 else set()
            self._logits[prefix] = {token: float(row[token]) for token in (row >= last).nonzero().flatten().tolist()}
        return [(*prefix, token) for prefix in prefixes for token in self._logits[prefix].keys() - self._edges[prefix]]

    def probabilities(self, temperature: float) -> dict[Cell, float]:
        """The probability of each cell under `top_k=TOP_K` at this temperature; they add up to 1."""
        cells: dict[Cell, float] = {(): 1.0}
        for _ in range(STEPS):
            longer: dict[Cell, float] = defaultdict(float)
            for cell, probability in cells.items():
                logits = self._logits.get(cell)
                if logits is None:  # it has ended at an edge
                    longer[cell] += probability
                    continue
                best = max(logits.values())
                weights = {token: math.exp((logit - best) / temperature) for token, logit in logits.items()}
                for token, weight in weights.items():
                    key = (*cell, EDGE if token in self._edges[cell] else token)
                    longer[key] += probability * weight / sum(weights.values())
            cells = dict(longer)
        return cells

    def cell_of(self, tokens: Sequence[int]) -> Cell:
        """The cell of a sampled text of at least `STEPS` tokens; `IMPOSSIBLE` where it has no probability."""
        cell: Cell = ()
        for token in tokens[:STEPS]:
            if token in self._edges[cell]:
                return (*cell, EDGE)
            if token not in self._logits[cell]:
                return IMPOSSIBLE
            cell = (*cell, token)
        return cell

    def draw(self, config: SpecDecConfig | None, draws: int, temperature: float) -> Draws:
        """Sample texts with `generate`, every other call a token longer than the law.

        The last token of the law may then be a draft, and else the one after a draft that was accepted whole.
        """
        counts: Counter[Cell] = Counter()
        accepted = drafted = 0
        prompt = torch.tensor([self.context], device=self.model.device)
        with _bare_generation(self.model):
            rows = min(ROWS, math.ceil(draws / 2))
            for number, start in enumerate(range(0, draws, rows)):
                output = self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    assistant_strategy=config,
                    do_sample=True,
                    temperature=temperature,
                    top_k=TOP_K,
                    max_new_tokens=STEPS + 1 - number % 2,
                    num_return_sequences=min(rows, draws - start),
                    return_dict_in_generate=True,
                )
                counts.update(map(self.cell_of, output.sequences[:, prompt.shape[1] :].tolist()))
                if config is not None:
                    accepted += output.speculation.num_accepted_draft_tokens
                    drafted += output.speculation.num_draft_tokens
        return Draws(counts, accepted, drafted - accepted)


@contextmanager
def _bare_generation(model: Any) -> Iterator[None]:
    """`generate` without the model's own defaults inside: no penalties, no end of the text."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = kept


def pool(probabilities: np.ndarray, draws: int) -> np.ndarray:
    """A group for each cell, all cells that are expected less than `MIN_EXPECTED` times in one.

    Args:
        probabilities: shape `(cells,)`.

    Returns:
        Integers from 0 of shape `(cells,)`.
    """
    rare = probabilities * draws < MIN_EXPECTED
    if 0 < probabilities[rare].sum() * draws < MIN_EXPECTED and not rare.all():
        rare |= probabilities == probabilities[~rare].min()
    groups = np.cumsum(~rare) - 1
    return np.where(rare, groups.max() + 1, groups)


def g_test(law: Mapping[Cell, float], counts: Mapping[Cell, int]) -> float:
    """P-value of `G = 2 sum(n log(n / (N p)))` over pooled cells, chi-square with cells - 1 degrees of freedom.

    0 where a cell came that the law does not have; 1 where all cells are pooled into one.
    """
    if any(count and cell not in law for cell, count in counts.items()):
        return 0.0
    probabilities = np.array(list(law.values()))
    draws = sum(counts.values())
    groups = pool(probabilities, draws)
    if not groups.max():
        return 1.0
    observed = np.bincount(groups, [counts.get(cell, 0) for cell in law])
    expected = np.bincount(groups, probabilities) / probabilities.sum() * draws
    return float(power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def power(law: Mapping[Cell, float], other: Mapping[Cell, float], draws: int, threshold: float) -> float:
    """The chance that draws from `other` are told apart from the law at this p-value.

    Noncentral chi-square with `N w^2`, where `w^2 = sum((q - p)^2 / p)` over pooled cells (Cohen 1988).
    """
    probabilities = np.array(list(law.values()))
    groups = pool(probabilities, draws)
    expected = np.bincount(groups, probabilities)
    wrong = np.bincount(groups, [other[cell] for cell in law])
    freedom = len(expected) - 1
    if not freedom:
        return 0.0
    noncentrality = draws * float(((wrong - expected) ** 2 / expected).sum())
    return float(ncx2.sf(chi2.isf(threshold, freedom), freedom, noncentrality))


def draws_needed(law: Mapping[Cell, float], other: Mapping[Cell, float], threshold: float) -> int | None:
    """About the smallest number of draws with which `power` reaches `POWER`; None beyond `MOST_DRAWS`."""
    draws = FEWEST_DRAWS
    while draws <= MOST_DRAWS:
        if power(law, other, draws, threshold) >= POWER:
            return draws
        draws = math.ceil(draws * 1.1)
    return None
