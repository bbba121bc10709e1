"""Layer skip: same text whatever part of the target drafts, one cache, and layers that run once.

The tiny models are made to be what early exit needs: their upper layers add little, so the first ones are often right.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import quieten, snapshot
from conftest import FAMILIES, WINDOWED_FAMILIES, new_tokens, plain, prompt, randomise, tiny, without_special_tokens
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec import DraftStrategy, DraftTree, LayerSkip, SpecDecConfig, SpecDecError, UnsupportedModelError
from hf_specdec.cache import SlotCache
from hf_specdec.control.fixed import FixedController
from hf_specdec.layers import attention_of, decoder_layers, mlp_of, replaced
from hf_specdec.partial import PartialTarget
from hf_specdec.target import Target

SEED = 11
LAYERS = 4
WAYS = [pytest.param(False, id="greedy"), pytest.param(True, id="sample")]
BATCHES = [pytest.param(1, id="one"), pytest.param(3, id="ragged")]
FORMS = [LayerSkip(exit_layer=1), LayerSkip(exit_layer=3), LayerSkip(skip_attention=[1, 2], skip_mlp=[2])]


@functools.cache
def llama(quiet_from: int = 3) -> PreTrainedModel:
    """A Llama of four layers, never enabled. Not to be changed."""
    config = LlamaConfig(**{**FAMILIES["llama"].options, "num_hidden_layers": LAYERS})
    model = randomise(LlamaForCausalLM(config), 0.4, seed=4)
    return without_special_tokens(quieten(model, quiet_from))


def enabled(quiet_from: int = 3) -> PreTrainedModel:
    """An enabled copy of it."""
    model = LlamaForCausalLM(llama(quiet_from).config)
    model.load_state_dict(llama(quiet_from).state_dict())
    return hf_specdec.enable(without_special_tokens(model))


def check(
    reference: PreTrainedModel, model: PreTrainedModel, inputs: Any, strategy: Any, **options: Any
) -> hf_specdec.SpeculationStats:
    """Same ids and generator state as plain `generate`. Returns what speculation did."""
    expected = plain(reference, SEED, **inputs, **options)
    state = torch.get_rng_state()
    got = plain(model, SEED, **inputs, **options, assistant_strategy=strategy, return_dict_in_generate=True)
    assert got.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    return got.speculation


# The text


@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("strategy", FORMS, ids=str)
def test_the_text_is_plain_generates(strategy, batch, sample, each_schedule):
    stats = check(llama(), enabled(), prompt(batch), strategy, do_sample=sample, max_new_tokens=30)
    assert (stats.num_draft_tokens > 0 and stats.draft_forwards > 0) or each_schedule == "adaptive"


@pytest.mark.parametrize("family", WINDOWED_FAMILIES)
def test_across_the_edge_of_the_window(family, each_schedule):
    inputs = prompt(3, family)
    config = SpecDecConfig(LayerSkip(exit_layer=1), max_draft_tokens=12)
    check(tiny(family), hf_specdec.enable(tiny(family)), inputs, config, max_new_tokens=40)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.usefixtures("constant_schedule")
def test_the_last_layer_left_out_is_nearly_always_right(batch, sample):
    stats = check(llama(), enabled(), prompt(batch), LayerSkip(exit_layer=3), do_sample=sample, max_new_tokens=40)
    assert stats.draft_acceptance_rate > 0.8
    worse = check(llama(), enabled(), prompt(batch), LayerSkip(exit_layer=1), do_sample=sample, max_new_tokens=40)
    assert worse.draft_acceptance_rate < stats.draft_acceptance_rate


@pytest.mark.parametrize("verifier", ["exact", "rejection", "block"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("constant_schedule")
def test_all_layers_are_always_right(batch, verifier):
    """The draft's law is the target's, so each verifier accepts all of it: also after temperature and truncation."""
    config = SpecDecConfig(LayerSkip(exit_layer=LAYERS), verifier=verifier)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "max_new_tokens": 40}
    options |= {**prompt(batch), "return_dict_in_generate": True}
    output = plain(enabled(), SEED, **options, assistant_strategy=config)
    assert output.speculation.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_the_law_of_a_draft_goes_along(verifier, monkeypatch):
    """Rows of `probs` are the laws that the tokens were drawn from, and they are not the target's noise."""
    trees: list[DraftTree] = []
    verify = Target.verify

    def recorded(self: Target, tree: DraftTree, lengths: Any) -> Any:
        trees.append(tree)
        return verify(self, tree, lengths)

    monkeypatch.setattr(Target, "verify", recorded)
    config = SpecDecConfig(LayerSkip(exit_layer=3), verifier=verifier)
    plain(enabled(), SEED, **prompt(3), do_sample=True, top_k=5, assistant_strategy=config)
    for tree in trees:
        if tree.size == 1:
            continue
        assert tree.probs is not None and bool((tree.sampled == (tree.parents >= 0)).all())
        laws = tree.probs[:, :-1]
        assert torch.allclose(laws.sum(-1), torch.ones(laws.shape[:2])) and int((laws > 0).sum(-1).max()) <= 5
        drawn = laws.gather(2, tree.tokens[:, 1:].unsqueeze(2)).squeeze(2)
        assert bool((drawn[tree.sampled[:, 1:]] > 0).all())


