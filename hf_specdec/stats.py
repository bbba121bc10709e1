"""What happened in a call: per round for the controller, in total and per row for the user.

Terms. A round is one draft and one verify forward. Drafted: a proposed token that was judged. Accepted: a drafted
token that became output. Emitted: accepted tokens plus the target's own token. A token that a stop cut off was not
judged, so it counts neither as drafted nor as rejected. Names and definitions are vLLM's where it has them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .state import Plan


class Judged(NamedTuple):
    """What became of the drafts of a round, per row; see `StepRecord`."""

    drafted: Sequence[int]
    reached: Sequence[int]
    accepted: Sequence[int]
    paths: Sequence[Sequence[int]]


@dataclass(frozen=True)
class StepRecord:
    """One round, as a controller learns from it. Times in seconds.

    Args:
        plan: what was granted.
        rows: rows in the round.
        nodes: of each row in the forward pass, with root and padding.
        context: committed tokens of the longest row.
        drafted: judged draft tokens per row.
        reached: the deepest depth that was judged per row: `accepted`, or one more where tokens there were rejected; 0
            for a row without drafts.
        accepted: accepted draft tokens per row.
        paths: nodes that the verifier accepted per row, root side first; those beyond `accepted` a stop cut off.
        draft_forwards: forward passes of a draft model that drafting took.
    """

    plan: Plan
    rows: int
    nodes: int
    context: int
    drafted: Sequence[int]
    reached: Sequence[int]
    accepted: Sequence[int]
    paths: Sequence[Sequence[int]]
    draft_forwards: int
    draft_seconds: float
    verify_seconds: float
    step_seconds: float


class Round(NamedTuple):
    """What a round brought one row: judged draft tokens, the deepest depth that was judged, accepted draft tokens, and
    emitted tokens."""

    drafted: int
    deepest: int
    accepted: int
    emitted: int


@dataclass
class RowStats:
    """Counts of one row of the caller's batch."""

    rounds: list[Round] = field(default_factory=list)
    token_sources: list[bool] = field(default_factory=list)
    """Per emitted token: True for an accepted draft token, False for the target's own."""

    @property
    def num_spec_steps(self) -> int:
        """Rounds."""
        return len(self.rounds)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were judged."""
        return sum(each.drafted for each in self.rounds)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens that became output."""
        return sum(each.accepted for each in self.rounds)

    @property
    def num_emitted_tokens(self) -> int:
        """New tokens, the one from the prefill included."""
        return len(self.token_sources)


