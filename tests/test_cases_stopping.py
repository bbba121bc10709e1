"""Cases 1 to 7 and 35: every stop holds at the exact token, and a stop does not count as a rejection."""

import time

import pytest
import torch
from cases import (
    FEW_OWN_WAYS,
    NEW_TOKENS,
    ORACLES,
    OWN_WAYS,
    SOME,
    STRATEGIES,
    Copy,
    Way,
    base_text,
    call,
    compare,
    copying,
    own_ways_in_turn,
    row_length,
    spec_model,
    strategy,
    suppress_refusal,
    tokenizer,
    ways,
)
from conftest import PAD, VOCABULARY, prompt
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specdec import SpecDecConfig


def middle_token(text: list[int], near: int) -> int:
    """A token whose first occurrence in the text is at `near` or the closest later place."""
    return next(token for index, token in enumerate(text) if index >= near and token not in text[:index])


@pytest.mark.parametrize("several", [False, True], ids=["one_id", "two_ids"])
@ways(also=OWN_WAYS)
def test_case_01_eos_in_the_middle_of_a_block(way, several):
    text = base_text(way)
    eos = [middle_token(text[0], 11)] + ([middle_token(text[-1], 5)] if several else [])
    pair = compare(
        way,
        replay=text,
        eos_token_id=eos if several else eos[0],
        output_scores=True,
        output_logits=True,
    )
    lengths = [row_length(ids, eos) for ids in pair.text]
    assert lengths[0] < NEW_TOKENS, "the EOS must be hit for the test to mean anything"
    assert len(pair.spec.scores) == len(pair.spec.logits) == max(lengths) == len(pair.text[0])
    stats = pair.spec.speculation
    assert [row.num_emitted_tokens for row in stats.rows] == lengths
    assert [len(row.token_sources) for row in stats.rows] == lengths
    assert stats.num_emitted_tokens == sum(lengths)
    assert all(token == PAD for ids, length in zip(pair.text, lengths) for token in ids[length:])
    assert pair.spec.cache.get_seq_length() == pair.plain.cache.get_seq_length() == pair.spec.sequences.shape[1] - 1


@pytest.mark.parametrize("eos", [None, 70], ids=["no_eos", "eos"])
@ways(("prompt_lookup", "suffix", "oracle-0.3", "tree-0.3"), also=FEW_OWN_WAYS)
@pytest.mark.usefixtures("constant_schedule")
def test_case_02_eos_inside_copied_text(way, eos):
    pair = compare(
        way, inputs=copying(way.batch), replay=[[12, 13, 70, 14, 15, 16, 10, 11]] * way.batch, eos_token_id=eos,
        logits_processor=LogitsProcessorList([Copy()]),
    )  # fmt: skip
    if eos is not None:
        assert pair.text == [[12, 13, 70]] * way.batch
    elif way.strategy in ("prompt_lookup", "suffix"):
        assert pair.spec.speculation.draft_acceptance_rate > 0.5, "the copied text must really be drafted"


@ways(also=OWN_WAYS)
def test_case_03_no_eos_and_no_pad(way):
    nothing = GenerationConfig(eos_token_id=None, pad_token_id=None, max_new_tokens=NEW_TOKENS)
    pair = compare(way, generation_config=nothing)
    assert all(len(ids) == NEW_TOKENS for ids in pair.text)


@ways(SOME, also=OWN_WAYS)
def test_case_03_eos_without_pad(way):
    text = base_text(way)
    eos = middle_token(text[-1], 6)
    stops = GenerationConfig(eos_token_id=eos, pad_token_id=None, max_new_tokens=NEW_TOKENS)
    compare(way, replay=text, generation_config=stops)


def windows(text: list[int], step: int = 1) -> list[str]:
    """Text of every window of one to three tokens."""
    decode = tokenizer().decode
    found = [decode(text[at : at + size]) for size in (1, 2, 3) for at in range(0, len(text) - size + 1, step)]
    return [window for window in dict.fromkeys(found) if window]


@pytest.mark.parametrize("block", [8, 20])
@ways(("oracle-0", "tree-0", "draft_model"), batches=(1,))
def test_case_04_every_stop_string(way, block):
    text = base_text(way)
    stopped = set()
    step = 10 if way.strategy == "draft_model" else 5 if way.sample or block == 20 else 1
    size = 3 * block if way.strategy == "tree-0" else block
    for stop in windows(text[0], step=step):
        config = SpecDecConfig(strategy=strategy(way.strategy, text), max_draft_tokens=size)
        pair = compare(way, assistant_strategy=config, stop_strings=[stop], tokenizer=tokenizer())
        stopped.add(len(pair.text[0]))
    assert len(stopped) > 3, "the stops must fall at different places"


@ways((), also=OWN_WAYS)
def test_case_04_a_stop_string_in_a_draft_of_the_targets_own(way):
    text = base_text(way)
    stop = tokenizer().decode(text[0][9:11])
    pair = compare(way, stop_strings=[stop], tokenizer=tokenizer())
    assert way.batch > 1 or len(pair.text[0]) <= 11


