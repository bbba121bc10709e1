"""A draft model as a tree: its shape, its text, and what of it stays in the draft model's cache."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from cases import CACHE, SEED, Way, call, compare, draft_model, forward_widths, spec_model, ways
from conftest import prompt, tiny
from oracle import Oracle, OracleDrafter
from test_cases_drafts import padded_vocabulary, positions_of, short_draft
from test_equivalence import BATCHES, WAYS, check, noisy_copy
from transformers import DynamicCache, set_seed

import hf_specdec
from hf_specdec import Plan, SpecDecConfig
from hf_specdec.cache import SlotCache
from hf_specdec.control.fixed import FixedController
from hf_specdec.drafters import Cascade, DraftModel, Merge
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.draft_tree import LevelTree
from hf_specdec.target import SlotModel
from hf_specdec.tree import DraftTree, ancestors, grow_best_first

pytestmark = pytest.mark.usefixtures("constant_schedule")  # levels, forwards and accepted nodes are counted
DRAFT_FAMILIES = ["llama", "mistral", "qwen3_mixed", "gemma3", "gemma3n", "gemma2", "llama4", "gpt2"]
FULL = {"max_width": 3, "max_depth": 2, "max_draft_tokens": 12}  # all that two levels of three siblings find


@dataclasses.dataclass(frozen=True, eq=False)
class Watched(DraftModel):
    """A draft model whose plans and trees are kept, and whose cache is compared with a plain forward at the end."""

    seen: list[tuple[Plan, DraftTree]] = dataclasses.field(default_factory=list)

    def build(self, target: Any, request: Any) -> Drafter:
        drafter = super().build(target, request)
        propose, observe = drafter.propose, drafter.observe

        def kept(view, plan):
            self.seen.append((plan, propose(view, plan)))
            return self.seen[-1][1]

        def checked(view, emitted):
            observe(view, emitted)
            for row, length in enumerate(drafter._cached):
                assert length < view.length(row)
                if drafter._window is None or length <= drafter._window:
                    check_cache(drafter._slots, row, view.tokens(row)[:length])

        drafter.propose, drafter.observe = kept, checked
        return drafter


def check_cache(slots: SlotModel, row: int, tokens: Sequence[int]) -> None:
    """K/V of the last tokens of a row, as many as a window shows, are those of a plain forward over all."""
    assert slots.cache is not None
    expected = DynamicCache()
    ids = torch.tensor([list(tokens)]).clamp(max=slots.model.get_input_embeddings().weight.shape[0] - 1)
    with torch.no_grad():
        slots.model.forward(ids, **{CACHE: expected})  # unseen by hooks
    for layer, own in zip(expected.layers, slots.cache.row(row, len(tokens))):
        assert own is not None
        torch.testing.assert_close(own[0][:, -7:], layer.keys[0, :, -7:], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(own[1][:, -7:], layer.values[0, :, -7:], atol=1e-4, rtol=1e-3)


def children_of(tree: DraftTree, row: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[row].tolist()):
        if parent >= 0:
            found.setdefault(parent, []).append(node)
    return found


PLANS = [(1, 1, 1), (3, 3, 1), (4, 2, 3), (6, 3, 2), (9, 3, 3), (15, 3, 3), (21, 3, 3), (40, 2, 5), (5, 5, 3)]


@pytest.mark.parametrize(("tokens", "depth", "width"), PLANS)
@pytest.mark.parametrize(("verifier", "sample"), [("exact", False), ("exact", True), ("rejection", True)])
def test_trees_are_within_the_plan(tokens, depth, width, verifier, sample):
    watched = Watched(draft_model())
    config = SpecDecConfig(
        strategy=watched, verifier=verifier, max_draft_tokens=tokens, max_depth=depth, max_width=width
    )
    with forward_widths(draft_model()) as widths:
        call(spec_model(), prompt(3), Way("", 3, sample), assistant_strategy=config, max_new_tokens=10)
    rounds = sum(min(plan.depth, plan.nodes - 1) for plan, _ in watched.seen)
    assert len(widths) == 1 + rounds, "a forward per level"
    for plan, tree in watched.seen:
        assert tree.size <= plan.nodes and int(tree.depths.max()) <= plan.depth
        assert tree.values is not None
        for row in range(len(tree.tokens)):
            families = children_of(tree, row)
            assert len(families[0]) == min(width, plan.nodes - 1) or sum(map(len, families.values())) == plan.nodes - 1
            for parent, children in families.items():
                own = tree.tokens[row, children].tolist()
                assert len(set(own)) == len(own) <= width
                assert (tree.values[row, children] <= tree.values[row, parent]).all()
                assert (tree.values[row, children] > 0).all()
        assert (tree.values[:, 0] == 1).all()
        assert bool(tree.sampled.any()) == (tree.probs is not None) == (verifier == "rejection")


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("verifier", "sample"), [("exact", False), ("exact", True), ("rejection", True)])
def test_a_draft_ends_below_the_least_value_of_its_plan(monkeypatch, verifier, sample, width):
    """But not where its end would tell what was drawn."""
    watched, least = Watched(draft_model()), 0.03
    monkeypatch.setattr(FixedController, "plan", lambda self, view, rooms: Plan(6, width, 1 + 6 * width, least=least))
    config = SpecDecConfig(
        strategy=watched, verifier=verifier, schedule="constant", max_draft_tokens=6 * width, max_width=width
    )
    call(spec_model(), prompt(3), Way("", 3, sample), assistant_strategy=config, max_new_tokens=16)
    depths = []
    for plan, tree in watched.seen:
        depths.append(int(tree.depths.max()))
        assert tree.values is not None
        best = [
            float(torch.where(tree.depths == depth, tree.values, 0).amax(1).mean()) for depth in range(1, depths[-1])
        ]
        assert verifier == "rejection" or all(value >= least for value in best)
        if depths[-1] < plan.depth:
            assert torch.where(tree.depths == depths[-1], tree.values, 0).amax(1).mean() < least
    assert verifier == "rejection" or 1 <= min(depths) < max(depths)


@pytest.mark.parametrize("nodes", [2, 4, 7, 13])
def test_the_most_probable_nodes_are_kept(nodes):
    """Of two levels, where the beam holds all: the same as best first with a forward per node."""
    draft, start = draft_model(), prompt(1)["input_ids"][0].tolist()
    watched = Watched(draft)
    config = SpecDecConfig(strategy=watched, max_draft_tokens=nodes - 1, max_depth=2, max_width=3)
    call(spec_model(), prompt(1), Way("", 1, False), assistant_strategy=config, max_new_tokens=4)
    _, tree = watched.seen[0]
    root = int(tree.tokens[0, 0])

    def expand(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        with torch.no_grad():
            probs = draft(torch.tensor([[*start, *path]])).logits[0, -1].softmax(-1)
        return [(token, float(probs[token]), (*path, token)) for token in probs.argsort(descending=True).tolist()]

    expected = grow_best_first(root, (root,), expand, 2, 3, nodes)

    def named(tokens, parents, values):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[1:], parents[1:]):
            paths.append((*paths[parent], token))
        return dict(zip(paths, values))

    found = named(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.values[0].tolist())
    assert found == pytest.approx(named(expected.tokens, expected.parents, expected.values), rel=1e-3)


def test_a_chain_is_the_draft_models_own_text():
    watched = Watched(draft_model())
    call(spec_model(), prompt(1), Way("", 1, False), assistant_strategy=watched)
    plan, tree = watched.seen[0]
    assert (plan.depth, plan.width, plan.nodes) == (4, 1, 5)
    ids = torch.cat([prompt(1)["input_ids"], tree.tokens[:, :1]], 1)
    own = draft_model().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
    assert tree.tokens[0].tolist() == own[0, -5:].tolist()


def test_one_drawn_child_is_what_multinomial_draws():
    law = torch.rand(3, 1, 50).softmax(-1)
    set_seed(SEED)
    expected = torch.multinomial(law.squeeze(1), 1)
    tree = LevelTree(torch.tensor([1, 2, 3]))
    set_seed(SEED)
    tree.draw(law, 1, 1)
    assert torch.equal(tree.tokens[:, 1:], expected)


def test_default_depth_is_for_trees():
    chain = SpecDecConfig(strategy=DraftModel(draft_model()), max_draft_tokens=9)
    tree = dataclasses.replace(chain, max_width=2)
    plans = [each.plan() for each in (chain, tree, dataclasses.replace(chain, verifier="block"))]
    assert [(each.depth, each.width, each.nodes) for each in plans] == [(9, 1, 10), (4, 2, 10), (9, 1, 10)]


@pytest.mark.parametrize("kind", [Merge, Cascade])
@pytest.mark.parametrize(("given", "width"), [(None, 1), (3, 3)])
def test_beside_wider_members_a_model_drafts_chains_unless_told_otherwise(kind, given, width):
    watched = Watched(draft_model())
    config = SpecDecConfig(kind([watched, "recycling"]), max_width=given, max_draft_tokens=8, schedule="constant")
    call(spec_model(), prompt(1), Way("", 1, False), assistant_strategy=config)
    assert watched.seen and {plan.width for plan, _ in watched.seen} == {width}


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen3_mixed", "gemma3", "gemma3n", "gemma2", "llama4", "gpt2"]
)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sample", WAYS)
@pytest.mark.parametrize("schedule", ["constant", "adaptive"])
def test_text_is_plain_generates(family, batch, sample, schedule):
    """With a draft of the same family, so with its windows; the accepted nodes' K/V are right in its cache, too."""
    draft = DraftModel if family == "gemma3n" else Watched  # its layers share K/V
    plan = {"max_draft_tokens": 9, "max_depth": 3, "max_width": 3}
    config = SpecDecConfig(strategy=draft(noisy_copy(family)), schedule=schedule, **plan)
    stats = check(family, None, batch, sample, lambda text: config)
    assert stats.num_accepted_draft_tokens > 0 or schedule == "adaptive"


