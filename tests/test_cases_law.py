"""Cases 28 and 29: the law of what is emitted, over many draws, with controls that must fail."""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import pytest
import torch
from cases import SEED
from conftest import randomise, without_special_tokens
from scipy.stats import chisquare
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, set_seed

import hf_specdec
from hf_specdec import SpecDecConfig
from hf_specdec.drafters import DraftModel
from hf_specdec.drafters.base import Drafter, DraftStrategy
from hf_specdec.tree import DraftTree

LAW = (0.6, 0.4)
ROWS, STEPS = 1000, 21
PASS, FAIL = 1e-3, 1e-9


@functools.cache
def coin() -> Any:
    """A target of two tokens whose law is `LAW` after any prefix."""
    config = GPT2Config(
        vocab_size=2, n_positions=64, n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=False, bos_token_id=0
    )
    model = randomise(GPT2LMHeadModel(config), 0.2, seed=0)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.eye(8)[0])
        model.lm_head.weight[:, 0] = torch.tensor(LAW).log()
    return hf_specdec.enable(without_special_tokens(model))


@dataclasses.dataclass(frozen=True)
class Argmax(DraftStrategy):
    """Drafts the likelier token. `claimed` says that it was drawn from the law, which it was not."""

    claimed: bool = False
    default_draft_tokens: ClassVar[int] = 4
    sampled: ClassVar[bool] = True

    def build(self, target: Any, request: Any) -> Drafter:
        return _ArgmaxDrafter(self.claimed)


class _ArgmaxDrafter(Drafter):
    def __init__(self, claimed: bool):
        self.claimed = claimed

    def propose(self, view, plan):
        law = torch.tensor(LAW).expand(view.rows, plan.depth + 1, 2)
        tree = DraftTree.from_chains(view.roots(), [[0] * plan.depth] * view.rows, view.device)
        return dataclasses.replace(tree, sampled=(tree.parents >= 0) & self.claimed, probs=law)


def draws(model: Any, strategy: Any, verifier: str, rows: int, steps: int, **options: Any) -> torch.Tensor:
    """New ids of shape `(rows, steps)`, with the strategy's default for one row, at most 6 draft tokens."""
    config = None if strategy is None else SpecDecConfig(strategy=strategy, verifier=verifier)
    if config is not None:
        config = dataclasses.replace(config, max_draft_tokens=min(6, config.draft_tokens()))
    set_seed(SEED)
    ids = model.generate(
        torch.tensor([[1, 0]]), attention_mask=torch.ones(1, 2, dtype=torch.long), do_sample=True,
        max_new_tokens=steps, num_return_sequences=rows, **{"top_k": 0, **options},
        assistant_strategy=config,
    )  # fmt: skip
    return ids[:, 2:]


def p_value(ids: torch.Tensor, law: dict[tuple[int, ...], float]) -> float:
    """Chi-square test of how often each sequence came against its probability; 0 if an impossible one came."""
    keys = [key for key, probability in law.items() if probability > 0]
    found = dict.fromkeys(keys, 0)
    for key in map(tuple, ids.tolist()):
        if key not in found:
            return 0.0
        found[key] += 1
    expected = [law[key] * len(ids) for key in keys]
    rare = [index for index, count in enumerate(expected) if count < 5]
    common = [index for index in range(len(keys)) if index not in rare]
    observed = [found[keys[index]] for index in common] + ([sum(found[keys[index]] for index in rare)] if rare else [])
    wanted = [expected[index] for index in common] + ([sum(expected[index] for index in rare)] if rare else [])
    return float(chisquare(observed, wanted).pvalue)


