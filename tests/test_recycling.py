"""Token recycling: what the table holds, the tree that grows from it, and the memory that outlives a call."""

import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from cases import plain_model, spec_model
from conftest import prompt

from hf_specdec import Recycling, RecyclingMemory, SpecDecConfig, SpecDecError
from hf_specdec.drafters.recycling import MOST_COMPARED, TRUST, Likeness, RecyclingDrafter, embeddings_of
from hf_specdec.state import DecodeView, Plan
from hf_specdec.tree import DraftTree

PLAN = Plan(depth=3, width=2, nodes=6)


def table(*entries: tuple[tuple[int, ...], tuple[tuple[int, float], ...]]) -> RecyclingMemory:
    memory = RecyclingMemory()
    for context, followers in entries:
        memory.learn(context, followers)
    return memory


def propose(memory: RecyclingMemory, texts: list[list[int]], plan: Plan = PLAN) -> DraftTree:
    drafter = RecyclingDrafter(Recycling(memory=memory), None)
    return drafter.propose(DecodeView.of_sequences(texts), plan)


def test_two_tokens_are_asked_before_one():
    memory = table(((1, 2), ((3, 1.0),)), ((9, 2), ((4, 1.0),)))
    assert memory.recall((1, 2)) == (2, ((3, 1.0),))
    assert memory.recall((7, 2)) == (1, ((4, 1.0),)), "what the last token was followed by last"
    assert memory.recall((2, 7)) == (0, ())


def test_the_most_probable_paths_of_the_table_are_drafted():
    memory = table(((5, 1), ((2, 0.6), (3, 0.3), (4, 0.1))), ((1, 2), ((7, 0.5), (8, 0.4))), ((1, 3), ((9, 1.0),)))
    tree = propose(memory, [[5, 1]])
    assert tree.tokens.tolist() == [[1, 2, 3, 7, 9, 8]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 1]]
    trust = TRUST[2]
    believed = [0.6, 0.3, 0.6 * 0.5 * trust, 0.3 * trust, 0.6 * 0.4 * trust]
    torch.testing.assert_close(tree.values, torch.tensor([[1.0, *(value * trust for value in believed)]]))
    assert not tree.sampled.any() and tree.probs is None


def test_after_a_new_token_comes_what_followed_the_known_one_that_is_most_like_it():
    memory, embeddings = RecyclingMemory(), torch.tensor([[0.0, 1], [1, 0], [5, 1], [0, 0], [0, -1], [-1, 0], [0, 0]])
    drafter = RecyclingDrafter(Recycling(memory=memory, top_tokens=1), embeddings)
    for token in (0, 1, 4):
        tree = DraftTree.from_chains([token], [[]])
        drafter.learn(DecodeView.of_sequences([[9, token]]), tree, torch.tensor([[[token + 7]]]), torch.ones(1, 1, 1))
    drafts = drafter.propose(DecodeView.of_sequences([[3, 2], [3, 1], [3, 99]]), PLAN)
    assert drafts.tokens[:, 1].tolist() == [8, 8, 99], "the last one has no embedding"
    torch.testing.assert_close(drafts.values[:, 1], torch.tensor([TRUST[0], TRUST[1], 0.0]))


def test_a_new_token_is_compared_with_so_many_known_ones():
    likeness = Likeness(torch.eye(MOST_COMPARED + 2))
    assert likeness.nearest(0) is None
    for token in range(MOST_COMPARED + 1):
        likeness.add(token)
        assert token % 500 or likeness.nearest(token) == token
    assert likeness.nearest(MOST_COMPARED) != MOST_COMPARED


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.zeros(4, 2, device="meta"), torch.zeros(4, 2).byte(), None])
def test_embeddings_that_cannot_be_read_are_left_alone(weight):
    """Of a sharded, an offloaded and a quantised model, and of a module that is no table."""
    module = SimpleNamespace() if weight is None else SimpleNamespace(weight=weight)
    assert embeddings_of(SimpleNamespace(model=SimpleNamespace(get_input_embeddings=lambda: module))) is None


def test_rows_that_know_less_are_padded():
    tree = propose(table(((5, 1), ((2, 1.0),))), [[5, 1], [5, 6], [1]])
    assert tree.parents.tolist() == [[-1, 0], [-1, -1], [-1, 0]]


def test_every_node_teaches_and_the_last_of_equals_stays():
    """Node 1 is the root's child, node 2 is padding, node 3 a child of node 1 that repeats its tokens."""
    memory = RecyclingMemory()
    drafter = RecyclingDrafter(Recycling(memory=memory, top_tokens=1), None)
    tree = DraftTree(torch.tensor([[4, 4, 8, 4]]), torch.tensor([[-1, 0, -1, 1]]), torch.zeros(1, 4, dtype=torch.bool))
    drafter.learn(DecodeView.of_sequences([[3, 4]]), tree, torch.tensor([[[5], [6], [7], [9]]]), torch.ones(1, 4, 1))
    assert memory.recall((3, 4)) == (2, ((5, 1.0),))
    assert memory.recall((4, 4)) == (2, ((9, 1.0),))
    assert memory.recall((0, 8)) == (0, ())


