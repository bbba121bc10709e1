"""What rounds cost: learned from the rounds themselves, or loaded from a file of measured costs.

The cost of a block is a function of its tokens over all rows: a line with a non-negative slope, corrected where a size
has times of its own, times a speed that follows the recent rounds and with them the context and the state of the
machine. Times are medians, so that single slow rounds do not count. Further tokens cost less and less: beyond sizes
that were timed they add no more than in the prompt, for that two cost twice as much as one says little of sixteen.
"""

import copy
import json
import math
import os
import platform
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..drafters.base import write_whole
from ..errors import SpecDecError

WINDOW = 15
"""Latest times that are kept of each size."""
SPEED_WINDOW = 9
KNOWN = 3
"""Times from which on a size counts as known."""
FORGETTING = 0.98
"""Per round, of what the line is fitted to."""
SLOPE = 0.01
"""What a further token adds to a block of one before anything is observed, as a share of that block's cost."""
STEEPEST = 0.1
SLOPE_WEIGHT = 30.0
"""Squared tokens around their mean that the slope assumed at first counts for."""
LINE_WEIGHT = 1.0
"""Times of a size that the line counts for."""
DRAFT_STEP = 0.15
"""Cost of a draft model's forward before anything is observed, as a share of a block of one."""
SHORTEST, LONGEST = 1e-9, 1e9
"""Seconds of a round that a machine may need."""
_FILE_FORMAT = "hf_specdec costs 1"

_lock = threading.Lock()
_measured: WeakKeyDictionary[Any, dict[tuple[str, int], "CostModel"]] = WeakKeyDictionary()