@dataclass
class SpeculationStats:
    """Counts and times of one call. Rounds are counted per row: a round of B rows counts B times."""

    strategy: str
    verifier: str
    lossless: bool
    rows: list[RowStats]
    target_forwards: int = 0
    """The prompt's counts as one."""
    prompt_groups: int = 1
    """Groups of rows in which a ragged batch's prompt ran."""
    draft_forwards: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    """In forward passes of a draft model."""
    verify_seconds: float = 0.0
    """In forward passes of the target, prefill left out."""
    other_seconds: float = 0.0
    """In rounds, outside the models."""
    notes: list[str] = field(default_factory=list)
    """Why drafting was held back, where it was."""
    choices: dict[str, Any] = field(default_factory=dict)
    """What an adaptive schedule chose: rounds by nodes per row, when drafting was switched off and why, and the mean
    absolute error of the seconds it predicted."""

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry i: rounds in which i draft tokens were accepted."""
        rounds = Counter(each.accepted for row in self.rows for each in row.rounds)
        return [rounds[count] for count in range(max(rounds, default=-1) + 1)]

    @property
    def drafted_at_depth(self) -> list[int]:
        """Entry i: rounds in which a token at depth i + 1 was judged."""
        deepest = [each.deepest for row in self.rows for each in row.rounds]
        return [sum(each > depth for each in deepest) for depth in range(max(deepest, default=0))]

    @property
    def accepted_at_depth(self) -> list[int]:
        """Entry i: rounds in which a token at depth i + 1 was accepted."""
        rounds = [each for row in self.rows for each in row.rounds]
        return [sum(each.accepted > depth for each in rounds) for depth in range(len(self.drafted_at_depth))]

    @property
    def num_spec_steps(self) -> int:
        """Rounds, summed over rows."""
        return sum(row.num_spec_steps for row in self.rows)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens that were judged."""
        return sum(row.num_draft_tokens for row in self.rows)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Draft tokens that became output."""
        return sum(row.num_accepted_draft_tokens for row in self.rows)

    @property
    def num_emitted_tokens(self) -> int:
        """New tokens of all rows, the one from the prefill included."""
        return sum(row.num_emitted_tokens for row in self.rows)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens per row and round."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry i: of the tokens judged at depth i + 1, the share that was accepted."""
        return [hit / tried for hit, tried in zip(self.accepted_at_depth, self.drafted_at_depth)]

    @property
    def total_seconds(self) -> float:
        """Time of the call from the start of its prefill."""
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def overhead_share(self) -> float:
        """Share of the rounds' time that was spent outside the models' forward passes."""
        rounds = self.draft_seconds + self.verify_seconds + self.other_seconds
        return self.other_seconds / rounds if rounds else 0.0

    def __str__(self) -> str:
        """The call in one line; `repr` has everything."""
        lossy = "" if self.lossless else f" (lossy: {self.verifier})"
        accepted = f"{self.draft_acceptance_rate:.0%} of {self.num_draft_tokens} draft tokens accepted"
        return (
            f"{self.strategy}{lossy}: {self.num_emitted_tokens} tokens in {self.num_spec_steps} rounds "
            f"({self.mean_acceptance_length:.2f} per round), {accepted if self.num_draft_tokens else 'none drafted'}, "
            f"{self.total_seconds:.2f} s, {self.overhead_share:.0%} of the rounds' time outside the models"
        )

    def note(self, reason: str) -> None:
        """Add a reason once."""
        if reason not in self.notes:
            self.notes.append(reason)

    def count_round(self, row_id: int, drafted: int, deepest: int, accepted: int, emitted: int) -> None:
        """Count one round of one row.

        Args:
            drafted: judged draft tokens.
            deepest: the largest depth that was judged.
            accepted: accepted draft tokens.
            emitted: tokens emitted, `accepted + 1` unless a stop cut the round.
        """
        self.rows[row_id].rounds.append(Round(drafted, deepest, accepted, emitted))
        self.count_emitted(row_id, accepted, emitted)

    def count_emitted(self, row_id: int, accepted: int, emitted: int) -> None:
        """Count emitted tokens, the accepted ones first."""
        self.rows[row_id].token_sources += [True] * accepted + [False] * (emitted - accepted)

    def count_times(self, round_seconds: float, target_seconds: float, draft_seconds: float) -> None:
        """Add the times of a round."""
        self.verify_seconds += target_seconds
        self.draft_seconds += draft_seconds
        self.other_seconds += round_seconds - target_seconds - draft_seconds

    def trim(self, row_id: int, steps: int) -> None:
        """Forget tokens of a row that ran ahead of the end of the batch, as if a stop had cut its rounds there."""
        row = self.rows[row_id]
        surplus = row.num_emitted_tokens - steps
        while surplus > 0 and row.rounds:
            *_, emitted = row.rounds.pop()
            surplus -= emitted
            if surplus < 0:
                row.rounds.append(Round(-surplus, -surplus, -surplus, -surplus))
        del row.token_sources[steps:]

    def to_dict(self) -> dict[str, Any]:
        """Counts, rates and times, JSON-able."""
        names = (
            "strategy verifier lossless num_spec_steps num_draft_tokens num_accepted_draft_tokens num_emitted_tokens "
            "mean_acceptance_length draft_acceptance_rate acceptance_histogram acceptance_by_depth target_forwards "
            "prompt_groups draft_forwards prefill_seconds draft_seconds verify_seconds other_seconds total_seconds "
            "overhead_share notes choices"
        )
        return {name: getattr(self, name) for name in names.split()}


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Plain `generate`'s output with what speculation did.

    Args:
        speculation: counts and times of the call.
    """

    sequences: torch.Tensor | None = None
    speculation: SpeculationStats | None = None
