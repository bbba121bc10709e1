"""`hf-specdec verify`: what is lossless passes, and each way of not being so is found."""

import copy
import dataclasses
import itertools
import math
import string
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import randomise, without_special_tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec import VERIFIERS, Drafter, DraftModel, DraftStrategy, DraftTree, SpecDecConfig, SpecDecError
from hf_specdec.verify import Acceptance, Rule
from hf_specdec_eval import law as law_module
from hf_specdec_eval.law import EDGE, Law, draws_needed, g_test, power
from hf_specdec_eval.lossless import Verdict, verify

WORDS = string.ascii_lowercase[:12]
PROMPTS = [
    "c a f e c a f e c a f",
    "a a b a a b a a b a c",
    "g h i g h j g h k g h",
    "d e a d b e e f d e a d b e e f",
]


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama whose vocabulary is small enough for lookups to be plausible."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return without_special_tokens(randomise(LlamaForCausalLM(config), 0.5, seed))


def noisy(model: LlamaForCausalLM, share: float = 0.3) -> LlamaForCausalLM:
    """A copy with noise on its weights, whose drafts are accepted now and then."""
    other = randomise(copy.deepcopy(model), 0.5, seed=77)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters()):
            mine.mul_(share).add_(theirs * (1 - share))
    return other


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def target() -> LlamaForCausalLM:
    return make_model(0)


def strategies(target: LlamaForCausalLM) -> dict[str, Any]:
    return {"suffix": "suffix", "prompt_lookup": "prompt_lookup", "draft_model": DraftModel(noisy(target))}


def check(model: Any, tokenizer: Any, strategy: Any, verifier: str, **options: Any) -> Verdict:
    config = SpecDecConfig(strategy=strategy, verifier=verifier)
    return verify(model, tokenizer, [config], PROMPTS, **{"max_new_tokens": 12, **options})


def patch(monkeypatch: pytest.MonkeyPatch, name: str, rule: Rule, **facts: bool) -> None:
    """Register a rule under a name, otherwise like `rejection` unless that name is taken."""
    entry = VERIFIERS.get(name, VERIFIERS["rejection"])
    monkeypatch.setitem(VERIFIERS, name, dataclasses.replace(entry, rule=rule, **facts))


def failed(verdict: Verdict) -> list[str]:
    return [each.check for each in verdict.findings if not each.passed]


@pytest.mark.parametrize("verifier", [name for name, each in VERIFIERS.items() if each.lossless])
@pytest.mark.parametrize("strategy", ["suffix", "prompt_lookup", "draft_model"])
def test_lossless_verifiers_pass(target, tokenizer, strategy, verifier):
    verdict = check(target, tokenizer, strategies(target)[strategy], verifier)
    assert verdict.passed, verdict.sentence
    assert len(verdict.findings) == 2
    assert all(not each.divergences for each in verdict.findings)
    assert "Lossless" in verdict.sentence and strategy in verdict.sentence


def test_several_configurations_share_the_chance_of_a_false_alarm(target, tokenizer):
    configs = [
        SpecDecConfig(strategy=DraftModel(noisy(target)), verifier="rejection", max_draft_tokens=k) for k in (1, 2)
    ]
    verdict = verify(target, tokenizer, configs, PROMPTS, max_new_tokens=16)
    assert verdict.passed, verdict.sentence
    tests = [test for each in verdict.findings for test in each.law_tests]
    assert {test.threshold for test in tests} == {1e-3 / len(tests)} and len(tests) == 4
    assert all(test.control_p_value < test.threshold <= test.p_value for test in tests)
    assert all(test.accepted and test.rejected for test in tests)
    assert len({each.label for each in verdict.findings}) == 2


def wrong_residual(tree, scores, sampling, noise):
    """A rejected token is replaced by a draw from p, where it should be one from max(p - q, 0)."""
    right = VERIFIED(tree, scores, sampling, noise)
    if not sampling:
        return right
    law = scores.float().softmax(-1)[torch.arange(len(scores)), right.count]
    return Acceptance(right.path, right.count, torch.multinomial(law, 1).squeeze(1))