def coin_p_values(ids: torch.Tensor) -> list[float]:
    """Single tokens, and pairs of neighbours, which see a dependence that singles do not."""
    singles = {(token,): LAW[token] for token in (0, 1)}
    pairs = {(first, second): LAW[first] * LAW[second] for first in (0, 1) for second in (0, 1)}
    even = ids[:, : ids.shape[1] // 2 * 2].reshape(-1, 2)
    odd = ids[:, 1 : (ids.shape[1] - 1) // 2 * 2 + 1].reshape(-1, 2)
    return [p_value(ids.reshape(-1, 1), singles), p_value(even, pairs), p_value(odd, pairs)]


@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
def test_case_28_law_of_an_argmax_draft(verifier):
    ids = draws(coin(), Argmax(), verifier, ROWS, STEPS)
    assert ids.numel() >= 20_000
    assert min(coin_p_values(ids)) > PASS


def test_case_28_plain_generate_passes_the_same_test():
    assert min(coin_p_values(draws(coin(), None, "exact", ROWS, STEPS))) > PASS


def test_case_28_control_an_argmax_draft_scored_by_its_softmax():
    """The same draft with the claim that it was drawn from the law: always accepted, hence biased."""
    ids = draws(coin(), Argmax(claimed=True), "rejection", ROWS, STEPS)
    assert max(coin_p_values(ids)[:1]) < FAIL


WORDS = 4


@functools.cache
def small(seed: int) -> Any:
    """A Llama of four tokens."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return without_special_tokens(randomise(LlamaForCausalLM(config), 0.5, seed))


OPTIONS = {"temperature": 0.6, "top_k": 3}


def joint_law(model: Any, steps: int, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of the prompt, by enumeration in float64."""
    law = {}
    for key in itertools.product(range(WORDS), repeat=steps):
        with torch.no_grad():
            logits = model(torch.tensor([[1, 0, *key]])).logits[0, 1:-1].double() / temperature
        floor = logits.topk(top_k or WORDS, -1).values[:, -1:]
        probs = logits.masked_fill(logits < floor, float("-inf")).softmax(-1)
        law[key] = float(probs.gather(1, torch.tensor(key).unsqueeze(1)).prod())
    return law


@dataclasses.dataclass(frozen=True)
class Mislabelled(DraftStrategy):
    """Draws as the inner strategy does, but hands over the law at another temperature."""

    inner: DraftStrategy
    exponent: float

    sampled: ClassVar[bool] = True

    def build(self, target: Any, request: Any) -> Drafter:
        drafter = self.inner.build(target, request)
        propose = drafter.propose

        def mislabelled(view, plan):
            tree = propose(view, plan)
            if tree.probs is None:
                return tree
            wrong = tree.probs**self.exponent
            return dataclasses.replace(tree, probs=wrong / wrong.sum(-1, keepdim=True).clamp(min=1e-30))

        drafter.propose = mislabelled
        return drafter


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, OPTIONS], ids=str)
@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
def test_case_29_law_of_a_draft_model_under_processors(verifier, options):
    options = {"temperature": 1.0, "top_k": 0, **options}
    target = hf_specdec.enable(small(0))
    law = joint_law(target, 3, **options)
    ids = draws(target, DraftModel(small(1)), verifier, 6000, 3, **options)
    assert p_value(ids, law) > PASS


def test_case_29_control_a_law_that_is_not_the_one_drawn_from():
    target = hf_specdec.enable(small(0))
    ids = draws(target, Mislabelled(DraftModel(small(1)), 0.4), "rejection", 6000, 3, **OPTIONS)
    assert p_value(ids, joint_law(target, 3, **OPTIONS)) < FAIL


def test_case_29_control_a_right_label_passes_through_the_same_wrapper():
    target = hf_specdec.enable(small(0))
    ids = draws(target, Mislabelled(DraftModel(small(1)), 1.0), "rejection", 6000, 3, **OPTIONS)
    assert p_value(ids, joint_law(target, 3, **OPTIONS)) > PASS


@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
def test_case_29_a_ragged_batch_with_repeats(verifier):
    """Rows of a batch accept different counts; each still has its own law."""
    target = hf_specdec.enable(small(0))
    prompts = torch.tensor([[1, 0], [0, 0], [2, 3]])
    mask = torch.tensor([[1, 1], [0, 1], [1, 1]])
    set_seed(SEED)
    ids = target.generate(
        prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=3, num_return_sequences=4000,
        assistant_strategy=SpecDecConfig(strategy=DraftModel(small(1)), verifier=verifier),
    )[:4000, 2:]  # fmt: skip
    assert p_value(ids, joint_law(target, 3, 1.0, 0)) > PASS