def test_a_call_learns_from_the_prompt_and_from_every_forward():
    """What the target expects, after each token of the prompt and of its answer, is in the table afterwards.

    Nothing is drafted here: a refused draft would teach what the target expects after that.
    """
    memory, call = RecyclingMemory(), {**prompt(1), "do_sample": False, "max_new_tokens": 12}
    config = SpecDecConfig(strategy=Recycling(memory=memory, top_tokens=3), max_draft_tokens=0)
    ids = spec_model().generate(**call, assistant_strategy=config)
    assert torch.equal(ids, plain_model().generate(**call))
    with torch.no_grad():
        top = plain_model()(ids).logits[0].topk(3)
    last = {}
    for place in range(1, ids.shape[1] - 1):
        last[tuple(ids[0, place - 1 : place + 1].tolist())] = top.indices[place].tolist()
    for context, expected in last.items():
        assert [token for token, _ in memory.recall(context)[1]] == expected


def test_a_lossy_verifier_keeps_its_rule_when_greedy():
    """Everything that the table proposes is accepted at threshold 0, also where the target's choice is known."""
    config = SpecDecConfig(strategy="recycling", verifier="threshold", verifier_options={"threshold": 0})
    call = {**prompt(1), "do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
    stats = spec_model().generate(**call, assistant_strategy=config).speculation
    assert stats.num_draft_tokens > 0 and stats.draft_acceptance_rate == 1.0


def test_left_padding_teaches_nothing():
    memory = RecyclingMemory()
    config = SpecDecConfig(strategy=Recycling(memory=memory))
    inputs = prompt(3)
    ids = spec_model().generate(**inputs, do_sample=False, max_new_tokens=2, assistant_strategy=config)
    contexts = set()
    for row, mask in zip(ids, inputs["attention_mask"]):
        own = row[(mask == 0).sum() :].tolist()
        contexts |= {tuple(own[max(place - 1, 0) : place + 1]) for place in range(len(own))}
    seen = {context for context in memory._followers if len(context) == 2}
    assert {context for context in contexts if len(context) == 2} - seen <= {tuple(row[-2:].tolist()) for row in ids}


def test_the_table_is_bounded_and_forgets_what_was_written_longest_ago():
    memory = RecyclingMemory(max_entries=3)
    memory.learn((1,), ((9, 1.0),))
    memory.learn((2,), ((9, 1.0),))
    memory.learn((1,), ((8, 1.0),))
    memory.learn((3, 4), ((7, 1.0),))
    assert len(memory) == 3
    assert memory.recall((2,)) == (0, ())
    assert memory.recall((1,)) == (1, ((8, 1.0),))


def test_save_load_and_pickle(tmp_path):
    memory = table(((1, 2), ((3, 0.75), (4, 0.25))))
    path = tmp_path / "table.json"
    memory.save(path)
    again = RecyclingMemory.load(path)
    copied = pickle.loads(pickle.dumps(memory))
    for each in (again, copied):
        assert each.recall((1, 2)) == (2, ((3, 0.75), (4, 0.25)))
        assert each.max_entries == memory.max_entries and each.path == str(path)
    strategy = Recycling(memory=str(path))
    assert strategy.to_dict() == {"top_tokens": 8, "memory": str(path)}
    assert Recycling(memory="new").to_dict()["memory"] == "new"
    assert Recycling().to_dict()["memory"] is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": "other"}', '{"format": "hf_specdec recycling memory 1"}',
     '{"format": "hf_specdec recycling memory 1", "max_entries": 0, "table": []}',
     '{"format": "hf_specdec recycling memory 1", "max_entries": 5, "table": [[[1, 2, 3], []]]}',
     '{"format": "hf_specdec recycling memory 1", "max_entries": 5, "table": [[[1], [["x", 1]]]]}',
     '{"format": "hf_specdec recycling memory 1", "max_entries": 5, "table": [[[1], [[2, 0.5], [2, 0.4]]]]}',
     '{"format": "hf_specdec recycling memory 1", "max_entries": 5, "table": [[[1], [[1.9, 0.5]]]]}',
     '{"format": "hf_specdec recycling memory 1", "max_entries": 5, "table": [[[1], [[true, 0.5]]]]}'],
)  # fmt: skip
def test_a_file_that_is_no_memory_is_refused(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(SpecDecError, match="RecyclingMemory"):
        Recycling(memory=str(path))


def test_a_missing_file_and_odd_settings_are_refused(tmp_path):
    with pytest.raises(SpecDecError, match="There is no recycling memory"):
        RecyclingMemory.load(tmp_path / "none.json")
    for settings in ({"top_tokens": 0}, {"top_tokens": True}, {"memory": 3}):
        with pytest.raises(SpecDecError):
            Recycling(**settings)
    with pytest.raises(SpecDecError):
        RecyclingMemory(max_entries=0)


@pytest.mark.usefixtures("constant_schedule")
def test_a_new_memory_is_shared_by_the_calls_of_one_object():
    strategy = Recycling(memory="new")
    call = {**prompt(1), "do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    first = spec_model().generate(**call, assistant_strategy=strategy)
    again = spec_model().generate(**call, assistant_strategy=strategy)
    fresh = spec_model().generate(**call, assistant_strategy=Recycling())
    assert torch.equal(first.sequences, again.sequences)
    assert again.speculation.target_forwards < fresh.speculation.target_forwards
    assert json.dumps(strategy.to_dict())