@pytest.mark.parametrize("family", ["llama", "qwen3_mixed"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sample", WAYS)
def test_text_is_plain_generates_with_another_familys_draft(family, batch, sample):
    config = SpecDecConfig(strategy=Watched(tiny("mistral")), max_draft_tokens=9, max_width=3)
    check(family, None, batch, sample, lambda text: config)


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "cut": {"top_k": 5, "temperature": 0.8},
}


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
@ways(("draft_model",))
def test_self_draft_accepts_a_full_path_each_round(way, options):
    options = options if way.sample else {name: value for name, value in options.items() if name != "temperature"}
    draft = tiny()
    config = SpecDecConfig(strategy=Watched(draft), **FULL)
    with forward_widths(draft) as widths:
        stats = compare(way, assistant_strategy=config, max_new_tokens=31, **options).spec.speculation
    assert all(row.num_accepted_draft_tokens == 2 * row.num_spec_steps for row in stats.rows)
    assert all(row.num_spec_steps == 10 for row in stats.rows)
    assert widths[1:] == [1, 3, *[2, 3] * 9], "of the accepted, only the last level is caught up with the root"


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
@ways(("draft_model",), samples=(True,))
def test_self_draft_is_never_refused(way, options):
    """The first child was drawn from the target's own law, after processors."""
    config = SpecDecConfig(strategy=Watched(tiny()), verifier="rejection", **FULL)
    options = {"assistant_strategy": config, "max_new_tokens": 31, **options}
    stats = call(spec_model(), prompt(way.batch), way, **options).speculation
    assert all(row.num_accepted_draft_tokens == 2 * row.num_spec_steps == 20 for row in stats.rows)


@pytest.mark.parametrize("verifier", ["rejection", "typical"])
@ways(("draft_model",), samples=(False,))
def test_greedy_text_under_other_verifiers(way, verifier):
    config = SpecDecConfig(strategy=Watched(draft_model()), verifier=verifier, max_width=2, max_draft_tokens=8)
    assert compare(way, assistant_strategy=config).spec.speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("vocabulary", [list(range(0, 96, 2)), [5]], ids=["half", "one"])
@ways(("draft_model",))
def test_a_trimmed_vocabulary(way, vocabulary):
    watched = Watched(tiny(), vocabulary=vocabulary)
    compare(way, assistant_strategy=SpecDecConfig(strategy=watched, **FULL))
    drafted = {int(token) for _, tree in watched.seen for token in tree.tokens[:, 1:][tree.parents[:, 1:] >= 0]}
    assert drafted and drafted <= set(vocabulary)


@pytest.mark.parametrize("sizes", [(128, 120), (120, 128)], ids=["smaller_draft", "larger_draft"])
@pytest.mark.parametrize("verifier", ["exact", "rejection"])
@ways(("draft_model",))
def test_padded_embeddings(way, sizes, verifier):
    target, draft = (padded_vocabulary(size, preferred=range(120, size)) for size in sizes)
    expected = call(target, prompt(way.batch), way).sequences
    config = SpecDecConfig(strategy=Watched(draft), verifier=verifier, **FULL)
    output = call(hf_specdec.enable(target), prompt(way.batch), way, assistant_strategy=config)
    assert output.sequences.max() < sizes[0]
    if verifier == "exact" or not way.sample:
        assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.num_draft_tokens > 0


@ways(("draft_model",))
def test_a_draft_with_a_small_window(way):
    stats = compare(way, assistant_strategy=SpecDecConfig(strategy=Watched(short_draft(30)), **FULL)).spec.speculation
    assert any("window" in note for note in stats.notes), stats.notes


@dataclasses.dataclass(frozen=True)
class NowAndThen(Oracle):
    """Is right, in every other round."""

    default_draft_tokens: ClassVar[int] = 4

    def build(self, target: Any, request: Any) -> OracleDrafter:
        return _NowAndThenDrafter(self)


class _NowAndThenDrafter(OracleDrafter):
    rounds = 0

    def propose(self, view, plan):
        self.rounds += 1
        if self.rounds % 2:
            return DraftTree.from_chains(view.roots(), [[]] * view.rows, view.device)
        return super().propose(view, plan)


def text_of(way) -> list[list[int]]:
    return compare(way, assistant_strategy="prompt_lookup").text


@ways(("cascade",))
def test_a_cascade_that_passes_a_draft_model_over(way):
    """What other members drafted has not been through the draft model."""
    chosen = Cascade([NowAndThen.of(text_of(way)), Watched(tiny())])
    stats = compare(way, assistant_strategy=chosen).spec.speculation
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("combined", [Merge, Cascade])
@ways(("combined",))
def test_every_token_goes_through_the_draft_model(way, combined, width):
    """Also where the draft model had drafted another one in its place."""
    draft = tiny()
    draft.load_state_dict(draft_model().state_dict())
    chosen = combined([NowAndThen.of(text_of(way)), Watched(draft)])
    config = SpecDecConfig(strategy=chosen, max_draft_tokens=8, max_width=width, max_depth=4)
    pair, seen = positions_of(draft, lambda: compare(way, assistant_strategy=config))
    if way.batch == 1:
        assert set(enumerate(pair.spec.sequences[0, :-10].tolist())) <= set(seen)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_mixed", "llama4", "gemma2"])
def test_a_block_sees_the_blocks_before_it(family):
    """Ragged rows; a tree in one forward and level by level gives the same scores."""
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 5, 5, 6], [-1, 0, 0, 0, 1, 3, 4, 5, 6, 8]])
    tokens = torch.randint(3, 88, parents.shape)
    prompt_ids, lengths = torch.randint(3, 88, (2, 12)), [12, 7]
    seen = ancestors(parents)
    outputs = []
    for cuts in ([0, 10], [0, 1, 3, 6, 7, 10]):
        slots = SlotModel(tiny(family), None)
        cache = DynamicCache()
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, :5] = 0
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            slots.model(prompt_ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
            assert slots.prefill(cache, mask) == lengths
            assert isinstance(slots.cache, SlotCache)
            scores = [
                slots.run(tokens[:, first:last], seen[:, first:last, :last], [length + 1 for length in lengths]).logits
                for first, last in itertools.pairwise(cuts)
            ]
        outputs.append(torch.cat(scores, 1))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
