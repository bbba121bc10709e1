"""Metrics of answers against cases worked out by hand, the table of qualities, identity with plain decoding, gaps."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import TEXT_IDS, tiny

from hf_specdec import SpecDecError
from hf_specdec_eval.quality import check_metrics, identity, load_metric, logit_gaps, quality
from hf_specdec_eval.task import Sample

ADD_PROMPT = 'import math\n\n\ndef add(left, right):\n    """Sum.\n    >>> add(1, 2)\n    3\n    """\n'
ADD = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
    "prompt": ADD_PROMPT,
    "setup": "",
}
DOUBLE = {"test": "assert double(2) == 4\nassert double(0) == 0", "entry_point": "", "prompt": "", "setup": ""}


def score(name, prediction, reference):
    return load_metric(name).compute(predictions=[prediction], references=[reference])[name]


def sample(number=0, task="maths", part=None, stop=(), **reference):
    """A sample with the id `<task>/<number>`."""
    return Sample(
        id=f"{task}/{number}",
        task=task,
        part=part or task,
        turns=("?",),
        reference=reference,
        max_new_tokens=8,
        stop=stop,
        chat=None,
        system=None,
    )


def entry(*turns):
    """A method's entry of a row; a turn is a list of texts or of token ids, one per sample."""
    return {"error": None, "turns": [{"text": turn, "token_ids": turn} for turn in turns], "peak_memory_bytes": None}


FAILED = {"error": "RuntimeError: no", "turns": [], "peak_memory_bytes": None}


def row(ids, repeat=0, **methods):
    return {"unit": 0, "repeat": repeat, "samples": [{"id": each, "part": "p"} for each in ids], "methods": methods}


def task(name="maths", *metrics):
    return {name: SimpleNamespace(name=name, metrics=metrics)}


def labels(*names):
    return [{"label": name} for name in names]


# Metrics


@pytest.mark.parametrize(
    ("answer", "hit"),
    [
        ("She makes 9 * 2 = $18.", True),
        ("The answer is 18", True),
        ("18.00", True),
        ("First 17, then #### 18", True),
        ("**18** dollars", True),
        ("It costs $18 per day, 18km, 18%", True),
        ("18 and then 19", False),
        ("-18", False),
        ("1,8", False),
        ("eighteen", False),
        ("", False),
    ],
)
def test_gsm8k_reads_the_last_number(answer, hit):
    assert score("gsm8k_accuracy", answer, "9 * 2 = <<9*2=18>>18 dollars.\n#### 18") == hit


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("$1,234,567.50", "#### 1234567.5"),
        ("1234", "#### 1,234"),
        ("a loss of -$5.", "#### -5"),
        ("a loss of $-5", "#### -5"),
        ("a loss of −5", "#### -5"),
        ("8-3", "#### 3"),
        ("- 5 apples", "#### 5"),
        (".5", "#### 0.5"),
        ("70000", "70,000"),
    ],
)
def test_gsm8k_compares_numbers_not_texts(answer, reference):
    assert score("gsm8k_accuracy", answer, reference) == 1


def test_gsm8k_refuses_a_reference_without_a_number():
    with pytest.raises(SpecDecError, match="no number"):
        score("gsm8k_accuracy", "1", "#### none")


def test_exact_match_minds_all_but_the_ends():
    compute = load_metric("exact_match").compute
    predictions, references = [" Paris\n", "paris", "Paris.", ""], ["Paris", "Paris", "Paris", "Paris"]
    assert compute(predictions=predictions, references=references) == {"exact_match": 0.25}


def naive_rouge_l(answer, reference):
    """F-measure of the longest common subsequence, found by trying every subsequence."""
    left, right = answer.split(), reference.split()
    common = 0
    for chosen in range(1 << len(left)):
        words = [word for at, word in enumerate(left) if chosen >> at & 1]
        rest = iter(right)
        if all(word in rest for word in words):
            common = max(common, len(words))
    return 2 * common / (len(left) + len(right))


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("a cat sat on a mat", "a cat on mat sat"), ("b a", "a b"), ("a b c", "x y"), ("a b", "a b"), ("q", "p q r s")],
)
def test_rouge_l_against_an_enumeration(answer, reference):
    assert score("rouge_l", answer, reference) == pytest.approx(naive_rouge_l(answer, reference))


@pytest.mark.parametrize(
    ("answer", "position"),
    [([1, 2, 3], None), ([1, 9, 3], 1), ([9, 2, 3], 0), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)],
)
def test_identity_finds_the_first_difference(answer, position):
    found = load_metric("identity").compute(predictions=[answer, [5]], references=[[1, 2, 3], [5]])
    assert found == {"identity": 1.0 if position is None else 0.5, "divergence_positions": [position, None]}


CODE = "def add(left, right):\n    return left + right\n"


