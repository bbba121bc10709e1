"""`hf-specdec`: generate text with accepted drafts in colour, list the strategies, run the demo.

Everything goes through the public API. An error of the package is one red line on stderr and exit status 2.
"""

import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .config import FILE_ENDINGS, SpecDecConfig
from .control import SCHEDULES
from .drafters.base import known_strategies
from .errors import SpecDecError, no_directory
from .mixin import enable
from .stats import SpeculationStats
from .verify import VERIFIERS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PLAIN = "none"
DEFAULT_STRATEGY = "auto"
DEFAULT_VERIFIER = "exact"
WITH_DRAFT_MODEL = ("auto", "draft_model")
FLAGS = {"verifier_options": "--verifier-option"}
"""Of fields of `SpecDecConfig` whose option has another name."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACCEPTED_STYLE = "bold green"


def tell_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        print(version("hf_specdec"))
        raise typer.Exit


@app.callback()
def main(
    told: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face generate."""


def stdout() -> Console:
    """Where results go. Made per call, so that it writes to what `sys.stdout` is then."""
    return Console(highlight=False)


def stderr() -> Console:
    """Where progress and errors go."""
    return Console(stderr=True, highlight=False)


@contextmanager
def clean_errors() -> Iterator[None]:
    """Turn an error of the package, or a model that cannot be read, into one red line and exit status 2."""
    try:
        yield
    except (SpecDecError, OSError) as error:
        message = " ".join(str(error).split())
        stderr().print(f"Error: {message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


class ColourStreamer(BaseStreamer):
    """Prints the new text as it comes, the text of accepted draft tokens in colour.

    The loop announces each round with `on_round`: of the next `emitted` tokens, the first `accepted` were drafted. A
    token's text is held back while it ends within a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.tokenizer = tokenizer
        self.console = console
        self._sources: deque[bool] = deque()
        self._tokens: list[int] = []
        self._shown_from, self._shown_to = 0, 0
        self._prompt_passed = False

    def on_round(self, accepted: int, emitted: int) -> None:
        """Of the next `emitted` tokens, the first `accepted` are accepted drafts."""
        self._sources.extend([True] * accepted + [False] * (emitted - accepted))

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, of shape `(1, L)`; then one token per call, of shape `(1,)`."""
        if not self._prompt_passed:
            self._prompt_passed = True
            return
        self._tokens += value.flatten().tolist()
        self._show(final=False, drafted=self._sources.popleft() if self._sources else False)

    def end(self) -> None:
        """Print what was held back, and end the line."""
        self._show(final=True, drafted=False)
        self.console.print()

    def _show(self, final: bool, drafted: bool) -> None:
        before = self._decode(self._tokens[self._shown_from : self._shown_to])
        text = self._decode(self._tokens[self._shown_from :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return
        self.console.out(text[len(before) :], end="", style=ACCEPTED_STYLE if drafted else None, highlight=False)
        self._shown_from, self._shown_to = self._shown_to, len(self._tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def parse_options(pairs: list[str], flag: str = "--option") -> dict[str, Any]:
    """`["max_ngram=4"]` as `{"max_ngram": 4}`: values are JSON where they parse as such, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise SpecDecError(f"{flag} {pair!r} is not of the form NAME=VALUE.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def build_config(
    strategy: str | None, draft_model: str | None, options: dict[str, Any], settings: dict[str, Any]
) -> SpecDecConfig | None:
    """The request that the command line stands for; None for plain `generate`.

    Args:
        strategy: a name, a file, "none", or None for the default.
        options: settings of the strategy.
        settings: other fields of `SpecDecConfig`; None or {} where not given.
    """
    name = strategy or ("draft_model" if draft_model else DEFAULT_STRATEGY)
    settings = {field: value for field, value in settings.items() if value is not None and value != {}}
    if name == PLAIN or name.endswith(FILE_ENDINGS):
        given = {"--draft-model": draft_model, "--option": options or None}
        given |= {FLAGS.get(field, f"--{field.replace('_', '-')}"): value for field, value in settings.items()}
        for flag, value in given.items():
            if value is not None and name == PLAIN:
                raise SpecDecError(f"{flag} does not go with --strategy {PLAIN}, plain generate; leave it out.")
            if value is not None:
                raise SpecDecError(f"{flag} and the file {name!r} would both say it; write it into the file.")
        return None if name == PLAIN else SpecDecConfig.from_file(name)
    if draft_model is not None:
        if name not in WITH_DRAFT_MODEL:
            able = " or ".join(WITH_DRAFT_MODEL)
            raise SpecDecError(f"--draft-model goes with --strategy {able}, not with {name!r}.")
        options = {**options, "model": draft_model}
    if name in (known := known_strategies()):
        for field in dataclasses.fields(known[name]):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in options:
                flag = "--draft-model NAME" if field.name == "model" else f"--option {field.name}=VALUE"
                raise SpecDecError(f"Strategy {name!r} needs {known[name].needs}; give {flag}.")
    return SpecDecConfig(strategy=name, strategy_options=options, **settings)


def load(name: str, dtype: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, enabled and in evaluation mode, and tokenizer. `device` None is the GPU where there is one."""
    if dtype not in DTYPES:
        raise SpecDecError(f"--dtype {dtype!r} is not known; give one of {', '.join(DTYPES)}.")
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto" if dtype == "auto" else getattr(torch, dtype))
        model.to(device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # transformers and torch raise all of these
        raise SpecDecError(f"{name} cannot be loaded onto {device!r}: {no_directory(name) or error}") from error
    return enable(model), tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None, system: str | None
) -> dict[str, torch.Tensor]:
    """Inputs of `generate`, of shape `(1, L)`. `chat` None uses the chat template where the tokenizer has one."""
    use_chat = tokenizer.chat_template is not None if chat is None else chat
    if not use_chat:
        if system is not None:
            raise SpecDecError("--system needs a chat template; leave out --no-chat, or use a chat model.")
        return dict(tokenizer(prompt, return_tensors="pt"))
    if tokenizer.chat_template is None:
        raise SpecDecError("--chat needs a chat template and this tokenizer has none; use --no-chat.")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    return dict(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    )


def sampling_options(temperature: float | None) -> dict[str, Any]:
    """Greedy unless a temperature above 0 is given."""
    if temperature:
        return {"do_sample": True, "temperature": temperature}
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def summary(tokens: int, seconds: float, stats: SpeculationStats | None) -> Table:
    """The one table at the end of `generate`."""
    table = Table(title="plain generate" if stats is None else f"{stats.strategy}, verifier {stats.verifier}")
    forwards = tokens if stats is None else stats.target_forwards
    cells = {
        "tokens": str(tokens),
        "tokens/s": f"{tokens / seconds:.1f}",
        "tokens per target forward": f"{tokens / max(forwards, 1):.2f}",
    }
    if stats is not None:
        drafted, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
        cells["time outside the models"] = f"{stats.overhead_share:.1%}"
        cells["drafted"] = str(drafted)
        cells["accepted"] = f"{accepted} ({stats.draft_acceptance_rate:.0%})"
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    return table


Strategy = Annotated[
    str | None,
    typer.Option(
        help=f"Draft strategy (see `hf-specdec strategies`), a YAML or JSON file of one, or '{PLAIN}'. "
        f"Default: {DEFAULT_STRATEGY}; draft_model where --draft-model is given."
    ),
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="A setting of the strategy, NAME=VALUE; repeatable.")
]
VerifierName = Annotated[
    str | None, typer.Option(help=f"Acceptance rule: {', '.join(VERIFIERS)}. Default: {DEFAULT_VERIFIER}.")
]
VerifierOptions = Annotated[
    list[str] | None, typer.Option(help="A setting of the acceptance rule, NAME=VALUE; repeatable.")
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        help=f"How much each round drafts: {', '.join(sorted(SCHEDULES))}. Default: adaptive where the text does not "
        "depend on it."
    ),
]
MaxWidth = Annotated[int | None, typer.Option(help="Most draft tokens at one place of the text; 1 drafts chains.")]


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Target model: a name on the hub or a directory.")],
    prompt: Annotated[str, typer.Option(help="The prompt; '-' reads it from standard input.")],
    strategy: Strategy = None,
    draft_model: Annotated[str | None, typer.Option(help="Draft model of strategy draft_model, or of auto.")] = None,
    option: Options = None,
    verifier: VerifierName = None,
    verifier_option: VerifierOptions = None,
    schedule: ScheduleName = None,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Most draft tokens per round.")] = None,
    max_width: MaxWidth = None,
    max_depth: Annotated[int | None, typer.Option(help="Longest path of a draft.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample at this temperature; else greedy.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"Weights' type: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: the GPU where there is one.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template. Default: where there is one.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
) -> None:
    """Generate text; accepted draft tokens are green."""
    console = stdout()
    with clean_errors():
        settings = {
            "verifier": verifier, "verifier_options": parse_options(verifier_option or [], "--verifier-option"),
            "schedule": schedule, "max_draft_tokens": max_draft_tokens, "max_width": max_width, "max_depth": max_depth,
        }  # fmt: skip
        config = build_config(strategy, draft_model, parse_options(option or []), settings)
        with stderr().status(f"Loading {model} ..."):
            target, tokenizer = load(model, dtype, device)
        text = sys.stdin.read() if prompt == "-" else prompt
        inputs = {name: value.to(target.device) for name, value in encode(tokenizer, text, chat, system).items()}
        torch.manual_seed(seed)
        started = time.perf_counter()
        output = target.generate(
            **inputs,
            assistant_strategy=config,
            streamer=ColourStreamer(tokenizer, console),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **sampling_options(temperature),
        )
        seconds = time.perf_counter() - started
    tokens = output.sequences.shape[1] - inputs["input_ids"].shape[1]
    console.print(summary(tokens, seconds, getattr(output, "speculation", None)))


@app.command()
def strategies() -> None:
    """List the draft strategies: what each does and what it needs."""
    table = Table("strategy", "what it does", "needs")
    for name, strategy in sorted(known_strategies().items()):
        table.add_row(name, (strategy.__doc__ or "").strip().split("\n")[0], strategy.needs)
    stdout().print(table)


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="A name on the hub or a directory. Default: SmolLM2-135M-Instruct.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Weights' type: {', '.join(DTYPES)}.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Longest answer to each prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats, as far as the time allows.")] = 3,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time after which no further prompt starts.")] = 215.0,
) -> None:
    """Compare plain generate, stock prompt lookup and this package on a dozen prompts."""
    from .demo import run_demo  # it imports this module

    with clean_errors():
        agreed = run_demo(model, dtype, max_new_tokens, repeats, seconds)
    if not agreed:
        raise typer.Exit(1)


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def pass_on(context: typer.Context, name: str) -> None:
    """Run a command of the evaluation harness, which reads its own options."""
    try:
        from hf_specdec_eval.commands import COMMANDS  # matplotlib and scipy, which only the harness needs
    except ModuleNotFoundError as error:
        with clean_errors():
            raise SpecDecError(
                f"hf-specdec {name} needs {error.name}, even for --help. It comes with the extra `bench`; in a "
                'checkout: .venv/bin/pip install -e ".[bench]" (or pip install ".[bench]" into an environment of your '
                "own)."
            ) from None
    COMMANDS[name](context.args, prog_name=f"hf-specdec {name}")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure strategies on tasks: speed, acceptance, quality, identity (extra `bench`)."""
    pass_on(context, "bench")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def verify(context: typer.Context) -> None:
    """Check that a strategy gives the text, or the law, of plain generate on a model (extra `bench`)."""
    pass_on(context, "verify")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def plan(context: typer.Context) -> None:
    """Measure strategies on your prompts; tell which to use and what it gains, or not to speculate (extra `bench`)."""
    pass_on(context, "plan")


if __name__ == "__main__":
    app()