def accept_likely(tree, scores, sampling, noise):
    """Accept whatever has a probability of at least 0.1."""
    law = scores.float().softmax(-1)
    drafted = law[:, :-1].gather(2, tree.tokens[:, 1:].unsqueeze(2)).squeeze(2)
    count = ((drafted >= 0.1) & (tree.parents[:, 1:] >= 0)).long().cumprod(1).sum(1)
    nodes = torch.arange(1, tree.size).expand(len(law), -1)
    path = torch.where(nodes <= count.unsqueeze(1), nodes, -1)
    last = law[torch.arange(len(law)), count]
    return Acceptance(path, count, torch.multinomial(last, 1).squeeze(1) if sampling else last.argmax(-1))


VERIFIED = VERIFIERS["rejection"].rule
EXACT = VERIFIERS["exact"].rule


@pytest.mark.parametrize("strategy", ["suffix", "prompt_lookup", "draft_model"])
def test_a_wrong_residual_fails(target, tokenizer, monkeypatch, strategy):
    patch(monkeypatch, "rejection", wrong_residual)
    verdict = check(target, tokenizer, strategies(target)[strategy], "rejection")
    assert failed(verdict) == ["law of the text"]
    assert "not the target's law" in verdict.sentence


def wrong_bonus(tree, scores, sampling, noise):
    """The token after a draft that was accepted whole is the likeliest one, where it should be drawn."""
    right = VERIFIED(tree, scores, sampling, noise)
    whole = (right.count == (tree.parents >= 0).sum(1)) & (right.count > 0)
    likeliest = scores[torch.arange(len(scores)), right.count].argmax(-1)
    return Acceptance(right.path, right.count, torch.where(whole, likeliest, right.next_token))


def test_a_wrong_token_after_a_whole_draft_fails(target, tokenizer, monkeypatch):
    """It takes more draws than the control does: few of the tokens are wrong."""
    patch(monkeypatch, "rejection", wrong_bonus)
    verdict = check(target, tokenizer, "prompt_lookup", "rejection", samples=1000)
    assert failed(verdict) == ["law of the text"]


@dataclasses.dataclass(frozen=True)
class Argmax(DraftStrategy):
    """Drafts the likeliest tokens of a model and says that they were drawn from its softmax."""

    model: Any
    name: ClassVar[str] = "argmax"
    sampled: ClassVar[bool] = True

    def build(self, target: Any, request: Any) -> Drafter:
        drafter = DraftModel(self.model).build(target, request)
        propose = drafter.propose

        def likeliest(view, plan):
            tree = propose(view, plan)
            if tree.probs is None:
                return tree
            tokens = torch.cat([tree.tokens[:, :1], tree.probs[:, :-1].argmax(-1)], 1)
            return DraftTree(tokens, tree.parents, tree.sampled, tree.probs)

        drafter.propose = likeliest
        return drafter


def test_an_argmax_draft_scored_by_its_softmax_fails(target, tokenizer):
    verdict = check(target, tokenizer, Argmax(noisy(target)), "rejection")
    assert failed(verdict) == ["law of the text"]


def test_a_lossy_verifier_fails_by_name(target, tokenizer, monkeypatch):
    patch(monkeypatch, "likely", accept_likely, lossless=False)
    verdict = check(target, tokenizer, "suffix", "likely")
    assert failed(verdict) == ["verifier"]
    assert "'likely' is lossy" in verdict.sentence


def test_a_lossy_verifier_that_claims_to_be_lossless_fails(target, tokenizer, monkeypatch):
    patch(monkeypatch, "likely", accept_likely, lossless=True)
    assert "law of the text" in failed(check(target, tokenizer, "suffix", "likely"))


@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_greedy_token_fails(target, tokenizer, monkeypatch, verifier, dtype):
    rule = VERIFIERS[verifier].rule

    def wrong(tree, scores, sampling, noise):
        right = rule(tree, scores, sampling, noise)
        worst = scores[torch.arange(len(scores)), right.count].argmin(-1)
        return right if sampling else Acceptance(right.path, right.count, worst)

    patch(monkeypatch, verifier, wrong)
    verdict = check(target.to(dtype), tokenizer, "suffix", verifier)
    assert failed(verdict) == ["greedy text"]
    parted = verdict.findings[0].divergences
    assert [each.prompt for each in parted] == list(range(len(PROMPTS)))
    assert max(each.gap for each in parted) > 0.25 and "more than rounding explains" in verdict.sentence