def test_a_row_without_room_beside_one_that_has_some(each_schedule):
    """Absolute positions end where the text ends: a row that is ahead is drafted past them, for nothing."""
    inputs = prompt(3, "gpt2")
    model = tiny("gpt2")
    model.config.n_positions = model.config.max_position_embeddings = 40
    with torch.no_grad():
        table = torch.nn.Embedding(40, model.config.n_embd)
        table.weight.copy_(model.transformer.wpe.weight[:40])
        model.transformer.wpe = table
    model = quieten(model, 1, scale=0.3)
    expected = plain(model, **inputs, max_new_tokens=16)
    for strategy in (LayerSkip(exit_layer=1), LayerSkip(skip_mlp=[1])):
        config = SpecDecConfig(strategy, max_draft_tokens=7)
        assert plain(hf_specdec.enable(model), **inputs, max_new_tokens=16, assistant_strategy=config).tolist() == (
            expected.tolist()
        )


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_states_of_all_layers_when_they_are_asked_for(name):
    """The verify pass then runs all layers, so that there are states of all layers."""
    reference, model = llama(), enabled()
    for each in (reference, model):
        each.set_attn_implementation("eager")
    options = {**prompt(3), name: True, "return_dict_in_generate": True}
    try:
        expected = plain(reference, **options)
        got = plain(model, **options, assistant_strategy=LayerSkip(exit_layer=3))
    finally:
        reference.set_attn_implementation("sdpa")
    field = name.removeprefix("output_")
    for mine, own in zip(getattr(got, field), getattr(expected, field), strict=True):
        for left, right in zip(mine, own, strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


# What runs


@dataclass
class LayerCounts:
    """Widths of the calls of each layer's MLP, counted inside of it: there, it has not been passed over."""

    widths: list[list[int]]


@contextlib.contextmanager
def counted(model: PreTrainedModel) -> Iterator[LayerCounts]:
    layers = decoder_layers(model)
    assert layers is not None
    counts = LayerCounts([[] for _ in layers])
    handles = []
    for index, layer in enumerate(layers):

        def hook(module: Any, args: Any, index: int = index) -> None:
            counts.widths[index].append(args[0].shape[1])

        handles.append(layer.mlp.down_proj.register_forward_pre_hook(hook))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("exit_layer", [1, 2, 3, 4])
@pytest.mark.usefixtures("constant_schedule")
def test_each_layer_runs_once_per_token_of_a_round(exit_layer):
    """Below the exit once per node, token by token, the last drafted one included; above it once per round."""
    model, inputs = enabled(), prompt(1)
    config = SpecDecConfig(LayerSkip(exit_layer=exit_layer), max_draft_tokens=3)
    with counted(model) as counts:
        stats = plain(
            model, **inputs, max_new_tokens=32, assistant_strategy=config, return_dict_in_generate=True
        ).speculation
    rounds = stats.num_spec_steps
    undrafted = rounds - stats.drafted_at_depth[0]  # where a single token is left, it is the target's own
    assert rounds > 2 and undrafted <= 1
    for index, widths in enumerate(counts.widths):
        prefill, rest = widths[0], widths[1:]
        assert prefill == inputs["input_ids"].shape[1]
        if index < exit_layer:
            assert set(rest) == {1}
        else:
            assert len(rest) == rounds and max(rest) == 4
        assert sum(rest) == sum(counts.widths[0][1:]), "every node of every round goes through every layer once"
    assert stats.target_forwards == 1 + rounds
    assert stats.draft_forwards == len(counts.widths[0]) - 1 - undrafted


@pytest.mark.usefixtures("constant_schedule")
def test_skipped_sublayers_run_in_the_verify_pass_alone():
    model = enabled()
    config = SpecDecConfig(LayerSkip(skip_mlp=[1], skip_attention=[2]), max_draft_tokens=3)
    with counted(model) as counts:
        stats = plain(
            model, **prompt(1), max_new_tokens=20, assistant_strategy=config, return_dict_in_generate=True
        ).speculation
    assert len(counts.widths[1]) == 1 + stats.num_spec_steps
    assert len(counts.widths[0]) == len(counts.widths[2]) == 1 + stats.num_spec_steps + stats.draft_forwards


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "opt", "falcon", "deepseek_v3", "mixtral"])
@pytest.mark.usefixtures("constant_schedule")
def test_the_verify_pass_in_two_parts_equals_the_one_in_one(family, batch, monkeypatch):
    """Logits of all nodes to 1e-5 of their size, and K/V of all layers; both right after the draft."""
    verify, compared = Target.verify, []

    def both(self: Target, tree: DraftTree, lengths: Any) -> Any:
        output = verify(self, tree, lengths)
        assert self.cache is not None
        cached = [(layer.keys.clone(), layer.values.clone()) for layer in self.cache.slot_layers()]
        whole = self.run(tree.tokens, tree.seen, lengths)
        real = (tree.parents >= 0) | (torch.arange(tree.size) == 0)
        scale = whole.logits[real].abs().max()
        assert (output.logits - whole.logits)[real].abs().max() / scale < 1e-5
        for row, length in enumerate(lengths):
            slots = slice(0, length - 1 + int(real[row].sum()))
            for (keys, values), layer in zip(cached, self.cache.slot_layers()):
                torch.testing.assert_close(keys[row, :, slots], layer.keys[row, :, slots], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(values[row, :, slots], layer.values[row, :, slots], atol=1e-4, rtol=1e-4)
        compared.append(tree.size)
        return output

    monkeypatch.setattr(Target, "verify", both)
    model = hf_specdec.enable(quieten(tiny(family), 1))
    plain(model, **prompt(batch, family), assistant_strategy=LayerSkip(exit_layer=1))
    assert max(compared) == 5


@pytest.mark.parametrize("strategy", FORMS, ids=str)
@pytest.mark.usefixtures("constant_schedule")
def test_a_draft_leaves_the_keys_and_values_of_skipped_layers_alone(strategy, monkeypatch):
    step, seen = PartialTarget.step, []

    def watched(self: PartialTarget, tokens: Any, lengths: Any, depth: int) -> Any:
        cache = self._target.cache
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        logits = step(self, tokens, lengths, depth)
        same = [torch.equal(keys, layer.keys) for (keys, _), layer in zip(before, cache.layers)]
        seen.append(same)
        return logits

    monkeypatch.setattr(PartialTarget, "step", watched)
    plain(enabled(), **prompt(3), assistant_strategy=strategy)
    skipped = strategy.skip_attention or range(strategy.exit_layer, LAYERS)
    assert len(seen) > 10
    assert all(same == [index in skipped for index in range(LAYERS)] for same in seen)


@pytest.mark.usefixtures("constant_schedule")
def test_there_is_one_cache_and_one_prefill(monkeypatch):
    """No second cache: what a call holds beyond the target's own is one hidden state per drafted token."""
    made = []
    monkeypatch.setattr(SlotCache, "__init__", counting(SlotCache.__init__, made))
    model = enabled()
    widths: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    plain(model, **prompt(3), max_new_tokens=30, assistant_strategy=LayerSkip(exit_layer=2))
    handle.remove()
    assert len(made) == 1
    assert widths[0] == 24 and max(widths[1:]) <= 5


def counting(function: Any, calls: list[int]) -> Any:
    """The function, with its calls counted."""

    def counted_function(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return counted_function


@dataclass(frozen=True)
class Dropping(DraftStrategy):
    """Lets the target's part draft, and proposes something else."""

    inner: LayerSkip
    change: str

    def build(self, target: Any, request: Any) -> Any:
        drafter = self.inner.build(target, request)
        propose = drafter.propose

        def changed(view: Any, plan: Any) -> DraftTree:
            tree = propose(view, plan)
            if self.change == "tokens":
                tokens = tree.tokens.clone()
                tokens[:, 1:] = (tokens[:, 1:] + 1) % 90
                return DraftTree(tokens, tree.parents, tree.sampled)
            if self.change == "nothing":
                return DraftTree.from_chains(view.roots(), [[]] * view.rows)
            if self.change == "shorter":
                return DraftTree.from_chains(view.roots(), tree.tokens[:, 1:3].tolist())
            parents = torch.zeros_like(tree.parents)
            parents[:, 0] = -1
            tokens = tree.tokens.clone()
            tokens[:, 2:] = (tokens[:, 1:2] + torch.arange(1, tree.size - 1)) % 90
            return DraftTree(tokens, parents, tree.sampled)

        drafter.propose = changed
        return drafter


@pytest.mark.parametrize("change", ["tokens", "nothing", "shorter", "siblings"])
@pytest.mark.usefixtures("constant_schedule")
def test_what_was_computed_for_other_drafts_is_not_used(change):
    check(llama(), enabled(), prompt(3), Dropping(LayerSkip(exit_layer=3), change), max_new_tokens=24)


@pytest.mark.usefixtures("constant_schedule")
def test_two_parts_of_one_target_do_not_mix():
    @dataclass(frozen=True)
    class Both(DraftStrategy):
        def build(self, target: Any, request: Any) -> Any:
            first, second = (each.build(target, request) for each in (FORMS[1], FORMS[2]))
            propose = first.propose

            def after_the_other(view: Any, plan: Any) -> DraftTree:
                tree = propose(view, plan)
                second.propose(view, plan)
                return tree

            first.propose = after_the_other
            return first

    check(llama(), enabled(), prompt(3), Both(), max_new_tokens=24)


# The user's model


class Broken(Exception):
    """What the tests raise."""


@pytest.mark.parametrize("strategy", FORMS, ids=str)
@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.usefixtures("constant_schedule")
def test_an_exception_leaves_the_model_as_it_was(strategy, place, count):
    """In the draft, in the verify pass, below and above the exit."""
    model = enabled()
    before = snapshot(model)
    calls = []

    def breaking(*_: Any) -> None:
        calls.append(1)
        if len(calls) == count:
            raise Broken

    handle = model.model.layers[place].self_attn.register_forward_pre_hook(breaking)
    with pytest.raises(Broken):
        plain(model, **prompt(3), max_new_tokens=40, assistant_strategy=strategy)
    handle.remove()
    assert snapshot(model) == before
    check(llama(), model, prompt(3), strategy)


def test_a_forward_of_the_users_own_is_put_back():
    """As accelerate does: a module may have a `forward` in its own dict."""
    model = enabled()
    layer = model.model.layers[2]
    original, calls = layer.forward, []
    layer.forward = counting(original, calls)
    own = layer.forward
    expected = plain(llama(), **prompt(1))
    got = plain(model, **prompt(1), assistant_strategy=LayerSkip(exit_layer=3))
    assert got.tolist() == expected.tolist()
    assert vars(layer)["forward"] is own and calls


def test_replacements_are_for_the_thread_that_asked():
    module, entered, leave = torch.nn.Linear(2, 2), threading.Event(), threading.Event()
    given = torch.ones(1, 2)
    expected = module(given)

    def inside() -> None:
        with replaced({module: lambda forward, args, kwargs: "replaced"}):
            results.append(module(given))
            entered.set()
            leave.wait(10)

    results: list[Any] = []
    thread = threading.Thread(target=inside)
    thread.start()
    entered.wait(10)
    with replaced({}):
        assert torch.equal(module(given), expected)
    with replaced({module: lambda forward, args, kwargs: forward(*args) * 2}):
        assert torch.equal(module(given), expected * 2)
    leave.set()
    thread.join()
    assert results == ["replaced"] and "forward" not in vars(module)


def test_threads_share_the_model_and_the_strategy():
    """Two parts of one model, and plain calls beside them."""
    model = enabled()
    jobs = [(FORMS[0], 1, 0), (FORMS[1], 3, 1), (FORMS[2], 3, 2), (None, 1, 3)]
    expected = [plain(llama(), **prompt(batch, seed=seed)).tolist() for _, batch, seed in jobs]
    before, errors = snapshot(model), []
    gate = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        strategy, batch, seed = jobs[index]
        try:
            gate.wait(timeout=30)
            for _ in range(2):
                got = plain(model, **prompt(batch, seed=seed), assistant_strategy=strategy)
                assert got.tolist() == expected[index]
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert snapshot(model) == before


# Refusals


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_family_are_found(family):
    model = tiny(family)
    layers = decoder_layers(model)
    assert layers is not None
    assert len(layers) == model.config.get_text_config(decoder=True).num_hidden_layers
    assert all(attention_of(layer, index) is not None for index, layer in enumerate(layers))
    assert all((mlp_of(layer) is None) == (family == "opt") for layer in layers)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "either"),
        ({"exit_layer": 2, "skip_mlp": [1]}, "either"),
        ({"exit_layer": 0}, "exit_layer=0"),
        ({"exit_layer": -1}, "exit_layer=-1"),
        ({"exit_layer": True}, "exit_layer=True"),
        ({"exit_layer": "2"}, "exit_layer='2'"),
        ({"skip_attention": 3}, "skip_attention=3"),
        ({"skip_attention": "12"}, "skip_attention='12'"),
        ({"skip_mlp": [1, -2]}, "skip_mlp=[1, -2]"),
        ({"skip_mlp": [None]}, "skip_mlp=[None]"),
        ({"skip_mlp": [1.0]}, "skip_mlp=[1.0]"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused_at_construction(settings, says):
    with pytest.raises(SpecDecError) as caught:
        LayerSkip(**settings)
    assert says in str(caught.value) and "use " in str(caught.value)


def refused_before_any_forward(model: PreTrainedModel, strategy: Any, *says: str, **options: Any) -> None:
    with counted_forwards(model) as calls, pytest.raises(SpecDecError) as caught:
        plain(model, **prompt(1), assistant_strategy=strategy, **options)
    assert not calls
    assert all(each in str(caught.value) for each in says), caught.value


@contextlib.contextmanager
def counted_forwards(model: PreTrainedModel) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


def test_what_the_target_does_not_have_is_refused_before_the_first_forward():
    model = enabled()
    refused_before_any_forward(model, LayerSkip(exit_layer=5), "exit_layer=5", "4 layers", "1 to 4")
    refused_before_any_forward(model, LayerSkip(skip_attention=[1, 4]), "skip_attention=4", "0 to 3")
    refused_before_any_forward(model, LayerSkip(skip_mlp=[9]), "skip_mlp=9", "0 to 3")
    refused_before_any_forward(model, LayerSkip(exit_layer=2), "sharded", synced_gpus=True)
    opt, shared = hf_specdec.enable(tiny("opt")), hf_specdec.enable(tiny("gemma3n"))
    refused_before_any_forward(opt, LayerSkip(skip_mlp=[1]), "OPTForCausalLM", "MLP", "exit_layer")
    refused_before_any_forward(shared, LayerSkip(skip_attention=[1]), "keys and values of others")


@pytest.mark.parametrize("hidden", ["no list", "two lists", "no numbers"])
def test_a_model_whose_layers_cannot_be_found_is_refused(hidden):
    model = enabled()
    if hidden == "no list":
        model.get_decoder = lambda: model.lm_head
    elif hidden == "two lists":
        model.model.others = torch.nn.ModuleList(model.model.layers)
    else:
        del model.model.layers[1].self_attn.layer_idx
    with pytest.raises(UnsupportedModelError, match="cannot draft with a part of itself"), counted_forwards(model):
        plain(model, **prompt(1), assistant_strategy=LayerSkip(exit_layer=2))


def test_settings_by_name():
    config = {"strategy": "layer_skip", "strategy_options": {"skip_mlp": [2, 1, 2]}, "max_draft_tokens": 3}
    assert SpecDecConfig.of(config).resolved == LayerSkip(skip_mlp=(1, 2))
    for strategy in FORMS:
        again = SpecDecConfig.from_dict(SpecDecConfig(strategy).to_dict())
        assert again.resolved == strategy
    with pytest.raises(SpecDecError, match="either"):
        SpecDecConfig("layer_skip")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("constant_schedule")
def test_a_prompt_of_embeddings(batch):
    ids = prompt(batch)
    inputs = {"inputs_embeds": llama().get_input_embeddings()(ids["input_ids"]).detach()}
    inputs["attention_mask"] = ids["attention_mask"]
    stats = check(llama(), enabled(), inputs, LayerSkip(exit_layer=3))
    assert stats.num_accepted_draft_tokens > 0


@pytest.mark.usefixtures("constant_schedule")
def test_a_processor_that_reads_the_prefix_is_applied_to_the_draft():
    options = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "max_new_tokens": 40}
    stats = check(llama(), enabled(), prompt(3), LayerSkip(exit_layer=3), **options)
    assert stats.draft_acceptance_rate > 0.8


def test_without_enable():
    expected = plain(llama(), **prompt(3))
    got = plain(
        llama(),
        **prompt(3),
        custom_generate=hf_specdec.speculative_generate,
        assistant_strategy=LayerSkip(exit_layer=3),
    )
    assert got.tolist() == expected.tolist()
    assert new_tokens(prompt(3), got).shape[1] == 20


@pytest.mark.usefixtures("constant_schedule")
def test_what_the_verify_pass_runs_of_the_first_layers_is_no_forward_of_the_draft(monkeypatch):
    records = []
    monkeypatch.setattr(FixedController, "observe", lambda self, record: records.append(record))
    config = SpecDecConfig(LayerSkip(exit_layer=2), max_draft_tokens=2)
    plain(enabled(), **prompt(1), max_new_tokens=12, assistant_strategy=config)
    assert {record.draft_forwards for record in records if record.plan.depth == 2} == {2}
