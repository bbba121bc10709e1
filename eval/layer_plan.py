"""Which part of a target should draft for it: match rates along its own text, measured steps, and what follows.

Matches are counted where they would happen: in each round of a greedy call, every part is asked for the next token
with the target's own keys and values behind it. What a round of k drafts costs is timed in real rounds that take turns
with plain steps; the tokens that it brings come from replaying the matches.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_specdec import LayerSkip, SpecDecConfig, SpecDecError, SpeculativeGenerationMixin, UnsupportedModelError

from .part_probes import Probe, decode_seconds, probe_parts, round_seconds
from .planning import replay

LENGTHS = (1, 2, 4, 8)
"""Draft lengths whose verify passes are timed; others lie between."""
REPEATS = 5
LEAST, MOST = 0.1, 0.6
"""Shares of the sub-layers that a random skip set leaves out."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of rounds, linear between what was measured; and of single tokens.

    The keys are an exit layer (None: the draft skipped sub-layers, and the verify pass runs all) and drafted tokens.

    Args:
        plain_seconds: a step of plain decoding.
        undrafted_seconds: a round without drafts: the loop's own step.
        drafts: the drafting of a round.
        verifies: the rest of it.
    """

    plain_seconds: float
    undrafted_seconds: float
    drafts: Mapping[tuple[int | None, int], float]
    verifies: Mapping[tuple[int | None, int], float]

    def draft(self, exit_layer: int | None, length: int) -> float:
        """Drafting this many tokens with this exit, or with the skip set that was timed."""
        return _between(self.drafts, exit_layer, length)

    def verify(self, exit_layer: int | None, length: int) -> float:
        """The rest of that round."""
        return _between(self.verifies, exit_layer, length)


def _between(points: Mapping[tuple[int | None, int], float], exit_layer: int | None, length: int) -> float:
    def at(timed: int) -> float:
        if exit_layer is None:
            return points[None, timed]
        exits = sorted(each for each, own in points if each is not None and own == timed)
        return float(np.interp(exit_layer, exits, [points[each, timed] for each in exits]))

    lengths = sorted({each for _, each in points})
    return float(np.interp(length, lengths, list(map(at, lengths))))


@dataclass(frozen=True)
class PartForecast:
    """What a part is expected to bring at its best draft length.

    Args:
        part: which.
        match_rate: of its argmax with the target's, along the target's text.
        step_share: seconds of a draft step over those of a plain step.
        length: drafted tokens per round.
        tokens_per_round: the target's own included.
        speedup: of decoding, over plain decoding.
    """

    part: LayerSkip
    match_rate: float
    step_share: float
    length: int
    tokens_per_round: float
    speedup: float

    @property
    def config(self) -> SpecDecConfig:
        """The request that it stands for."""
        return SpecDecConfig("layer_skip", self.part.to_dict(), max_draft_tokens=self.length)


def forecast_part(
    part: LayerSkip, probe: Probe, costs: RoundCosts, max_length: int, timed: bool = True
) -> PartForecast:
    """The best draft length of a part, from 1 on: `tokens * t_plain / (rounds * (t_draft(k) + t_verify(k)))`.

    After an early exit the replay is exact: a draft is the same wherever it begins. A part that skips sub-layers sees
    its own keys and values behind its first draft, and may match a little less often than it says.

    Args:
        part: which.
        probe: what it did along the target's texts.
        costs: of rounds.
        max_length: the longest draft.
        timed: `costs` has this part's drafts, or those of exits around it; otherwise k steps of the probe are taken,
            which were timed at another moment than plain steps: enough to compare skip sets.
    """
    tokens = sum(map(len, probe.agreed))
    found = []
    for length in range(1, max_length + 1):
        rounds = sum(len(replay(text, length)) for text in probe.agreed)
        drafting = costs.draft(part.exit_layer, length) if timed else length * probe.step_seconds
        seconds = rounds * (drafting + costs.verify(part.exit_layer, length))
        found.append((tokens * costs.plain_seconds / seconds, length, tokens / rounds, drafting / length))
    speedup, length, per_round, step = max(found, key=lambda each: each[0])
    rate = sum(map(sum, probe.agreed)) / tokens
    return PartForecast(part, rate, step / costs.plain_seconds, length, per_round, speedup)


@dataclass(frozen=True)
class LayerPlan:
    """Forecasts of every exit layer and of the best skip set that was found, and a measured check of the best.

    Args:
        forecasts: exits in order, then the skip set where there is one.
        undrafted: speed of rounds without drafts over plain decoding: what the loop gains or costs by itself.
        measured: decoding speed of the best over plain decoding, on the same prompts.
    """

    forecasts: tuple[PartForecast, ...]
    undrafted: float
    measured: float

    @property
    def best(self) -> PartForecast:
        """The fastest."""
        return max(self.forecasts, key=lambda each: each.speedup)

    @property
    def pays(self) -> bool:
        """The best is faster than plain `generate` and than rounds without drafts, as expected and as measured."""
        return min(self.best.speedup, self.measured) > max(1, self.undrafted)

    @property
    def figures(self) -> str:
        """Speed of the best over plain decoding."""
        return f"{self.best.speedup:.2f}x expected, {self.measured:.2f}x measured"

    @property
    def sentence(self) -> str:
        """The conclusion."""
        best, figures = self.best, self.figures
        if self.pays:
            return f"Best: {name(best.part)}, max_draft_tokens={best.length}: {figures}."
        return (
            f"No part of this model pays. The best, {name(best.part)} with max_draft_tokens={best.length}, decodes at "
            f"{figures}, and rounds without drafts at {self.undrafted:.2f}x: use plain generate or another strategy."
        )

    def table(self) -> Table:
        """A row per part; the best is bold."""
        table = Table(title="Drafting with a part of the model, against plain generate")
        table.add_column("part", no_wrap=True)
        for column in ("match rate", "draft step", "draft length", "tokens per round", "decoding"):
            table.add_column(column, justify="right")
        table.add_row("no drafts", "", "", "0", "1.00", f"{self.undrafted:.2f}x")
        for each in self.forecasts:
            table.add_row(
                name(each.part),
                f"{each.match_rate:.1%}",
                f"{each.step_share:.2f}",
                str(each.length),
                f"{each.tokens_per_round:.2f}",
                f"{each.speedup:.2f}x",
                style="bold" if each is self.best else None,
            )
        return table


def name(part: LayerSkip) -> str:
    """A part in a few words."""
    if part.exit_layer is not None:
        return f"exit_layer={part.exit_layer}"
    return f"without {len(part.skip_attention)} attention, {len(part.skip_mlp)} MLP"


@dataclass(frozen=True)
class PartMeasure:
    """Measures parts on some prompts.

    Args:
        model: the target, enabled.
        prompts: token ids.
        new_tokens: length of the texts that matches are counted along.
        max_length: the longest draft.
    """

    model: SpeculativeGenerationMixin
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    max_length: int

    def costs(self, parts: Sequence[LayerSkip]) -> RoundCosts:
        """What rounds of these parts (any exits, at most one skip set) and plain steps cost."""
        lengths = sorted({each for each in LENGTHS if each <= self.max_length} | {self.max_length})
        middle = sorted(self.prompts, key=len)[len(self.prompts) // 2]
        timed = round_seconds(self.model, middle, parts, lengths, REPEATS)
        drafts, verifies = (
            {(part.exit_layer, length): own for (part, length), own in log.items()}
            for log in (timed.draft, timed.verify)
        )
        return RoundCosts(timed.plain, timed.undrafted, drafts, verifies)

    def probes(self, parts: Sequence[LayerSkip], prompts: int | None = None) -> list[Probe]:
        """Matches and steps of these parts on the first `prompts` prompts, or on all."""
        return probe_parts(self.model, self.prompts[:prompts], parts, self.new_tokens)

    def sublayers(self, layers: int) -> list[tuple[str, int]]:
        """What a draft may skip: sub-layers of all layers but the first and the last."""
        found = []
        for kind in ("skip_attention", "skip_mlp"):
            inner = list(range(1, layers - 1))
            try:
                if inner:
                    part = skip_set([(kind, index) for index in inner])
                    probe_parts(self.model, self.prompts[:1], [part], 1)
                found += [(kind, index) for index in inner]
            except UnsupportedModelError:
                continue
        return found


def skip_set(sublayers: Sequence[tuple[str, int]]) -> LayerSkip:
    """The part without these sub-layers."""
    return LayerSkip(
        skip_attention=[index for kind, index in sublayers if kind == "skip_attention"],
        skip_mlp=[index for kind, index in sublayers if kind == "skip_mlp"],
    )


def candidates(
    sublayers: Sequence[tuple[str, int]], best: LayerSkip | None, count: int, draw: random.Random
) -> list[LayerSkip]:
    """Random skip sets, or neighbours of the best one so far: about two sub-layers more or less."""
    sets = []
    kept = [] if best is None else [("skip_attention", each) for each in best.skip_attention]
    kept += [] if best is None else [("skip_mlp", each) for each in best.skip_mlp]
    for _ in range(count):
        if best is None:
            size = max(1, round(draw.uniform(LEAST, MOST) * len(sublayers)))
            chosen = draw.sample(list(sublayers), size)
        else:
            flipped = {each for each in sublayers if draw.random() < 2 / len(sublayers)}
            chosen = [each for each in sublayers if (each in kept) != (each in flipped)]
        if chosen:
            sets.append(skip_set(chosen))
    return sets


def plan_layers(
    model: SpeculativeGenerationMixin,
    prompts: Sequence[Sequence[int]],
    max_length: int = 8,
    budget: int = 48,
    new_tokens: int = 32,
    console: Console | None = None,
) -> LayerPlan:
    """Try every exit layer and `budget` skip sets on these prompts, check the best, and print a table.

    The search over skip sets is random at first and then goes on around the best (the first and the last layer are
    never skipped); its winner is measured again on all prompts, so that it is not praised for its luck.

    Args:
        model: the target, enabled.
        prompts: token ids.
        max_length: the longest draft.
        budget: skip sets to try; 0 for none.
        new_tokens: length of the text per prompt.
        console: where the table goes; standard output by default.

    Raises:
        SpecDecError: the model is not enabled, has one layer, or its layers cannot be found; a number is too small.
    """
    layers = _checked_layers(model, prompts, max_length, budget, new_tokens)
    console = console or Console(highlight=False)
    measure = PartMeasure(model, prompts, new_tokens, max_length)
    with _progress() as step:
        exits = [LayerSkip(exit_layer=each) for each in range(1, layers)]
        step("exit layers")
        parts = list(zip(exits, measure.probes(exits), strict=True))
        best = _best_skip_set(measure, layers, budget, step) if budget else None
        if best is not None:
            parts += zip([best], measure.probes([best]))
        step("costs")
        timed = [LayerSkip(exit_layer=each) for each in sorted({1, max(layers // 2, 1), layers - 1})]
        costs = measure.costs([*timed, *([best] if best is not None else [])])
        forecasts = [forecast_part(part, probe, costs, max_length) for part, probe in parts]
        step("check")
        winner = max(forecasts, key=lambda each: each.speedup)
        constant = replace(winner.config, schedule="constant")  # as it was forecast
        plain, own = decode_seconds(model, prompts, constant, new_tokens)
    planned = LayerPlan(tuple(forecasts), costs.plain_seconds / costs.undrafted_seconds, plain / own)
    console.print(planned.table())
    console.print(planned.sentence, soft_wrap=True)
    return planned


def _best_skip_set(measure: PartMeasure, layers: int, budget: int, step: Callable[[str], None]) -> LayerSkip | None:
    """The fastest of `budget` skip sets on a third of the prompts; None where nothing can be skipped."""
    step("what can be skipped")
    sublayers = measure.sublayers(layers)
    if not sublayers:
        return None
    step("skip sets")
    costs = measure.costs([skip_set(sublayers)])
    draw, best, left = random.Random(0), None, budget
    while left > 0:
        batch = candidates(sublayers, None if best is None else best.part, min(left, -(-budget // 4)), draw)
        left -= max(1, len(batch))
        probes = measure.probes(batch, max(1, len(measure.prompts) // 3)) if batch else []
        tried = [
            forecast_part(part, probe, costs, measure.max_length, timed=False)
            for part, probe in zip(batch, probes, strict=True)
        ]
        best = max([*tried, *([best] if best else [])], key=lambda each: each.speedup)
    assert best is not None
    return best.part


def _checked_layers(
    model: SpeculativeGenerationMixin, prompts: Sequence[Sequence[int]], max_length: int, budget: int, new_tokens: int
) -> int:
    """The number of layers. Raises `SpecDecError` for what cannot be planned."""
    if not isinstance(model, SpeculativeGenerationMixin):
        raise SpecDecError(f"{type(model).__name__} is not enabled; call hf_specdec.enable(model) first.")
    least = {"max_length": (max_length, 1), "budget": (budget, 0), "new_tokens": (new_tokens, 3)}
    for key, (value, smallest) in least.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise SpecDecError(f"{key}={value!r} is too few or no number; give a whole number of at least {smallest}.")
    if not prompts or not all(prompts):
        raise SpecDecError("A plan needs prompts, and each needs a token; give at least one with some text.")
    layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if layers < 2:
        raise SpecDecError(f"{type(model).__name__} has {layers} layer, so no part of it can draft for the rest.")
    return layers


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function to call with the name of what comes next."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=f"Measuring: {text} ...")