def test_another_seed_fails(target, tokenizer, monkeypatch):
    patch(
        monkeypatch,
        "exact",
        lambda tree, scores, sampling, noise: EXACT(tree, scores, sampling, sampling and noise.roll(1, 2)),
    )
    assert failed(check(target, tokenizer, "suffix", "exact")) == ["text of the seed"]


def test_a_disturbed_generator_fails(target, tokenizer):
    generate = hf_specdec.enable(target).generate

    def disturbing(*args, assistant_strategy=None, **options):
        output = generate(*args, assistant_strategy=assistant_strategy, **options)
        if assistant_strategy is not None:
            torch.rand(1)
        return output

    target.generate = disturbing
    verdict = check(target, tokenizer, "suffix", "exact")
    assert "text of the seed" in failed(verdict)
    assert "left in another state" in verdict.findings[1].detail


def turn_near_ties_over(tree, scores, sampling, noise):
    """Where the two best tokens are within 0.2, take the second one."""
    values = scores.float() - noise.log() if sampling else scores.float()
    best = values.topk(2, -1)
    close = best.values[..., 0] - best.values[..., 1] <= 0.2
    choice = torch.where(close, best.indices[..., 1], best.indices[..., 0])
    return EXACT(tree, torch.nn.functional.one_hot(choice, scores.shape[-1]).float(), False, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_near_ties_are_listed_and_allowed_in_half_precision_only(target, tokenizer, monkeypatch, dtype):
    patch(monkeypatch, "exact", turn_near_ties_over)
    verdict = check(target.to(dtype), tokenizer, "suffix", "exact")
    half = dtype is not torch.float32
    for finding in verdict.findings:
        assert finding.divergences and finding.passed is half
        assert all(each.gap <= 0.25 and each.expected != each.got for each in finding.divergences)
        assert all(each.expected in WORDS and each.got in WORDS for each in finding.divergences)
    assert verdict.passed is half


@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
def test_half_precision_passes(target, tokenizer, verifier):
    verdict = check(target.bfloat16(), tokenizer, DraftModel(noisy(target)), verifier)
    assert verdict.passed, verdict.sentence


def test_a_text_that_ends_elsewhere_fails_in_half_precision_too(target, tokenizer):
    generate = hf_specdec.enable(target.bfloat16()).generate

    def shorter(*args, assistant_strategy=None, **options):
        options["max_new_tokens"] -= assistant_strategy is not None
        return generate(*args, assistant_strategy=assistant_strategy, **options)

    target.generate = shorter
    verdict = check(target, tokenizer, "suffix", "exact")
    assert failed(verdict) == ["greedy text", "text of the seed"]
    assert all(each.gap == math.inf and each.got is None for each in verdict.findings[0].divergences)


def test_too_few_samples_show_nothing(target, tokenizer):
    verdict = check(target, tokenizer, "suffix", "rejection", samples=30)
    assert failed(verdict) == ["law of the text"]
    assert "the control passes as well" in verdict.sentence


@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
def test_a_strategy_that_drafts_nothing_shows_nothing(target, tokenizer, verifier):
    config = SpecDecConfig(strategy="suffix", verifier=verifier, max_draft_tokens=0)
    verdict = verify(target, tokenizer, [config], PROMPTS[:2], max_new_tokens=8)
    assert len(failed(verdict)) == 2
    assert all("nothing is shown" in each.detail for each in verdict.findings)


def test_the_model_and_the_generator_are_as_before(target, tokenizer):
    before, config = torch.get_rng_state(), target.generation_config
    kept = config.to_dict()
    assert check(target, tokenizer, "suffix", "rejection").passed
    assert torch.equal(torch.get_rng_state(), before)
    assert target.generation_config is config and config.to_dict() == kept


def test_the_defaults_and_the_chat_template_of_a_model(target, tokenizer):
    """Penalties and ends apply to compared texts, and the law is tested without them."""
    target.generation_config = GenerationConfig(
        repetition_penalty=3.0, no_repeat_ngram_size=5, top_p=0.5, temperature=0.7, do_sample=True, eos_token_id=7
    )
    tokenizer.chat_template = "a b {{ messages[0]['content'] }}{% if add_generation_prompt %} c{% endif %}"
    for verifier in ("exact", "rejection"):
        verdict = check(target, tokenizer, DraftModel(noisy(target)), verifier)
        assert verdict.passed, verdict.sentence


def test_requests_that_cannot_be_carried_out(target, tokenizer):
    config = SpecDecConfig(strategy="suffix")
    for words, arguments, options in (
        ("no prompts", ([config], []), {}),
        ("no strategies", ([], PROMPTS), {}),
        ("has no tokens", ([config], [""]), {}),
        ("samples=0", ([config], PROMPTS), {"samples": 0}),
        ("max_new_tokens=3", ([config], PROMPTS), {"max_new_tokens": 3}),
    ):
        with pytest.raises(SpecDecError, match=words):
            verify(target, tokenizer, *arguments, **options)
    with pytest.raises(SpecDecError, match="training mode"):
        verify(target.train(), tokenizer, [config], PROMPTS)


def enumerated(model: Any, context: list[int], temperature: float) -> dict[tuple[int, ...], float]:
    """The reference: the probability of every possible continuation, each written out in full."""
    cells = torch.tensor(list(itertools.product(range(len(WORDS)), repeat=law_module.STEPS)))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(context).expand(len(cells), -1), cells], 1)).logits.double()
    rows = logits[:, len(context) - 1 : -1] / temperature
    floor = rows.topk(law_module.TOP_K, -1).values[..., -1:]
    probs = rows.masked_fill(rows < floor - 1e-5, -math.inf).softmax(-1)
    joint = probs.gather(2, cells.unsqueeze(2)).prod(1).squeeze(1).tolist()
    return {tuple(cell): probability for cell, probability in zip(cells.tolist(), joint) if probability}