class CostModel:
    """Seconds of a round's parts. Before anything is observed a block of one token takes 1.

    Attributes:
        doubt: how many times cheaper than believed a block of a size that was never timed may be.
    """

    _most = math.inf
    """What a further token adds at most, as a share of a block of one. Pickles of before it had a place have none."""

    def __init__(self) -> None:
        self.doubt = float("inf")
        self._slope = SLOPE
        self._prompt: tuple[int, float] | None = None
        self._speed = 1.0
        self._speeds: deque[float] = deque(maxlen=SPEED_WINDOW)
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._blocks: dict[int, float] = {}
        self._corners: list[tuple[int, float]] = []
        self._line = (1.0, SLOPE)
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._lookups: deque[float] = deque(maxlen=WINDOW)

    def start(self, tokens: int, seconds: float) -> None:
        """A prompt's forward tells by how much more tokens cost more, at most."""
        if tokens > 1 and not self._times:
            self._prompt = (tokens, seconds)

    def observe_block(self, tokens: int, seconds: float) -> None:
        """A verify forward over so many tokens, with all that a round does beside drafting."""
        if self._prompt is not None:
            length, prompt_seconds = self._prompt
            self._most = max(prompt_seconds / seconds - 1, 0.0) / max(length - tokens, 1)
            self._slope = min(self._most, STEEPEST) / 2
            self.doubt = 1.5 + 40 * self._slope
            self._prompt = None
        size = _size(tokens)
        own = self._times.setdefault(size, deque(maxlen=WINDOW))
        if len(own) >= KNOWN:
            self._speeds.append(seconds / self._block(size))
            self._speed = median(self._speeds)
        seconds /= self._speed
        own.append(seconds)
        self._medians[size] = median(own)
        self._fit(size, seconds)

    def _fit(self, tokens: int, seconds: float) -> None:
        """One more point for the line: decayed sums, an outlier cut to twice or half of what was believed."""
        if self._weight >= KNOWN:
            believed = self._block(tokens)
            seconds = min(max(seconds, believed / 2), 2 * believed)
        self._weight = FORGETTING * self._weight + 1
        self._tokens = FORGETTING * self._tokens + tokens
        self._seconds = FORGETTING * self._seconds + seconds
        self._squares = FORGETTING * self._squares + tokens * tokens
        self._products = FORGETTING * self._products + tokens * seconds
        mean, height = self._tokens / self._weight, self._seconds / self._weight
        spread = max(self._squares - mean * self._tokens, 0.0) + SLOPE_WEIGHT
        first = height / (1 + self._slope * (mean - 1))  # a block of one under the slope assumed at first
        slope = max(self._products - mean * self._seconds + SLOPE_WEIGHT * self._slope * first, 0.0) / spread
        slope = min(slope, 0.9 * height / mean)
        self._line = (height - slope * (mean - 1), slope)
        self._blocks.clear()

    def observe_model_draft(self, forwards: int, seconds: float) -> None:
        """A draft that took so many forwards of a draft model."""
        self._steps.append(seconds / forwards)

    def observe_lookup(self, seconds: float) -> None:
        """A draft that was looked up, however long."""
        self._lookups.append(seconds)

    def observed(self, tokens: int) -> int:
        """Recent rounds with a block of about this size."""
        return len(self._times.get(_size(tokens), ()))

    def block(self, tokens: int) -> float:
        """Seconds of a round with a block of so many tokens, without drafting; it never falls with the tokens."""
        return self._speed * self._block(tokens)

    def _block(self, tokens: int) -> float:
        known = self._blocks.get(tokens)
        if known is None:
            if not self._blocks:
                self._corners = self._corrected()
            known, most = self._line[0] + self._line[1] * (tokens - 1), math.inf
            for size, cost in self._corners:
                if size <= tokens:
                    known = cost if size == tokens else max(known, cost)
                    most = cost + self._most * self._line[0] * (tokens - size) if size < tokens else cost
                else:
                    most = min(most, cost)
                    break
            known = min(known, most)
            self._blocks[tokens] = known
        return known

    def _corrected(self) -> list[tuple[int, float]]:
        """Sizes that were timed, ascending, with their medians drawn towards the line, then isotonic."""
        sizes = sorted(self._times)
        costs, weights = [], []
        for size in sizes:
            weight = len(self._times[size]) ** 1.5  # a few times outweigh the line
            line = self._line[0] + self._line[1] * (size - 1)
            costs.append((weight * self._medians[size] + LINE_WEIGHT * line) / (weight + LINE_WEIGHT))
            weights.append(weight)
        return list(zip(sizes, isotonic(costs, weights)))

    @property
    def draft_step(self) -> float:
        """Seconds of a draft model's forward."""
        return median(self._steps) if self._steps else DRAFT_STEP * self.block(1)

    @property
    def lookup(self) -> float:
        """Seconds of a draft that is looked up."""
        return median(self._lookups) if self._lookups else 0.0

    def forget_drafts(self) -> None:
        """Keep the costs of blocks alone."""
        self._steps.clear()
        self._lookups.clear()

    def to_dict(self) -> dict[str, Any]:
        """What was learned, JSON-able."""
        return {
            "blocks": {str(size): [self._speed * each for each in own] for size, own in sorted(self._times.items())},
            "draft_steps": list(self._steps),
            "lookups": list(self._lookups),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostModel":
        """The model of what `to_dict` wrote. Raises `SpecDecError` for something else."""
        try:
            model = cls()
            for size, own in values["blocks"].items():
                for seconds in own:
                    if not (int(size) > 0 and SHORTEST <= float(seconds) <= LONGEST):
                        raise ValueError(f"{seconds!r} seconds for {size!r} tokens")
                    model.observe_block(int(size), float(seconds))
            rest = [*map(float, values["draft_steps"]), *map(float, values["lookups"])]
            if not all(0 <= each <= LONGEST for each in rest):
                raise ValueError(f"seconds below 0, or above {LONGEST:g}")
            model._steps.extend(map(float, values["draft_steps"]))
            model._lookups.extend(map(float, values["lookups"]))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise SpecDecError(f"These are no costs that `CostModel.to_dict` wrote ({error!r}).") from None
        model._speeds.clear()
        model._speed = 1.0
        return model

    @classmethod
    def measured(cls, seconds: Mapping[int, float], draft_step: float = 0.0, lookup: float = 0.0) -> "CostModel":
        """The model of measured costs.

        Args:
            seconds: of rounds without their drafting, by tokens of the block.
            draft_step: seconds per drafted token.
            lookup: seconds of a draft beside its tokens.
        """
        blocks = {str(tokens): [own] * WINDOW for tokens, own in sorted(seconds.items())}
        steps = [draft_step] if draft_step else []
        return cls.from_dict({"blocks": blocks, "draft_steps": steps, "lookups": [lookup]})


def _size(tokens: int) -> int:
    """Up to 32 tokens themselves, beyond in steps of an eighth to a sixteenth of them."""
    step = 1 << max(tokens.bit_length() - 5, 0)
    return -(-tokens // step) * step


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            other, own, size = pools.pop()
            value, weight, count = (value * weight + other * own) / (weight + own), weight + own, count + size
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]


def machine_key(model: Any) -> str:
    """What costs depend on: the machine, the number format, the attention backend and the model."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{device.type} {platform.processor() or platform.machine()} {torch.get_num_threads()} threads"
    config = model.config.get_text_config(decoder=True)
    shape = f"{config.num_hidden_layers}x{config.hidden_size}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{machine} | {dtype} | {config._attn_implementation} | {type(model).__name__} {shape}"


def measured_costs(model: Any, rows: int) -> CostModel:
    """What earlier calls of this process found for blocks of this model at this batch size, to learn on from."""
    with _lock:
        return copy.deepcopy(_measured.get(model, {}).get((machine_key(model), rows), CostModel()))


def keep_costs(model: Any, rows: int, costs: CostModel) -> None:
    """Let later calls begin with the costs of these blocks; those of drafts are each strategy's own."""
    kept = copy.deepcopy(costs)
    kept.forget_drafts()
    with _lock:
        _measured.setdefault(model, {})[machine_key(model), rows] = kept


def save_costs(path: str | os.PathLike[str], key: str, costs: CostModel) -> None:
    """Add costs to a JSON file, which may hold those of other machines and models."""
    known = read_costs(path) if Path(path).exists() else {}
    write_whole(path, json.dumps({"format": _FILE_FORMAT, "costs": {**known, key: costs.to_dict()}}, indent=1))


def load_costs(path: str | os.PathLike[str], key: str) -> CostModel:
    """The costs of this machine and model in a file that `save_costs` wrote. Raises `SpecDecError` without them."""
    known = read_costs(path)
    if key not in known:
        raise SpecDecError(
            f"{os.fspath(path)} holds the costs of {'; '.join(known) or 'nothing'}, not those of {key}. Measure them "
            "with `hf-specdec plan --save-costs`, or leave the profile out: costs are then learned in each call."
        )
    return CostModel.from_dict(known[key])


def read_costs(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file of `save_costs` holds, by machine and model. Raises `SpecDecError` for any other file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FILE_FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if not isinstance(content["costs"], dict):
            raise ValueError("its costs have no names")
        return content["costs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecDecError(
            f"{os.fspath(path)!r} cannot be read as a file of costs ({error}); make one with "
            "`hf-specdec plan --save-costs`."
        ) from None
