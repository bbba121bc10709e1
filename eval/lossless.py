"""Whether speculation leaves a model's text as it is: the checks behind `hf-specdec verify`.

Owns the comparison with plain `generate` and the verdict. The verifier decides what is checked:

* greedy text must be plain `generate`'s, whatever the verifier;
* a verifier that takes the noise of plain sampling must give the text of the seed and leave the generator alike;
* one that keeps the target's law has its first sampled tokens tested against the target's own probabilities, with as
  many draws as it takes to tell a control apart: the target at another temperature, drawn and tested alike;
* a lossy one does not pass, nor does a check that drafted nothing or cannot tell its control apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import VERIFIERS, Constant, SpecDecConfig, SpecDecError, enable

from .law import STEPS, Draws, Law, draws_needed, g_test
from .measure import sampling_options

NEAR_TIE = {torch.float16: 0.25, torch.bfloat16: 0.5}
"""The largest difference of two tokens' logits that rounding may turn over: where a text may part from plain
`generate`'s, and what counts as a tie for the last place of the law. bfloat16 has steps of 0.125 from 16 to 32, and a
block of tokens moves each of the two by a step or two. In full precision no text may part."""
ALPHA = 1e-3
"""The chance that some law test of a verdict fails by accident is at most this."""
CONTROL_TEMPERATURE = 1.5
"""The control's temperature, as a multiple of the test's."""
LAW_PROMPTS, CANDIDATES, PILOT_DRAWS = 2, 12, 32
WINDOW, CONTINUED = 16, 4
GREEDY = sampling_options(0.0)
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True)
class Divergence:
    """Where a text parts from plain `generate`'s.

    Args:
        prompt: its place in the prompts.
        position: new tokens before that place.
        expected: plain `generate`'s token, as text; None where its text ends.
        got: the other token.
        gap: how far apart the two are in plain `generate`'s scores (sampled, with -log of their noise added); infinite
            where one text ends.
    """

    prompt: int
    position: int
    expected: str | None
    got: str | None
    gap: float


@dataclass(frozen=True)
class LawTest:
    """One test of the law of the first `STEPS` tokens after one context, and of its control.

    Args:
        prompt: place of the prompt that the context is made from.
        temperature: of the sampling.
        draws: sampled texts, and as many of the control.
        p_value: chance of counts at least as far from the target's law.
        control_p_value: the same for the control.
        threshold: what both are compared with.
        accepted: accepted draft tokens.
        rejected: draft tokens that were judged and not accepted.
    """

    prompt: int
    temperature: float
    draws: int
    p_value: float
    control_p_value: float
    threshold: float
    accepted: int
    rejected: int


@dataclass(frozen=True)
class Finding:
    """What one check of one strategy showed, in words and in numbers."""

    label: str
    check: str
    passed: bool
    detail: str
    divergences: tuple[Divergence, ...] = ()
    law_tests: tuple[LawTest, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """All findings."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Every check of every strategy passed."""
        return all(each.passed for each in self.findings)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.passed:
            labels = ", ".join(dict.fromkeys(each.label for each in self.findings))
            return f"Lossless, as far as {len(self.findings)} checks can tell: {labels}."
        failed = [each for each in self.findings if not each.passed]
        first = f"{failed[0].label}, {failed[0].check}: {failed[0].detail}"
        return f"Not verified as lossless, {len(failed)} of {len(self.findings)} checks did not pass: {first}."

    def table(self) -> Table:
        """A row per finding."""
        table = Table("strategy", "check", "result", "what was seen")
        for each in self.findings:
            table.add_row(each.label, each.check, "passed" if each.passed else "NOT PASSED", each.detail)
        return table


def verify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    configs: Sequence[SpecDecConfig],
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    samples: int | None = None,
    seed: int = 0,
) -> Verdict:
    """Check each configuration against plain `generate`. Enables the model; leaves the random generator alone.

    A configuration that leaves its schedule open is checked with as many draft tokens in every round: a schedule that
    finds that drafting does not pay here would leave nothing to check.

    Args:
        prompts: user messages, or plain text where the tokenizer has no chat template.
        max_new_tokens: longest text that is compared.
        samples: draws per law test; None: as many as it takes (`law.draws_needed`).
        seed: of all sampling.

    Raises:
        SpecDecError: when there is nothing to compare, or the model has no fixed law.
    """
    for name, given in (("strategies", configs), ("prompts", prompts)):
        if not given:
            raise SpecDecError(f"verify got no {name}, so there is nothing to compare; give at least one.")
    if samples is not None and samples < 1:
        raise SpecDecError(
            f"samples={samples} is no number of draws; give at least 1, or None for a power calculation."
        )
    if max_new_tokens <= STEPS:
        raise SpecDecError(f"max_new_tokens={max_new_tokens} leaves drafts no room; give at least {STEPS + 1}.")
    if model.training:
        raise SpecDecError("A model in training mode has no fixed law; call model.eval() first.")
    configs = [each if each.schedule is not None else replace(each, schedule=Constant.name) for each in configs]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        plain = _Plain(enable(model), tokenizer, prompts, max_new_tokens, seed)
        laws = sum(_keeps_law_only(each) for each in configs)
        threshold = ALPHA / max(1, laws * min(LAW_PROMPTS, len(prompts)))
        return Verdict(tuple(each for config in configs for each in _findings(plain, config, samples, threshold)))