def test_the_law_is_that_of_all_continuations(target):
    context = [1, 2, 3, 1, 2]
    law = Law(target, context, margin=0.0)
    found, expected = law.probabilities(0.7), enumerated(target, context, 0.7)
    assert found.keys() == expected.keys() and len(found) == law_module.TOP_K**law_module.STEPS
    assert all(found[cell] == pytest.approx(expected[cell]) for cell in found)
    assert all(law.cell_of([*cell, 5]) == cell for cell in found)
    strange = next(token for token in range(len(WORDS)) if all(cell[0] != token for cell in found))
    assert g_test(found, {law.cell_of([strange, 0, 0, 0]): 1}) == 0.0


def test_tokens_that_are_tied_for_the_last_place_are_one(target):
    """A margin that takes in several tokens; no text of theirs is impossible, and no probability is lost."""
    law = Law(target, [1, 2, 3, 1, 2], margin=0.3)
    cells = law.probabilities(0.7)
    assert sum(cells.values()) == pytest.approx(1)
    assert any(EDGE in cell for cell in cells) and all(EDGE not in cell[:-1] for cell in cells)
    sums = dict.fromkeys(cells, 0.0)
    for text, probability in enumerated(target, law.context, 0.7).items():
        sums[law.cell_of(text)] += probability
    assert all(sums[cell] == pytest.approx(cells[cell]) for cell in cells)


def test_the_power_calculation_holds_in_simulation(target):
    law = Law(target, [1, 2, 3, 1, 2], margin=0.0)
    here, other = law.probabilities(law.temperature), law.probabilities(1.5 * law.temperature)
    draws = draws_needed(here, other, threshold=1e-3)
    assert power(here, other, draws // 2, 1e-3) < law_module.POWER <= power(here, other, draws, 1e-3)
    generator, rejected = np.random.default_rng(0), {}
    for name, truth, runs in (("law", here, 2000), ("control", other, 500)):
        samples = generator.multinomial(draws, list(truth.values()), size=runs)
        rejected[name] = np.mean([g_test(here, dict(zip(here, counts))) < 1e-3 for counts in samples])
    assert rejected["control"] >= 0.99
    assert rejected["law"] <= 5e-3  # 2 of 2000 are expected; 11 or more come once in 10^5


def test_laws_that_are_alike_cannot_be_told_apart(target):
    here = Law(target, [1, 2, 3], margin=0.0).probabilities(1.0)
    assert draws_needed(here, here, threshold=1e-3) is None
    assert power({(0,): 1.0}, {(0,): 1.0}, 1000, 1e-3) == 0.0