@pytest.mark.parametrize("eos", [False, True], ids=["no_eos", "eos"])
@ways(("oracle-0.3", "tree-0.3", "suffix"), batches=(3,))
def test_case_04_stop_strings_in_a_batch(way, eos):
    text = base_text(way)
    last = {"eos_token_id": middle_token(text[1], 15)} if eos else {}
    for row in range(way.batch):
        for stop in windows(text[row], step=23 if way.strategy == "tree-0.3" else 11):
            compare(way, replay=text, stop_strings=[stop, "Zz9"], tokenizer=tokenizer(), **last)


@ways(("tree-0",))
def test_a_stop_in_a_refused_branch_is_none(way):
    """Every wrong sibling that the text itself does not say is an EOS, and stops a custom criterion too."""
    text = base_text(way)
    said = {token for ids in text for token in ids}
    ends = sorted({(token + step) % VOCABULARY for token in said for step in (1, 2)} - said)
    criteria = StoppingCriteriaList([LastTokenIs(*ends)])
    pair = compare(way, replay=text, eos_token_id=ends, stopping_criteria=criteria)
    assert pair.text == text
    assert pair.spec.speculation.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
@ways(also=OWN_WAYS)
def test_case_05_length_limits(way, limit):
    text = base_text(way)
    for count in (1, 2, 3, 7, 8, 9, 10, 13, 19) if way.strategy in STRATEGIES else (1, 2, 3, 10):
        length = count if limit == "max_new_tokens" else 24 + count
        pair = compare(way, replay=text, **{limit: length})
        assert all(len(ids) == count for ids in pair.text)


@pytest.mark.parametrize(
    "least", [{"min_new_tokens": 15}, {"min_length": 24 + 13}], ids=lambda least: next(iter(least))
)
@ways(also=OWN_WAYS)
def test_case_06_minimum_length_above_the_block(way, least):
    text = base_text(way)
    eos = [ids[3] for ids in text]
    pair = compare(way, replay=text, eos_token_id=eos, **least)
    assert min(row_length(ids, eos) for ids in pair.text) > 13


class LastTokenIs(StoppingCriteria):
    """True while the last token is one of these."""

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


class PrefixSum(StoppingCriteria):
    """A fact about the whole prefix: its sum is 0 modulo 9."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(-1) % 9 == 0


class ColumnIs(StoppingCriteria):
    """A fact about the padded length, given as one bool for all rows."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] == self.length


class AnyRow(StoppingCriteria):
    """True for all rows once the last token of any row is this one."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == self.token).any().expand(input_ids.shape[0])


class Counter(StoppingCriteria):
    """Keeps state: true from its n-th call on."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


class RowsAtDifferentColumns(StoppingCriteria):
    """Row b stops at a column of its own, and only there."""

    def __init__(self, *columns: int):
        self.columns = torch.tensor(columns)

    def __call__(self, input_ids, scores, **kwargs):
        return self.columns[: input_ids.shape[0]] == input_ids.shape[1]


CRITERIA = ("last_token", "prefix_sum", "column", "rows", "any_row")


@pytest.mark.parametrize("eos", [False, True], ids=["no_eos", "eos"])
@pytest.mark.parametrize("kind", CRITERIA)
@ways(("oracle-0", "oracle-0.3", "tree-0", "suffix", "draft_model"))
def test_case_07_custom_criteria(way, kind, eos):
    """Without an EOS, rows that are done go on emitting real tokens until all rows are."""
    text = base_text(way)
    criterion = {
        "last_token": LastTokenIs(*[middle_token(ids, 5 + 4 * row) for row, ids in enumerate(text)]),
        "prefix_sum": PrefixSum(),
        "column": ColumnIs(24 + 11),
        "any_row": AnyRow(middle_token(text[0], 9)),
        "rows": RowsAtDifferentColumns(24 + 12, 24 + 3, 24 + 17),
    }[kind]
    last = {"eos_token_id": text[0][-1]} if eos else {}
    pair = compare(way, replay=text, stopping_criteria=StoppingCriteriaList([criterion]), **last)
    assert kind == "prefix_sum" or len(pair.text[0]) < NEW_TOKENS


@own_ways_in_turn("kind,eos", [(kind, eos) for kind in CRITERIA for eos in (False, True)])
def test_case_07_custom_criteria_over_drafts_of_the_targets_own(way, kind, eos):
    test_case_07_custom_criteria(way, kind, eos)


@ways(("oracle-0", "oracle-0.3", "tree-0", "draft_model"), also=OWN_WAYS)
def test_case_07_criteria_that_keep_state(way):
    def fresh():
        return {"stopping_criteria": StoppingCriteriaList([Counter(11)])}

    with suppress_refusal("Counter"):
        assert len(compare(way, replay=base_text(way), fresh=fresh).text[0]) == 11


