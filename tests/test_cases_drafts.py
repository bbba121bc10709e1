"""Cases 16 to 20, 25 and 29: draft models, their vocabularies and windows, and what lookups propose."""

import pytest
import torch
from cases import (
    STRATEGIES,
    Replay,
    TreeReplay,
    Way,
    base_text,
    call,
    compare,
    draft_model,
    forward_widths,
    plain_model,
    spec_model,
    tokenizer,
    ways,
)
from conftest import ForwardCounter, prompt, randomise, tiny, without_special_tokens
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import DecodeView, Plan, SpecDecConfig, SpecDecError
from hf_specdec.drafters import DraftModel, PromptLookup


@pytest.mark.parametrize("draft", ["itself", "copy", "enabled_copy"])
@ways(("draft_model",))
@pytest.mark.usefixtures("constant_schedule")
def test_case_16_self_draft_accepts_everything(way, draft):
    model = {"itself": spec_model, "copy": plain_model, "enabled_copy": lambda: hf_specdec.enable(tiny())}[draft]()
    pair = compare(way, assistant_strategy=DraftModel(model), max_new_tokens=200 if draft == "copy" else 40)
    stats = pair.spec.speculation
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0
    assert stats.num_spec_steps < stats.num_emitted_tokens / 2


@ways([each for each in STRATEGIES if each != "layer_skip"], batches=(1,))  # there, parts of the target run as well
def test_case_17_forwards_of_the_target(way):
    text = base_text(way)
    with forward_widths(spec_model()) as widths:
        pair = compare(way, replay=text)
    stats = pair.spec.speculation
    emitted = len(pair.text[0])
    assert stats.target_forwards == len(widths) == 1 + stats.num_spec_steps
    assert widths[0] == pair.prompt_length
    rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    cut = sum(widths) - (pair.prompt_length + emitted - 1 + rejected)
    block = TreeReplay.default_draft_tokens if way.strategy.startswith(("tree", "pruned")) else 8
    assert 0 <= cut <= block, "each emitted token but the last once, and the rejected drafts"
    assert way.strategy != "oracle-1" or stats.num_accepted_draft_tokens == 0


@ways(("oracle-0.3", "tree-0.3", "draft_model"), batches=(3,))
def test_case_17_forwards_of_the_target_in_a_batch(way):
    with forward_widths(spec_model()) as widths:
        stats = compare(way).spec.speculation
    assert stats.target_forwards == len(widths) == 1 + max(row.num_spec_steps for row in stats.rows)
    kinds = {"oracle-0.3": Replay, "tree-0.3": TreeReplay, "draft_model": DraftModel}
    assert max(widths[1:]) <= 1 + kinds[way.strategy].default_draft_tokens


def positions_of(model, run):
    """`(position, token)` of everything that a model forwards, batch 1."""
    seen = []

    def hook(_, args, kwargs):
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        places = kwargs.get("position_ids")
        assert places is not None, "a block of draft tokens has explicit positions"
        seen.extend(zip(places[0].tolist(), ids[0].tolist(), strict=True))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        return run(), seen
    finally:
        handle.remove()


@ways(("draft_model",), batches=(1,))
def test_case_17_a_perfect_draft_forwards_each_position_once(way, each_schedule):
    draft = tiny()
    pair, seen = positions_of(draft, lambda: compare(way, assistant_strategy=DraftModel(draft), max_new_tokens=40))
    ids = pair.spec.sequences[0].tolist()
    places = [position for position, _ in seen]
    assert places == list(range(len(places))), "each position once, in order"
    assert all(ids[position] == token for position, token in seen)
    assert len(places) <= len(ids) - 1


@ways(("draft_model",), batches=(1,))
@pytest.mark.usefixtures("constant_schedule")
def test_case_17_forwards_of_a_mediocre_draft(way):
    draft = draft_model()
    with forward_widths(draft) as widths:
        pair = compare(way, max_new_tokens=40)
    stats = pair.spec.speculation
    assert stats.draft_forwards == len(widths)
    rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert sum(widths) <= pair.spec.sequences.shape[1] + rejected, "each committed position once, and rejected drafts"
    assert len(widths) <= 2 + stats.num_draft_tokens, "one forward per draft token, the catch-up included"


def padded_vocabulary(size: int, preferred: range = range(0)) -> LlamaForCausalLM:
    """A tiny Llama with this vocabulary; equal in the ids that two sizes share, and fond of the preferred ids."""
    base = randomise(LlamaForCausalLM(LlamaConfig(**{**tiny().config.to_dict(), "vocab_size": 128})), 0.4, seed=5)
    small = LlamaForCausalLM(LlamaConfig(**{**base.config.to_dict(), "vocab_size": size}))
    weights = base.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:size].clone()
    for token in preferred:
        weights["lm_head.weight"][token] *= 3
    small.load_state_dict(weights)
    return without_special_tokens(small)


@pytest.mark.parametrize("given", ["nothing", "tokenizers", "bridge"])
@pytest.mark.parametrize("sizes", [(128, 120), (120, 128)], ids=["smaller_draft", "larger_draft"])
@ways(("draft_model",))
def test_case_18_padded_embeddings(way, sizes, given, each_schedule):
    target, draft = (padded_vocabulary(size, preferred=range(120, size)) for size in sizes)
    own = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(permuted=given == "bridge")}
    own = {} if given == "nothing" else own
    inputs = prompt(way.batch)
    if sizes[0] == 128:
        inputs["input_ids"][:, -3:-1] = torch.tensor([121, 127])
    expected = call(target, inputs, way).sequences
    state = torch.get_rng_state()
    output = call(hf_specdec.enable(target), inputs, way, assistant_strategy=DraftModel(draft), **own)
    assert output.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert output.speculation.num_draft_tokens > 0 or each_schedule == "adaptive"
    if sizes[0] == 128:
        assert (expected[:, 24:] >= 120).any(), "the target must use its extra ids for the test to mean anything"


