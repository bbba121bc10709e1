"""Share of answers whose code passes its tests. Executes code that a model wrote: see `hf_specdec_eval.sandbox`.

An answer's code is the first fenced block that defines the function, else its text from the first definition on, else
its text as the rest of the function that the prompt begins; trailing lines are dropped until it parses. Prompt, code
and tests are then executed in one module, in a process of its own. An answer passes if the end of the tests is reached
within the limits.
"""

import ast
import functools
import re
import secrets
import textwrap
import warnings

import datasets
import evaluate

from hf_specdec_eval.sandbox import run_program

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
ANY_NAME = r"\w+"
DEFINITION = re.compile(r"^(?:def |async def |class |@|import \w|from [\w.]+ import )", re.MULTILINE)
PROGRAM = """
import os, sys, types
module = types.ModuleType("solution")
sys.modules["solution"] = module
for source in {sources!r}:
    exec(source, module.__dict__)
os.write(1, {proof!r})
"""


class PassAt1(evaluate.Metric):
    """`pass_at_1`: share of answers, 0 to 1."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        reference = dict.fromkeys(("test", "entry_point", "prompt", "setup"), text)
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Chen et al., Evaluating large language models trained on code, arXiv:2107.03374.",
            inputs_description=(
                "predictions: one answer per sample. references: per sample `test`, code that raises for a wrong "
                "answer; `entry_point`, the function's name if `test` defines `check(candidate)`, else empty; "
                "`prompt`, the code that the answer goes on from; `setup`, code to run before."
            ),
            features=datasets.Features({"predictions": text, "references": reference}),
        )

    def _compute(self, predictions: list[str], references: list[dict[str, str]]) -> dict[str, float]:
        hits = [passes(sources(*pair)) for pair in zip(predictions, references)]
        return {"pass_at_1": sum(hits) / len(hits)}


@functools.cache
def passes(parts: tuple[str, ...] | None) -> bool:
    """Whether these sources, executed one after the other, come to their end. Equal sources are executed once."""
    if parts is None:
        return False
    proof = secrets.token_hex(16)  # a program that exits early cannot know it
    outcome = run_program(PROGRAM.format(sources=parts, proof=proof.encode()))
    return outcome.returncode == 0 and proof in outcome.stdout


def sources(answer: str, reference: dict[str, str]) -> tuple[str, ...] | None:
    """What to execute for an answer, in order, or None where the answer holds no code."""
    name, prompt = reference["entry_point"], reference["prompt"]
    tests = (reference["test"], *([f"check({name})"] if name else []))
    defines = re.compile(rf"^[ \t]*(?:async )?def {re.escape(name) or ANY_NAME}\b", re.MULTILINE)
    blocks = FENCE.findall(answer)
    block = next((each for each in blocks if defines.search(each)), None)
    before = answer.partition("```")[0]
    text = before if before.strip() or not blocks else blocks[0]
    if block is not None:
        code = longest_code("", textwrap.dedent(block))
    elif defines.search(text) or not prompt:
        start = None if parses(text) else DEFINITION.search(text)
        code = longest_code("", text[start.start() if start else 0 :])
    else:
        body = longest_code(prompt, "    " + text.lstrip()) if text.strip() else ""
        return (reference["setup"], body, *tests) if body else None
    return (reference["setup"], prompt, code, *tests) if code else None


def longest_code(head: str, text: str) -> str:
    """`head` and the most lines of `text` that parse together with it; empty where no line does."""
    lines = text.splitlines(keepends=True)
    programs = (head + "".join(lines[:end]) for end in range(len(lines), 0, -1))
    return next(filter(parses, programs), "")


def parses(code: str) -> bool:
    """Whether this is Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