@pytest.mark.parametrize(
    "answer",
    [
        "    return left + right\n",
        "return left + right",
        "   return left + right\n\nThe function returns the sum.",
        "    return left + right\n```\nThis function returns the sum.\n",
        CODE,
        f"Sure! Here it is:\n\n{CODE}\nThis adds both.",
        f"Sure!\n```python\n{CODE}```\nUse it so:\n```python\nadd('a', 2)\n```",
        f"```\n{CODE}",
        f"```python\nfrom __future__ import annotations\nZERO = 0\n{CODE}    + ZERO\n```",
        f"1. First:\n   ```python\n{CODE.replace('def', '   def').replace('    ret', '       ret')}   ```\n",
        f"```bash\npip install it\n```\n```python\n{CODE}```",
        f"{CODE}\nif __name__ == '__main__':\n    raise SystemExit(add(*input().split()))\n",
        "    return math.floor(left) + right\n",
        "    return left + right\n\nadd(1, ",
    ],
)
def test_pass_at_1_finds_the_code(answer):
    assert score("pass_at_1", answer, ADD) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot say.",
        "    return left - right\n",
        "    return left +",
        "    import os, sys\n    print('x')\n    os._exit(0)\n",
        "    raise SystemExit(0)\n",
        "```python\nprint('add')\n```",
        "```\nimport os\nos._exit(0)\ndef add(left, right):\n    return left + right\n```",
    ],
)
def test_pass_at_1_refuses_wrong_code(answer):
    assert score("pass_at_1", answer, ADD) == 0


def test_pass_at_1_with_plain_assertions():
    right = "def double(number):\n    return 2 * number"
    assert score("pass_at_1", right, DOUBLE) == 1
    assert score("pass_at_1", f"```python\n{right}\n```", DOUBLE) == 1
    assert score("pass_at_1", "double = lambda number: TWO * number", DOUBLE | {"setup": "TWO = 2"}) == 1
    assert score("pass_at_1", "def double(number):\n    return 3 * number", DOUBLE) == 0