@pytest.mark.parametrize("sizes", [(128, 120), (120, 128)], ids=["smaller_draft", "larger_draft"])
@ways(("draft_model", "bridge"), samples=(True,))
def test_case_18_padded_embeddings_under_rejection(way, sizes):
    target, draft = (padded_vocabulary(size, preferred=range(120, size)) for size in sizes)
    chosen = DraftModel(draft, tokenizer=tokenizer(permuted=True) if way.strategy == "bridge" else None)
    config = SpecDecConfig(strategy=chosen, verifier="rejection")
    output = call(hf_specdec.enable(target), prompt(way.batch), way, assistant_strategy=config)
    assert output.sequences.shape[1] == 24 + 24
    assert output.sequences.max() < sizes[0]


@pytest.mark.parametrize("held_by", ["call", "strategy"])
@ways(("draft_model",))
def test_case_19_a_permuted_tokenizer_is_bridged(way, held_by, each_schedule):
    other = tokenizer(permuted=True)
    own = {"tokenizer": tokenizer(), **({"assistant_tokenizer": other} if held_by == "call" else {})}
    chosen = DraftModel(draft_model(), tokenizer=other if held_by == "strategy" else None)
    output = call(spec_model(), prompt(way.batch), way, assistant_strategy=chosen, **own)
    assert output.sequences[:, 24:].tolist() == base_text(way)
    assert any("another tokenizer" in note for note in output.speculation.notes)


@ways(("draft_model",))
def test_case_19_equal_tokenizers_pass(way):
    own = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer()}
    expected = base_text(way)
    output = call(spec_model(), prompt(way.batch), way, assistant_strategy=draft_model(), **own)
    assert output.sequences[:, 24:].tolist() == expected


def short_draft(positions: int) -> GPT2LMHeadModel:
    """A draft with absolute positions and a small window."""
    config = GPT2Config(vocab_size=96, n_positions=positions, n_embd=32, n_layer=1, n_head=2)
    return without_special_tokens(randomise(GPT2LMHeadModel(config), 0.3, seed=2))


@pytest.mark.parametrize("positions", [16, 30])
@ways(("draft_model",))
@pytest.mark.usefixtures("constant_schedule")
def test_case_20_a_draft_with_a_small_window(way, positions):
    draft = short_draft(positions)
    pair = compare(way, assistant_strategy=DraftModel(draft))
    stats = pair.spec.speculation
    assert any("window" in note for note in stats.notes), stats.notes
    real = prompt(way.batch)["attention_mask"].sum(-1).tolist()
    for row, length in zip(stats.rows, real):
        assert (row.num_draft_tokens > 0) == (length < positions - 1)


@ways(("draft_model",), batches=(1,), samples=(False,))
def test_case_20_no_note_inside_the_window(way):
    notes = compare(way, assistant_strategy=DraftModel(short_draft(64))).spec.speculation.notes
    assert not any("window" in note for note in notes)


@pytest.mark.parametrize("broken", ["vocabulary", "type"])
def test_a_draft_that_does_not_fit_is_refused(broken):
    draft = {"vocabulary": tiny("llama"), "type": torch.nn.Linear(2, 2)}[broken]
    draft.config = LlamaConfig(**{**tiny().config.to_dict(), "vocab_size": 2000})
    own = {"tokenizer": None, "assistant_tokenizer": tokenizer()}
    with pytest.raises((SpecDecError, TypeError)), forward_widths(spec_model()) as widths:
        spec_model().generate(**prompt(1), max_new_tokens=6, assistant_strategy=draft, **own)
    assert widths == []


@ways(("draft_model",), samples=(False,))
@pytest.mark.usefixtures("constant_schedule")
def test_the_draft_model_is_never_generated_with(way):
    """The draft's own `generate` is not used: no second preparation of inputs, cache and criteria."""
    draft = tiny()
    draft.generate = lambda *_, **__: pytest.fail("the draft re-entered generate")
    with ForwardCounter(draft) as counter:
        call(spec_model(), prompt(way.batch), way, assistant_strategy=DraftModel(draft))
    assert counter.count > 0


def test_a_dead_draft_parameter_is_not_needed():
    """A config of the draft that asks for outputs does not reach the lean loop."""
    draft = tiny()
    draft.config.output_hidden_states = True
    way = Way("draft_model", 1, False)
    output = call(spec_model(), prompt(1), way, assistant_strategy=DraftModel(draft))
    assert output.sequences[:, 24:].tolist() == base_text(way)


def test_case_25_the_longest_match_wins_then_the_most_recent():
    """`7 8` was followed by 1 and later by 2; `6 7 8` by 3, before both."""
    text = [6, 7, 8, 3, 4, 7, 8, 1, 5, 7, 8, 2, 9]
    for end, longest, expected in (([0, 7, 8], 3, 2), ([6, 7, 8], 3, 3), ([6, 7, 8], 2, 2)):
        view = DecodeView.of_sequences([text + end])
        drafter = PromptLookup(max_ngram=longest, min_ngram=1).build(None, None)
        drafter.start(view)
        assert drafter.propose(view, Plan.chain(1)).tokens[0].tolist() == [8, expected]