class Witness(StoppingCriteria):
    """Keeps every prefix it is asked about, and stops at a length."""

    def __init__(self, length: int):
        self.length = length
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@ways(("oracle-0", "oracle-0.3", "tree-0", "prompt_lookup"), batches=(1,))
def test_case_07_criteria_see_each_prefix_once(way):
    def fresh():
        return {"stopping_criteria": StoppingCriteriaList([Witness(24 + 12)])}

    pair = compare(way, fresh=fresh, replay=base_text(way))
    assert pair.spec_options["stopping_criteria"][0].seen == pair.plain_options["stopping_criteria"][0].seen


class Unsure(StoppingCriteria):
    """Reads the scores: true once the best token's probability falls below a bound."""

    def __init__(self, bound: float):
        self.bound = bound

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].softmax(-1).amax(-1) < self.bound


@ways(("oracle-0", "oracle-0.3", "tree-0.3", "draft_model"), also=FEW_OWN_WAYS)
def test_case_07_criteria_that_read_scores(way):
    text = base_text(way)
    best = [
        step.softmax(-1).amax(-1)[0].item() for step in call(spec_model(), prompt(1), way, output_scores=True).scores
    ]
    bound = sorted(best)[len(best) // 6]
    pair = compare(
        way, replay=text, stopping_criteria=StoppingCriteriaList([Unsure(bound)]), output_scores=True, eos_token_id=95
    )
    assert len(pair.text[0]) < NEW_TOKENS or way.batch > 1


@pytest.mark.parametrize("seconds", [1e-9, 0.004, 30.0])
@ways(("oracle-0", "tree-0", "draft_model"))
def test_max_time(way, seconds):
    """Where the clock stops a run is up to the machine; what is returned is a prefix of the text, and never empty."""
    text = base_text(way)
    started = time.time()
    output = call(
        spec_model(), prompt(way.batch), way, max_time=seconds, assistant_strategy=strategy(way.strategy, text)
    )
    new = output.sequences[:, 24:].tolist()
    assert 1 <= len(new[0]) <= NEW_TOKENS
    assert new == [ids[: len(new[0])] for ids in text]
    assert len(new[0]) == NEW_TOKENS or time.time() - started > seconds
    if seconds < 1e-6:
        assert len(new[0]) == 1


@pytest.mark.parametrize("cut", ["length", "eos", "stop_string", "criterion"])
@ways(("oracle-0", "tree-0"))
def test_case_35_tokens_cut_by_a_stop_are_not_rejected(way, cut):
    text = base_text(way)
    options = {
        "length": {"max_new_tokens": 12},
        "eos": {"eos_token_id": [middle_token(ids, 8 + row) for row, ids in enumerate(text)]},
        "stop_string": {"stop_strings": [tokenizer().decode(text[0][11:13])], "tokenizer": tokenizer()},
        "criterion": {"stopping_criteria": StoppingCriteriaList([LastTokenIs(middle_token(text[0], 8))])},
    }[cut]
    stats = compare(way, replay=text, **options).spec.speculation
    rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens
    assert stats.num_accepted_draft_tokens > 0
    if way.strategy == "oracle-0":
        assert rejected == 0
    else:  # two siblings for each accepted token of a round that was not cut
        assert rejected <= 2 * stats.num_accepted_draft_tokens
        assert cut != "length" or rejected == 2 * stats.num_accepted_draft_tokens


@ways((*ORACLES, "tree-0.3"), samples=(False,))
def test_statistics_add_up(way):
    text = base_text(way)
    eos = middle_token(text[0], 13)
    stats = compare(way, replay=text, eos_token_id=eos).spec.speculation
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps == sum(row.num_spec_steps for row in stats.rows)
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    for name in ("num_draft_tokens", "num_accepted_draft_tokens", "num_emitted_tokens"):
        assert getattr(stats, name) == sum(getattr(row, name) for row in stats.rows), name
    accepted = sum(count * rounds for count, rounds in enumerate(stats.acceptance_histogram))
    assert accepted == stats.num_accepted_draft_tokens
    assert accepted == sum(sum(row.token_sources) for row in stats.rows)
    assert stats.mean_acceptance_length == pytest.approx(1 + accepted / stats.num_spec_steps)


@pytest.mark.parametrize("eos", [False, True], ids=["no_eos", "eos"])
@ways(("oracle-0", "oracle-0.3", "tree-0.3"), batches=(3,), samples=(False,))
def test_statistics_add_up_where_rows_ran_ahead_of_a_criterion(way, eos):
    text = base_text(way)
    last = {"eos_token_id": text[0][-1]} if eos else {}
    criteria = StoppingCriteriaList([RowsAtDifferentColumns(24 + 12, 24 + 3, 24 + 17)])
    stats = compare(way, replay=text, stopping_criteria=criteria, **last).spec.speculation
    accepted = sum(count * rounds for count, rounds in enumerate(stats.acceptance_histogram))
    assert accepted == stats.num_accepted_draft_tokens == sum(sum(row.token_sources) for row in stats.rows)
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert sum(stats.accepted_at_depth) == accepted
    assert way.strategy != "oracle-0" or stats.num_draft_tokens == accepted


def test_way_is_hashable():
    assert len({Way("suffix", 1, True), Way("suffix", 1, True)}) == 1