def test_metrics_load_without_a_network(tmp_path):
    program = (
        "import sys\n"
        "def refuse(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.gethostbyname'):\n"
        "        print('request:', event, arguments)\n"
        "        raise OSError('no network')\n"
        "sys.addaudithook(refuse)\n"
        "from hf_specdec_eval.quality import METRICS, load_metric\n"
        "print([load_metric(name) for name in ['identity', *METRICS]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "request:" not in done.stdout


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    load_metric.cache_clear()
    with pytest.raises(SpecDecError, match=r"rouge_score.*hf-specdec\[bench\]"):
        load_metric("rouge_l")


# Table of qualities


def test_quality_by_method_part_and_repeat():
    samples = {each.id: each for each in [sample(0, part="easy", answer="1"), sample(1, part="hard", answer="#### 2")]}
    rows = [
        row(["maths/0"], plain=entry(["9"], ["1"]), suffix=entry(["1"], ["1"])),
        row(["maths/1"], plain=entry(["2"]), suffix=entry(["3"])),
        row(["maths/1"], repeat=1, plain=entry(["3"]), suffix=FAILED),
    ]
    found = quality(rows, samples, task("maths", "gsm8k_accuracy"), labels("plain", "suffix", "other"), False)
    assert [each["part"] for each in found] == ["all", "easy", "hard"]
    assert all(each["task"] == "maths" and each["metric"] == "gsm8k_accuracy" for each in found)
    assert found[0]["values"] == {"plain": pytest.approx(2 / 3), "suffix": 0.5, "other": None}
    assert found[0]["counted"] == {"plain": 3, "suffix": 2, "other": 0}
    assert found[1]["values"] == {"plain": 1, "suffix": 1, "other": None}
    assert found[2]["values"] == {"plain": 0.5, "suffix": 0, "other": None}


def test_quality_in_a_batch_over_two_tasks():
    samples = {
        "a/0": sample(0, "a", answer="x"),
        "a/1": sample(1, "a", answer="y"),
        "b/0": sample(0, "b", summary="z"),
    }
    rows = [row(["a/0", "a/1"], plain=entry(["x", "x"])), row(["b/0"], plain=entry(["z"]))]
    found = quality(rows, samples, task("a", "exact_match") | task("b", "rouge_l"), labels("plain"), False)
    assert [(each["task"], each["part"], each["values"]["plain"]) for each in found] == [
        ("a", "all", 0.5),
        ("b", "all", 1),
    ]


def test_answers_end_at_the_first_stop_text():
    samples = {"maths/0": sample(stop=("\n\n", "Q:"), answer="5")}
    rows = [row(["maths/0"], plain=entry(["5 Q: 6\n\n7"]), suffix=entry(["5"]))]
    found = quality(rows, samples, task("maths", "gsm8k_accuracy"), labels("plain", "suffix"), False)
    assert found[0]["values"] == {"plain": 1, "suffix": 1}


def test_code_is_executed_only_when_allowed(tmp_path):
    trace = tmp_path / "trace"
    samples = {"code/0": sample(0, "code", **DOUBLE | {"test": ["assert double(1) == 2", "assert double(2) == 4"]})}
    text = f"open({str(trace)!r}, 'w').close()\ndef double(number):\n    return 2 * number\n"
    rows = [row(["code/0"], plain=entry([text]))]
    found = quality(rows, samples, task("code", "pass_at_1"), labels("plain"), False)
    assert [(each["part"], each["values"]) for each in found] == [("all", None)]
    assert "--allow-code-execution" in found[0]["note"]
    assert not trace.exists()
    check_metrics(samples, task("code", "pass_at_1"), True)
    assert not trace.exists()
    found = quality(rows, samples, task("code", "pass_at_1"), labels("plain"), True)
    assert found[0]["values"] == {"plain": 1}
    assert trace.exists()


def test_bad_tasks_are_refused_before_the_run():
    samples = {"maths/0": sample(solution="5")}
    with pytest.raises(SpecDecError, match="Did you mean 'rouge_l'"):
        check_metrics(samples, task("maths", "rouge"), False)
    with pytest.raises(SpecDecError, match=r"key in `reference`.*'solution'"):
        check_metrics(samples, task("maths", "exact_match"), False)
    check_metrics(samples, task("maths"), False)
    with pytest.raises(SpecDecError, match="'answer', which maths/0 lacks"):
        check_metrics({"maths/0": sample()}, task("maths", "exact_match"), False)
    with pytest.raises(SpecDecError, match="no number"):
        check_metrics({"maths/0": sample(answer="five")}, task("maths", "gsm8k_accuracy"), False)
    check_metrics({"maths/0": sample(answer=5)}, task("maths", "gsm8k_accuracy", "exact_match"), False)


# Identity and gaps


def test_identity_with_plain():
    rows = [
        row(["a/0", "a/1"], plain=entry([[1, 2], [3]], [[4], [5]]), suffix=entry([[1, 2], [7]], [[8], [6]])),
        row(["a/0", "a/1"], repeat=1, plain=entry([[1, 2], [3]], [[4], [5]]), suffix=entry([[1, 2], [3]], [[8], [5]])),
        row(["a/2"], plain=FAILED, suffix=entry([[1]])),
        row(["a/3"], plain=entry([[1]]), suffix=FAILED),
        row(["a/4"], plain=entry([[1]])),
    ]
    found = identity(rows)
    assert list(found) == ["suffix"]
    # a/0 turn 0, a/1 turn 0 twice and, where that one is the same, turn 1; a/0 turn 1 differs alike in both repeats.
    assert (found["suffix"]["identical"], found["suffix"]["compared"]) == (3, 5)
    assert found["suffix"]["divergences"] == [
        {"sample": "a/0", "turn": 1, "repeat": 0, "position": 0, "gap": None},
        {"sample": "a/1", "turn": 0, "repeat": 0, "position": 0, "gap": None},
    ]


def test_identity_is_told_task_by_task():
    rows = [
        row(["a/0"], plain=entry([[1]]), suffix=entry([[1]])),
        row(["b/0", "b/1"], plain=entry([[2], [3]]), suffix=entry([[2], [4]])),
    ]
    found = identity(rows)["suffix"]
    assert found["by_task"] == {"a": {"identical": 1, "compared": 1}, "b": {"identical": 1, "compared": 2}}
    assert (found["identical"], found["compared"]) == (2, 3)


def test_identity_of_nothing():
    assert identity([]) == {}
    found = identity([row(["a/0"], plain=FAILED, suffix=FAILED)])
    assert found == {"suffix": {"identical": 0, "compared": 0, "by_task": {}, "divergences": []}}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gaps_are_of_the_targets_own_logits(family):
    model = tiny(family)
    prompt = torch.randint(*TEXT_IDS, (1, 12))
    text = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, 12:].tolist()
    logits = model(torch.tensor([[*prompt[0].tolist(), *text[:4]]])).logits[0, -1].detach()
    second = int(logits.topk(2).indices[1])
    rows = [
        row(
            ["a/0", "a/1"],
            plain=entry([text, text]),
            suffix=entry([[*text[:4], second, 7], text[:3]]),
        )
    ]
    found = identity(rows)
    asked = []

    def prompt_ids(*arguments):
        asked.append(arguments)
        return prompt[0].tolist()

    logit_gaps(model, found, prompt_ids, rows)
    first, shorter = found["suffix"]["divergences"]
    top = logits.topk(2).values
    assert (first["position"], shorter["position"]) == (4, 3)
    assert first["gap"] == pytest.approx(float(top[0] - top[1]), abs=1e-5)
    assert first["gap"] > 0
    assert shorter["gap"] is None
    assert asked == [("a/0", 0, "plain")]
