"""How likely drafted tokens are to be accepted, learned from what was judged.

A token is an observation only if it was judged: it was drafted, its parent was accepted, and no stop cut the round
before it. Old observations are forgotten exponentially.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cost import isotonic

CHAIN_PRIOR = 0.7
"""Acceptance of a draft model's token before anything is observed."""
CHAIN_PRIOR_WEIGHT = 2.0
DEPTH_WEIGHT = 6.0
"""Observations that the acceptance over all depths counts for at each depth."""
HALF_LIFE = 20
"""Rounds after which an observation counts half."""
BIN_EDGES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
MIDDLES = tuple((low + high) / 2 for low, high in zip(BIN_EDGES, (*BIN_EDGES[1:], 1.0)))
_LOGS = tuple(map(math.log, MIDDLES))
VALUE_WEIGHT = 12.0
"""Observations that a drafter's own estimate counts for."""
VALUE_HALF_LIFE = 60
POWER_WEIGHT, MOST_POWER = 2.0, 8.0
"""Observations that a power of 1 counts for, and the largest power."""


class ChainAcceptance:
    """Acceptance by depth: a Beta posterior at each, around the one that is shared by all depths."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._tries: list[float] = []
        self._decay = 0.5 ** (1 / HALF_LIFE)

    def observe(self, accepted: Sequence[int], reached: Sequence[int]) -> None:
        """One round.

        Args:
            accepted: accepted tokens per row.
            reached: the deepest depth that was judged per row; `accepted`, or one more where a token was rejected.
        """
        for counts in (self._hits, self._tries):
            counts[:] = [each * self._decay for each in counts]
        for hits, depth in zip(accepted, reached, strict=True):
            missing = depth - len(self._tries)
            if missing > 0:
                self._hits += [0.0] * missing
                self._tries += [0.0] * missing
            for place in range(depth):
                self._tries[place] += 1
                self._hits[place] += place < hits

    def expect(self, chances: Sequence[float]) -> None:
        """First tokens that were drafted and not judged, with the chance that they would have been accepted."""
        self.observe([0] * len(chances), [1] * len(chances))
        self._hits[0] += sum(chances)

    def survival(self, depth: int) -> list[float]:
        """Entry i: the probability that the first i + 1 tokens are all accepted, up to `depth`."""
        pooled = (sum(self._hits) + CHAIN_PRIOR * CHAIN_PRIOR_WEIGHT) / (sum(self._tries) + CHAIN_PRIOR_WEIGHT)
        alive, values = 1.0, []
        for place in range(depth):
            if place < len(self._tries):
                alive *= (self._hits[place] + DEPTH_WEIGHT * pooled) / (self._tries[place] + DEPTH_WEIGHT)
            else:
                alive *= pooled
            values.append(alive)
        return values


class ValueCalibration:
    """From a drafter's estimate that a token is accepted, given that its parent was, to the share that is.

    Bins with Beta posteriors around a power of the drafter's estimate that fits all bins, then isotonic. A drafter is
    right more often below a token of its own that was accepted than at the root: each has bins of its own.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * len(BIN_EDGES)
        self._tries = [0.0] * len(BIN_EDGES)
        self._bins = [sum(edge <= step / 100 for edge in BIN_EDGES) - 1 for step in range(101)]
        self._decay = 0.5 ** (1 / VALUE_HALF_LIFE)
        self._estimates = list(MIDDLES)
        self._power = 1.0

    def bin(self, value: float) -> int:
        """Where a conditional estimate belongs."""
        return self._bins[int(value * 100)] if 0 < value < 1 else self._bins[100 if value >= 1 else 0]

    def estimate(self, place: int) -> float:
        """The share of a bin that is accepted."""
        return self._estimates[place]

    @property
    def observed(self) -> bool:
        """Some token with an estimate was judged."""
        return any(self._tries)

    def observe(self, hits: Sequence[int], misses: Sequence[int]) -> None:
        """One round: the bins of judged tokens that were accepted, and of those that were not."""
        if not hits and not misses:
            return
        self._hits = [each * self._decay for each in self._hits]
        self._tries = [each * self._decay for each in self._tries]
        for place in hits:
            self._hits[place] += 1
            self._tries[place] += 1
        for place in misses:
            self._tries[place] += 1
        self._follow()
        estimates = [
            (own + VALUE_WEIGHT * middle**self._power) / (tries + VALUE_WEIGHT)
            for own, tries, middle in zip(self._hits, self._tries, MIDDLES)
        ]
        self._estimates = isotonic(estimates, [tries + VALUE_WEIGHT for tries in self._tries])

    def _follow(self) -> None:
        """A Newton step towards the power of the estimates that expects as many hits as there were."""
        excess = POWER_WEIGHT * (0.5**self._power - 0.5) - sum(self._hits)
        slope = POWER_WEIGHT * 0.5**self._power * math.log(0.5)
        for tries, middle, log in zip(self._tries, MIDDLES, _LOGS):
            expected = tries * middle**self._power
            excess, slope = excess + expected, slope + expected * log
        self._power = min(max(self._power - excess / slope, self._power / 2), 2 * self._power, MOST_POWER)


@dataclass
class DraftAcceptance:
    """What is known of the drafts of one kind: a model's, or those that were looked up.

    Args:
        chains: acceptance by depth.
        first_values, later_values: calibration of estimates at the root, and below a drafted token.
    """

    chains: ChainAcceptance = field(default_factory=ChainAcceptance)
    first_values: ValueCalibration = field(default_factory=ValueCalibration)
    later_values: ValueCalibration = field(default_factory=ValueCalibration)

    def judge(self, parents: Sequence[int], values: Sequence[float] | None) -> tuple[list[int], list[float]]:
        """Per node the bin of its value, if it has one, and the probability that it is accepted; that of padding is 0.

        Args:
            parents, values: of one row, as in `DraftTree`.
        """
        if values is None:
            survival, depths = [1.0, *self.chains.survival(len(parents))], [0] * len(parents)
            for node, parent in enumerate(parents):
                if 0 <= parent < node:
                    depths[node] = depths[parent] + 1
            return [], [survival[depth] if depth or not node else 0.0 for node, depth in enumerate(depths)]
        bins, chances = [0] * len(parents), [1.0, *[0.0] * (len(parents) - 1)]
        for node, parent in enumerate(parents):
            if 0 <= parent < node:
                kind = self.later_values if parent else self.first_values
                bins[node] = kind.bin(values[node] / values[parent] if values[parent] > 0 else 0.0)
                chances[node] = chances[parent] * kind.estimate(bins[node])
        return bins, chances

    def chances(self, parents: Sequence[int], values: Sequence[float] | None) -> list[float]:
        """The probability that each node is accepted."""
        return self.judge(parents, values)[1]
