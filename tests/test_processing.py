"""Processors per tree node and criteria per ragged row, against one prefix at a time."""

import random

import pytest
import torch
from conftest import PAD, VOCABULARY, prompt
from transformers import (
    EosTokenCriteria,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_specdec
from hf_specdec.processing import NodeProcessors, RowStopping
from hf_specdec.state import DecodeState

EMITTED = ([11, 12, 13, 11, 12], [20], [30, 31, 30])


def state_of(batch: int = 3) -> DecodeState:
    """Ragged rows that have emitted different amounts."""
    inputs = prompt(batch)
    state = DecodeState(inputs["input_ids"], inputs["attention_mask"], inputs["attention_mask"].sum(1).tolist(), PAD)
    state.commit(EMITTED[:batch])
    return state


class PrefixSum:
    """Reads the whole prefix, padding included, and the row."""

    def __call__(self, input_ids, scores):
        shift = input_ids.sum(-1) + 7 * torch.arange(input_ids.shape[0])
        return scores + ((shift[:, None] * torch.arange(scores.shape[1])) % 13).float()


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 5 + row + step * len(ids)) % VOCABULARY for step in range(9)]


def processors() -> dict[str, list]:
    eos = torch.tensor([12, 31])
    padding = (prompt(3)["attention_mask"] == 0).sum(-1)
    return {
        "temperature": [TemperatureLogitsWarper(0.5)],
        "top_k_top_p": [TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        "repetition_penalty": [RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=padding)],
        "no_repeat_ngram": [NoRepeatNGramLogitsProcessor(2)],
        "bad_words": [NoBadWordsLogitsProcessor([[11, 12], [13], [30, 31, 30]])],
        "sequence_bias": [SequenceBiasLogitsProcessor({(11, 12): 5.0, (30, 31): -5.0, (20,): 2.0})],
        "min_length": [MinLengthLogitsProcessor(28, eos), MinNewTokensLengthLogitsProcessor(24, 3, eos)],
        "begin_suppress": [SuppressTokensAtBeginLogitsProcessor([11, 20], 25)],
        "forced_eos": [ForcedEOSTokenLogitsProcessor(28, 5)],
        "decay": [ExponentialDecayLengthPenalty((2, 1.5), eos, 24)],
        "prefix_allowed": [PrefixConstrainedLogitsProcessor(allowed, 1)],
        "own": [PrefixSum()],
        "order": [PrefixSum(), TemperatureLogitsWarper(0.7), NoRepeatNGramLogitsProcessor(1), TopKLogitsWarper(9)],
    }


def random_tree(rows: int, size: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and parents of random trees, some nodes of them padding."""
    generator = random.Random(seed)
    tokens = [[generator.choice([11, 12, 13, 20, 30, 31, 40]) for _ in range(size)] for _ in range(rows)]
    parents = []
    for _ in range(rows):
        own = [-1]
        for node in range(1, size):
            real = [index for index in range(node) if index == 0 or own[index] >= 0]
            own.append(-1 if generator.random() < 0.15 else generator.choice(real))
        parents.append(own)
    return tokens, parents


def path_of(parents: list[int], node: int) -> list[int]:
    """Nodes from the root, which is left out, down to `node`."""
    return [*path_of(parents, parents[node]), node] if node else []


def one_by_one(chosen, logits, tokens, parents, state):
    """The reference: the caller's whole batch at the length of one node, for each node of each row."""
    result = logits.clone()
    for row in range(state.rows):
        for node in range(logits.shape[1]):
            if node and parents[row][node] < 0:
                continue
            path = [tokens[row][step] for step in path_of(parents[row], node)]
            ids = prompt(3)["input_ids"][row].tolist() + list(EMITTED[row]) + path
            batch = torch.full((3, len(ids)), PAD)
            batch[row] = torch.tensor(ids)
            scores = torch.zeros(3, VOCABULARY)
            scores[row] = logits[row, node]
            result[row, node] = LogitsProcessorList(chosen)(batch, scores)[row]
    return result


@pytest.mark.parametrize("name", list(processors()))
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_each_node_is_processed_by_its_own_path(name, shape):
    state = state_of()
    for seed in range(3):
        size = 7
        tokens, parents = random_tree(3, size, seed)
        if shape == "chain":
            parents = [[*range(-1, size - 1)], [-1, 0, 1, -1, -1, -1, -1], [-1] * size]
        logits = torch.randn(3, size, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        given = logits.clone()
        node_processors = NodeProcessors(LogitsProcessorList(processors()[name]), prompt(3)["input_ids"], VOCABULARY)
        ours = node_processors.process(logits, tokens, parents, state)
        expected = one_by_one(processors()[name], given, tokens, parents, state)
        real = torch.tensor(parents) >= 0
        real[:, 0] = True
        torch.testing.assert_close(ours[real], expected[real])
        assert torch.equal(logits, given), "raw logits are an output of their own"


class Stateful:
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class Table:
    """Prepares a table once, at its first call; that is no state."""

    def __init__(self):
        self.table = None

    def __call__(self, input_ids, scores):
        if self.table is None:
            self.table = torch.arange(scores.shape[1]).float()
        return scores + self.table


def test_state_between_calls_is_refused_by_name():
    with pytest.raises(hf_specdec.UnsupportedOptionError, match="Stateful"):
        NodeProcessors(LogitsProcessorList([Stateful()]), prompt(1)["input_ids"], VOCABULARY)


def test_what_is_prepared_once_is_no_state():
    table = Table()
    assert len(NodeProcessors(LogitsProcessorList([table]), prompt(1)["input_ids"], VOCABULARY)) == 1
    assert table.table is None, "the trial runs on a copy"


class LastIs(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


CRITERIA = {
    "eos": [EosTokenCriteria(torch.tensor([41, 42]))],
    "length": [MaxLengthCriteria(28)],
    "last": [LastIs(43)],
    "all": [MaxLengthCriteria(30), EosTokenCriteria(torch.tensor([42])), LastIs(43)],
    "none": [],
}
PROPOSED = [[40, 41, 43, 42], [43], [40, 40, 42, 43]]


@pytest.mark.parametrize("name", list(CRITERIA))
def test_the_first_stop_of_each_row(name):
    state = state_of()
    criteria = StoppingCriteriaList(CRITERIA[name])
    stops = RowStopping(criteria, 1, 24).first_stops(PROPOSED, state, lambda steps: None)
    for row, tokens in enumerate(PROPOSED):
        expected = None
        for count in range(1, len(tokens) + 1):
            ids = prompt(3)["input_ids"][row].tolist() + list(EMITTED[row]) + tokens[:count]
            if bool(criteria(torch.tensor([ids]), None)[0]):
                expected = count
                break
        assert stops[row] == expected, row
