"""Each round the draft with the most expected tokens per second, where "do not draft" is always a choice.

With E(n) the tokens that a round with n draft tokens is expected to emit and C(n) its seconds, the choice is the n of
the largest E(n) / C(n), over all n. A draft model's paths are limited before they are drafted, by its acceptance at
each depth, and end where its own estimates say that another forward does not pay; what was looked up is asked for
whole. Both are pruned, node by node, by their calibrated values. A batch has one size for all rows, which are padded
to it; what a row has no room for counts nothing.
"""

import copy
import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..drafters.base import NEW_MEMORY
from ..errors import SpecDecError
from ..state import DecodeView, Plan
from ..stats import StepRecord
from ..tree import DraftTree, select_nodes
from .acceptance import DraftAcceptance
from .base import SCHEDULES, Controller, Schedule, Scope
from .cost import CostModel, keep_costs, load_costs, machine_key, measured_costs
from .probes import Probes

PROBE_SHARE = 0.01
"""Of the rounds' seconds, what probes may have cost on balance."""
ASK_SHARE = 0.005
"""Of the rounds' seconds, what lookups may take while they are not worth asking: texts begin to copy in the middle."""
FIRST_ROUNDS = 3
"""What the rate of a round counts for, in rounds, beside that of the rounds before it."""
RECENT = 0.97
"""By which the tokens and seconds of earlier rounds are forgotten per round."""
LESSON = 0.03
"""Tokens that a node is worth beside its own acceptance where the drafter learns from what the target says there."""
WORTH_START, WORTH_RATE = 0.1, 0.05
"""Gain over plain steps that lookups begin with, and how fast it follows what they promise."""


@dataclass
class Learned:
    """What outlives a round: costs, and the acceptance of a model's drafts and of looked-up ones."""

    costs: CostModel = field(default_factory=CostModel)
    model: DraftAcceptance = field(default_factory=DraftAcceptance)
    lookup: DraftAcceptance = field(default_factory=DraftAcceptance)