def _keeps_law_only(config: SpecDecConfig) -> bool:
    verifier = VERIFIERS[config.verifier]
    return verifier.lossless and not verifier.uses_noise


def _findings(plain: "_Plain", config: SpecDecConfig, samples: int | None, threshold: float) -> Iterator[Finding]:
    """The checks that a configuration's verifier asks for."""
    if not VERIFIERS[config.verifier].lossless:
        detail = f"{config.verifier!r} is lossy: its text may be another than the target's"
        yield Finding(_label(config), "verifier", False, detail)
        return
    yield _check_text(plain, config, sampled=False)
    if _keeps_law_only(config):
        yield _check_law(plain, config, samples, threshold)
    else:
        yield _check_text(plain, config, sampled=True)


def _label(config: SpecDecConfig) -> str:
    length = "" if config.max_draft_tokens is None else f", max_draft_tokens={config.max_draft_tokens}"
    return f"{config.resolved.name} (verifier={config.verifier}{length})"


class _Plain:
    """The model, and what plain `generate` says to each prompt, asked once."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, seed: int):
        self.model, self.tokenizer, self.max_new_tokens, self.seed = model, tokenizer, max_new_tokens, seed
        self.prompts = [_encode(tokenizer, each) for each in prompts]
        self.tie = NEAR_TIE.get(model.dtype, -1.0)
        self._texts: dict[tuple[int, bool], tuple[list[int], torch.Tensor]] = {}
        self._laws: dict[int, Law] = {}
        self._controls: dict[tuple[int, int], Draws] = {}

    def generate(
        self, prompt: int, sampled: bool, config: SpecDecConfig | None, **options: Any
    ) -> tuple[Any, list[int]]:
        """`generate`'s output on a prompt, sampled with the prompt's own seed, and its new tokens."""
        ids = torch.tensor([self.prompts[prompt]], device=self.model.device)
        torch.manual_seed(self.seed + prompt)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_strategy=config,
            max_new_tokens=self.max_new_tokens,
            return_dict_in_generate=True,
            **(SAMPLED if sampled else GREEDY),
            **options,
        )
        return output, output.sequences[0, ids.shape[1] :].tolist()

    def text(self, prompt: int, sampled: bool) -> tuple[list[int], torch.Tensor]:
        """The new tokens of plain `generate`, and the generator's state after them."""
        if (prompt, sampled) not in self._texts:
            tokens = self.generate(prompt, sampled, None)[1]
            self._texts[prompt, sampled] = (tokens, self.generator_state())
        return self._texts[prompt, sampled]

    def generator_state(self) -> torch.Tensor:
        """The state of the generator that sampling on the model's device draws from."""
        device = self.model.device
        return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def divergence(self, prompt: int, sampled: bool, tokens: list[int]) -> Divergence | None:
        """Where these tokens part from plain `generate`'s; None where they do not."""
        pairs = zip_longest(self.text(prompt, sampled)[0], tokens)
        position, pair = next(((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1]), (0, None))
        if pair is None:
            return None
        expected, got = (None if token is None else self.tokenizer.decode([token]) for token in pair)
        if None in pair:
            return Divergence(prompt, position, expected, got, math.inf)
        scores = self.generate(prompt, sampled, None, output_scores=True)[0].scores[position]
        if sampled:  # the token is the argmax of softmax(scores) / noise
            torch.manual_seed(self.seed + prompt)
            draws = [torch.empty_like(scores, dtype=torch.float32).exponential_() for _ in range(position + 1)]
            scores = scores - draws[-1].log()
        return Divergence(prompt, position, expected, got, abs(float(scores[0, pair[0]] - scores[0, pair[1]])))

    def law(self, prompt: int) -> Law:
        """The law after the last `WINDOW` tokens of prompt and greedy answer, said and then begun again.

        A lookup finds what followed the first time, and the target finds it plausible.
        """
        if prompt not in self._laws:
            said = self.prompts[prompt] + self.text(prompt, False)[0]
            special = set(self.tokenizer.all_special_ids)
            window = ([token for token in said if token not in special] or said)[-WINDOW:]
            context = window + window[: max(1, len(window) - CONTINUED)]
            self._laws[prompt] = Law(self.model, context, NEAR_TIE.get(self.model.dtype, 1e-4))
        return self._laws[prompt]

    def draw(self, prompt: int, config: SpecDecConfig, draws: int, seed: int) -> Draws:
        """Sampled texts of a configuration."""
        law = self.law(prompt)
        torch.manual_seed(self.seed + seed)
        return law.draw(config, draws, law.temperature)

    def control(self, prompt: int, draws: int) -> Draws:
        """Texts of the target itself at the control's temperature."""
        if (prompt, draws) not in self._controls:
            law = self.law(prompt)
            torch.manual_seed(self.seed + 1)
            self._controls[prompt, draws] = law.draw(None, draws, law.temperature * CONTROL_TEMPERATURE)
        return self._controls[prompt, draws]


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, in the chat template where there is one."""
    if tokenizer.chat_template is None:
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        messages = [{"role": "user", "content": prompt}]
        ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    if not ids:
        raise SpecDecError(f"The prompt {prompt!r} has no tokens; give one with some text.")
    return ids


def _check_text(plain: _Plain, config: SpecDecConfig, sampled: bool) -> Finding:
    """Compare all texts with plain `generate`'s and, where sampled, the generator's state after them."""
    divergences, disturbed, drafted, count = [], 0, 0, len(plain.prompts)
    for prompt in range(count):
        output, tokens = plain.generate(prompt, sampled, config)
        state = plain.generator_state()
        drafted += output.speculation.num_draft_tokens
        parted = plain.divergence(prompt, sampled, tokens)
        if parted is not None:
            divergences.append(parted)
        else:
            disturbed += not torch.equal(state, plain.text(prompt, sampled)[1])
    passed = bool(drafted) and not disturbed and all(each.gap <= plain.tie for each in divergences)
    detail = f"{count - len(divergences)} of {count} texts identical, {drafted} tokens drafted"
    if divergences:
        worst = max(divergences, key=lambda each: each.gap)
        reason = "a near-tie" if worst.gap <= plain.tie else "more than rounding explains"
        detail += (
            f"; furthest apart: {worst.got!r} for {worst.expected!r} after {worst.position} tokens on prompt "
            f"{worst.prompt}, by {worst.gap:.3g}, {reason}"
        )
    if disturbed:
        detail += f"; the random generator was left in another state after {disturbed} of them"
    if not drafted:
        detail += ", so nothing is shown"
    check = "text of the seed" if sampled else "greedy text"
    return Finding(_label(config), check, passed, detail, tuple(divergences))


def _check_law(plain: _Plain, config: SpecDecConfig, samples: int | None, threshold: float) -> Finding:
    """Test the law where most draft tokens are both accepted and rejected, as a few draws show."""
    ranked = []
    for prompt in range(min(CANDIDATES, len(plain.prompts))):
        law = plain.law(prompt)
        here, control = (law.probabilities(law.temperature * times) for times in (1.0, CONTROL_TEMPERATURE))
        if draws := samples or draws_needed(here, control, threshold):
            pilot = plain.draw(prompt, config, PILOT_DRAWS, seed=3)
            ranked.append((min(pilot.accepted, pilot.rejected), pilot.accepted, -prompt, draws))
    tests = []
    for *_, place, draws in sorted(ranked, reverse=True)[:LAW_PROMPTS]:
        law, drawn = plain.law(-place), plain.draw(-place, config, draws, seed=2)
        here = law.probabilities(law.temperature)
        p_value, control_p_value = g_test(here, drawn.counts), g_test(here, plain.control(-place, draws).counts)
        tests.append(
            LawTest(
                -place, law.temperature, draws, p_value, control_p_value, threshold, drawn.accepted, drawn.rejected
            )
        )
    return Finding(_label(config), "law of the text", *_judge(tests), law_tests=tuple(tests))


def _judge(tests: Sequence[LawTest]) -> tuple[bool, str]:
    """Whether law tests passed, and what they saw."""
    if not tests:
        return False, "on no prompt can the control be told apart, so nothing is shown; give other prompts"
    accepted, rejected = sum(each.accepted for each in tests), sum(each.rejected for each in tests)
    p_values = ", ".join(f"{each.p_value:.2g}" for each in tests)
    controls = max(each.control_p_value for each in tests)
    detail = (
        f"p = {p_values} in {sum(each.draws for each in tests)} draws (fails below {tests[0].threshold:.2g}; the "
        f"control has {controls:.2g}), {accepted} draft tokens accepted and {rejected} rejected"
    )
    if any(each.p_value < each.threshold for each in tests):
        return False, f"{detail}: not the target's law"
    if any(each.control_p_value >= each.threshold for each in tests):
        return False, f"{detail}: the control passes as well, so nothing is shown; take more samples"
    if not accepted:
        return False, f"{detail}: without an accepted draft nothing is shown; give prompts that repeat themselves"
    return True, detail