class ControlMemory:
    """What earlier calls learned, for `Adaptive(memory=...)`, by machine, model and strategy. Safe to share between
    threads; of calls at the same time, the one that ends last is remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learned: dict[tuple[str, str], Learned] = {}

    def __len__(self) -> int:
        """Pairs of model and strategy remembered."""
        return len(self._learned)

    def recall(self, key: tuple[str, str]) -> Learned | None:
        """A copy of what was learned, or None."""
        with self._lock:
            return copy.deepcopy(self._learned.get(key))

    def store(self, key: tuple[str, str], learned: Learned) -> None:
        """Remember it in place of what was known."""
        with self._lock:
            self._learned[key] = learned

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {"_learned": copy.deepcopy(self._learned)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._learned = state["_learned"]


@dataclass(frozen=True)
class Adaptive(Schedule):
    """The draft with the most expected tokens per second, by costs and acceptance learned during the call.

    What blocks cost is a fact of machine and model, and a process keeps it from call to call with the same model and
    batch size. What the text is like is learned afresh.

    Args:
        memory: what earlier calls learned, acceptance included: a `ControlMemory`, or "new" for an empty one that all
            calls with this object share; None begins with costs alone.
        profile: a file of measured costs, as `hf-specdec plan --save-costs` writes it; None learns them.
    """

    name: ClassVar[str] = "adaptive"
    reach: ClassVar[int] = 2

    memory: ControlMemory | str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.memory == NEW_MEMORY:
            object.__setattr__(self, "memory", ControlMemory())
        if self.profile is not None and not isinstance(self.profile, (str, os.PathLike)):
            raise SpecDecError(f"adaptive: profile={self.profile!r} is no file; give the path of one.")
        if self.memory is not None and not isinstance(self.memory, ControlMemory):
            raise SpecDecError(
                f"adaptive: memory={self.memory!r} is no ControlMemory; give one, or {NEW_MEMORY!r}, or leave it out."
            )

    def build(self, scope: Scope) -> "AdaptiveController":
        """The controller of one call. Raises `SpecDecError` when the profile lacks this machine and model."""
        key = (machine_key(scope.model), scope.strategy)
        memory = self.memory if isinstance(self.memory, ControlMemory) else None
        learned = None if memory is None else memory.recall(key)
        if learned is None:
            profile = self.profile
            costs = measured_costs(scope.model, scope.rows) if profile is None else load_costs(profile, key[0])
            learned = Learned(costs)
        controller = AdaptiveController(scope, learned)

        def keep() -> None:
            keep_costs(scope.model, scope.rows, learned.costs)
            if memory is not None:
                memory.store(key, learned)

        controller.at_end = keep
        return controller

    def to_dict(self) -> dict[str, Any]:
        """The settings by field name; a memory as "new"."""
        return {"memory": None if self.memory is None else NEW_MEMORY, "profile": self.profile}


SCHEDULES[Adaptive.name] = Adaptive


class AdaptiveController(Controller):
    """The state of one call.

    Args:
        scope: what may be known of the call.
        learned: what is known already; it learns on.

    Attributes:
        at_end: called once when the call ends.
    """

    def __init__(self, scope: Scope, learned: Learned):
        self._scope = scope
        self._learned = learned
        self._costs = learned.costs
        self.at_end = lambda: None
        self._sizes: Counter[int] = Counter()
        self._off: list[dict[str, Any]] = []
        self._seconds = self._errors = self._predicted_seconds = 0.0
        self._rounds = self._predictions = self._untaught = 0
        self._taught = True
        self._recent_tokens = self._recent_seconds = 0.0
        self._worth = WORTH_START
        self._model_probes, self._lookup_probes, self._spent = Probes(), Probes(), 0.0
        self._asked_seconds = 0.0
        self._begin_round()

    def _begin_round(self) -> None:
        self._predicted = 0.0
        self._forwards = self._scope.drafter.forwards
        self._shown: tuple[list[list[int]], list[list[int]]] | None = None

    @property
    def teaches(self) -> bool:
        """Drafts from what the target found likely pay here if they are as good as usual, or there are no others."""
        return self._teaching_pays(self._scope.rows)

    def _teaching_pays(self, rows: int) -> bool:
        if not self._scope.drafter.drafts_untaught:
            return True
        costs, nodes, gain = self._costs, self._scope.largest(rows).nodes, self._scope.drafter.usual_gain
        plain = costs.block(rows)
        return any(
            (1 + gain * math.log2(size)) * plain > costs.lookup + costs.block(rows * size)
            for size in range(2, nodes + 1)
        )

    def start(self, tokens: int, seconds: float) -> None:
        """What the prompt's forward says about costs."""
        self._costs.start(tokens, seconds)

    def plan(self, view: DecodeView, rooms: Sequence[int]) -> Plan:
        """A draft model's chain of the best length; for lookups the largest plan, while they are worth asking."""
        self._begin_round()
        plan = self._scope.largest(view.rows).within(max(rooms) - 1)
        if not self._teaching_pays(view.rows):
            plan, self._untaught = replace(plan, taught=False), self._untaught + 1
        self._taught = plan.taught
        plain = self._costs.block(view.rows)
        self._predicted = plain
        if not plan.depth:
            return plan
        if self._scope.drafter.runs_model:
            return self._plan_model(plan, rooms)
        if self._worth < 0:
            if self._asked_seconds + self._costs.lookup > ASK_SHARE * self._seconds:
                return plan.within(0)
            self._asked_seconds += self._costs.lookup
            self._spent += self._costs.lookup
        self._predicted = self._costs.lookup + plain
        return plan

    def _plan_model(self, plan: Plan, rooms: Sequence[int]) -> Plan:
        """Up to the depth of the most tokens per second, and one level more where the model's estimates allow it."""
        costs, rows = self._costs, len(rooms)
        lookup = costs.lookup if self._scope.drafter.looks_up else 0.0
        survival = self._learned.model.chains.survival(plan.depth)
        expected, tokens, seconds = float(rows), [], []
        for depth in range(plan.depth + 1):
            if depth:
                expected += survival[depth - 1] * sum(room > depth for room in rooms)
            nodes = 1 + depth if plan.width == 1 or plan.own_widths or not depth else plan.nodes
            tokens.append(expected)
            seconds.append(lookup + depth * costs.draft_step + costs.block(rows * nodes))
        best = depth = self._choose(tokens, seconds, rows, self._model_probes)
        self._predicted = seconds[best]
        if best and not self._model_probes.now:
            level = costs.draft_step + costs.block(2 * rows) - costs.block(rows)
            worth = self._rate(tokens, seconds, rows) * level / (rows * survival[0])
            known = self._learned.model
            plan = replace(plan, least=worth, model_chances=known.chances)
            depth += known.first_values.observed
        if not self._scope.drafter.looks_up:
            return plan.within(depth)
        enough = tokens[best] / seconds[best] * (lookup + costs.block(rows * plan.nodes)) / rows
        enough = math.inf if self._model_probes.now else enough
        return replace(plan, model_depth=depth, enough=enough, lookup_chances=self._learned.lookup.chances)

    def _choose(self, tokens: Sequence[float], seconds: Sequence[float], rows: int, probes: Probes) -> int:
        """The best size, but now and then another one to learn from.

        Args:
            tokens, seconds: by size, from 0 on.
            probes: of the kind of draft.
        """
        rates = [count / cost for count, cost in zip(tokens, seconds)]
        best = self._best(tokens, seconds, rows)
        if best:
            if self._rounds and not self._costs.observed(rows) and rates[best] < self._costs.doubt * rates[0]:
                return 0
            probes.reset()
            return best
        if len(rates) == 1:
            return 0
        least = max(range(1, len(rates)), key=rates.__getitem__)
        return least if probes.now or self._probe_is_due(probes, seconds[least] - seconds[0]) else 0

    def _best(self, tokens: Sequence[float], seconds: Sequence[float], rows: int) -> int:
        """The size that gives the call the most tokens per second: that of the largest tokens - rate * seconds."""
        rate = self._rate(tokens, seconds, rows)
        gains = [count - rate * cost for count, cost in zip(tokens, seconds)]
        return gains.index(max(gains))

    def _rate(self, tokens: Sequence[float], seconds: Sequence[float], rows: int) -> float:
        """Tokens that the call emits per second, which is what a second of a round is worth (renewal reward).

        It is that of the recent rounds, at first of this one.
        """
        rates = [count / cost for count, cost in zip(tokens, seconds)]
        share = self._recent_seconds / (self._recent_seconds + FIRST_ROUNDS * seconds[0])
        rate = max(rates) * (1 - share)
        if share:
            rate += max(self._recent_tokens / self._recent_seconds * rows, rates[0]) * share
        return rate

    def _probe_is_due(self, probes: Probes, extra_seconds: float) -> bool:
        """Count a round in which drafting does not pay. Is it time to draft all the same, to see whether it would?"""
        if probes.count():
            self._off.append({"round": self._rounds, "why": self._reason(probes)})
        return probes.start(self._spent + extra_seconds <= PROBE_SHARE * self._seconds)

    def _reason(self, probes: Probes) -> str:
        two = self._costs.block(2) / self._costs.block(1)
        kind = self._learned.model if probes is self._model_probes else self._learned.lookup
        return (
            f"a first draft token is accepted with probability {kind.chains.survival(1)[0]:.2f}, and a forward of two "
            f"tokens costs {two:.2f} of one"
        )

    def prune(self, view: DecodeView, tree: DraftTree) -> DraftTree:
        """The nodes whose gain is above their cost, as many in each row."""
        forwards = self._scope.drafter.forwards - self._forwards
        if tree.size == 1 or (forwards and tree.values is None):
            return tree
        parents = [row.parents for row in tree.on_host]
        kind = self._learned.model if forwards else self._learned.lookup
        judged = [kind.judge(row.parents, row.values) for row in tree.on_host]
        chances = [chance for _, chance in judged]
        orders = [
            sorted((node for node, above in enumerate(own) if above >= 0), key=lambda node: -chance[node])
            for own, chance in zip(parents, chances)
        ]
        rows, most = len(orders), max(map(len, orders))
        drafting = (self._costs.lookup if self._scope.drafter.looks_up else 0.0) + forwards * self._costs.draft_step
        expected = float(rows)
        tokens, seconds = [expected], [drafting + self._costs.block(rows)]
        learns = self._scope.drafter.top_tokens and self._taught and not forwards
        taught = LESSON * rows if learns else 0.0
        for count in range(most):
            expected += taught
            for order, chance in zip(orders, chances):
                if count < len(order):
                    expected += chance[order[count]]
            tokens.append(expected)
            seconds.append(drafting + self._costs.block(rows * (2 + count)))
        if forwards:
            count = min(max(self._best(tokens, seconds, rows), self._model_probes.now), most)
            if most and not count:
                self._learned.model.chains.expect([own[order[0]] for order, own in zip(orders, chances) if order])
        else:
            count = self._choose(tokens, seconds, rows, self._lookup_probes)
            gain = tokens[count] / rows - seconds[count] / self._costs.block(rows)
            self._worth += WORTH_RATE * (gain - self._worth)
        self._predicted = seconds[count]
        kept = [[0, *sorted(order[:count])] for order in orders]
        if count < most or most + 1 < tree.size:
            tree = select_nodes(tree, kept)
            parents = [row.parents for row in tree.on_host]
        else:
            kept = [list(range(tree.size))] * rows
        if tree.values is not None:
            places = [[bins[node] for node in nodes] for (bins, _), nodes in zip(judged, kept)]
            self._shown = list(map(list, parents)), places  # lists that nobody else has
        return tree

    def observe(self, record: StepRecord) -> None:
        """Costs, acceptance, and what the choice was worth."""
        costs = self._costs
        block = record.step_seconds - record.draft_seconds
        costs.observe_block(record.rows * record.nodes, block)
        if record.draft_forwards:
            lookup = costs.lookup if self._scope.drafter.looks_up else 0.0
            costs.observe_model_draft(record.draft_forwards, max(record.draft_seconds - lookup, 0.0))
        elif record.plan.depth and self._scope.drafter.looks_up:
            costs.observe_lookup(record.draft_seconds)
        self._learn(record)
        if self._model_probes.now or self._lookup_probes.now:
            lost = record.step_seconds - (1 + sum(record.accepted) / record.rows) * costs.block(record.rows)
            self._spent = max(0.0, self._spent + lost)
            self._model_probes.end(paid=lost < 0)
            self._lookup_probes.end(paid=lost < 0)
        if self._rounds:  # before the first one nothing is known of this call
            self._errors += abs(self._predicted - record.step_seconds)
            self._predicted_seconds += record.step_seconds
            self._predictions += 1
        self._rounds += 1
        self._seconds += record.step_seconds
        self._recent_tokens = RECENT * self._recent_tokens + 1 + sum(record.accepted) / record.rows
        self._recent_seconds = RECENT * self._recent_seconds + record.step_seconds
        self._sizes[record.nodes] += 1

    def _learn(self, record: StepRecord) -> None:
        judged = [row for row, depth in enumerate(record.reached) if depth]
        if not judged:
            return
        kind = self._learned.model if record.draft_forwards else self._learned.lookup
        kind.chains.observe([record.accepted[row] for row in judged], [record.reached[row] for row in judged])
        if self._shown is None:
            return
        seen: dict[bool, tuple[list[int], list[int]]] = {False: ([], []), True: ([], [])}
        for row in judged:
            path = record.paths[row][: record.accepted[row]]
            cut = record.reached[row] == record.accepted[row]
            asked = {0, *(path[:-1] if cut else path)}
            taken = set(path)
            for node, (parent, place) in enumerate(zip(self._shown[0][row], self._shown[1][row])):
                if parent in asked:
                    seen[parent == 0][node not in taken].append(place)
        kind.first_values.observe(*seen[True])
        kind.later_values.observe(*seen[False])

    def finish(self) -> None:
        """Hand on what was learned."""
        self.at_end()

    def report(self) -> dict[str, Any]:
        """Rounds by block size, when drafting was switched off and why, rounds in which drafts from what the target
        found likely were left out, and how well seconds were predicted, from the second round on; None where there was
        none."""
        count = self._predictions
        return {
            "schedule": Adaptive.name,
            "rounds_by_nodes": {str(nodes): rounds for nodes, rounds in sorted(self._sizes.items())},
            "switched_off": self._off,
            "untaught_rounds": self._untaught,
            "mean_absolute_error_seconds": self._errors / count if count else None,
            "mean_round_seconds": self._predicted_seconds / count if count else None,
        }
