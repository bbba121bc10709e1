"""Counting: the definitions of the metrics, on a call that is counted by hand and on real ones."""

import json

import pytest
from cases import Way, base_text, compare, ways

from hf_specdec.stats import RowStats, SpeculationStats


def counted() -> SpeculationStats:
    """Two rows. Row 0: drafts of 4, accepted 4 and 1; row 1: drafts of 2, accepted 0, then a stop after 1 of 2."""
    stats = SpeculationStats("suffix", "exact", True, [RowStats(), RowStats()])
    for row in (0, 1):
        stats.count_emitted(row, 0, 1)
    stats.count_round(0, drafted=4, deepest=4, accepted=4, emitted=5)
    stats.count_round(0, drafted=4, deepest=2, accepted=1, emitted=2)
    stats.count_round(1, drafted=2, deepest=1, accepted=0, emitted=1)
    stats.count_round(1, drafted=1, deepest=1, accepted=1, emitted=1)
    return stats


def test_totals_and_rates():
    stats = counted()
    assert stats.num_spec_steps == 4
    assert stats.num_draft_tokens == 11
    assert stats.num_accepted_draft_tokens == 6
    assert stats.num_emitted_tokens == 11
    assert stats.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert stats.draft_acceptance_rate == pytest.approx(6 / 11)
    assert stats.acceptance_histogram == [1, 2, 0, 0, 1]
    assert stats.acceptance_by_depth == pytest.approx([3 / 4, 1 / 2, 1, 1])


def test_rows():
    first, second = counted().rows
    assert (first.num_spec_steps, first.num_draft_tokens, first.num_accepted_draft_tokens) == (2, 8, 5)
    assert first.token_sources == [False] + [True] * 4 + [False] + [True, False]
    assert second.token_sources == [False, False, True]
    assert [row.num_emitted_tokens for row in (first, second)] == [8, 3]


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_row_that_ran_ahead_is_cut_as_by_a_stop(steps):
    """Rounds beyond the end are none, and of the one it falls into, only what is left was judged."""
    stats = counted()
    stats.trim(0, steps)
    row = stats.rows[0]
    alone = SpeculationStats("suffix", "exact", True, [row])
    assert (row.num_emitted_tokens, len(row.token_sources)) == (steps, steps)
    assert row.num_spec_steps == sum(alone.acceptance_histogram) == (steps > 1) + (steps > 6)
    accepted = sum(count * rounds for count, rounds in enumerate(alone.acceptance_histogram))
    assert accepted == sum(row.token_sources) == row.num_accepted_draft_tokens == sum(alone.accepted_at_depth)
    assert row.num_draft_tokens == {6: 4, 7: 5, 8: 8}.get(steps, steps - 1)
    assert alone.drafted_at_depth == {7: [2, 1, 1, 1], 8: [2, 2, 1, 1]}.get(steps, [1] * min(steps - 1, 4))


def test_nothing_happened():
    stats = SpeculationStats("suffix", "exact", True, [RowStats()])
    assert stats.mean_acceptance_length == 1.0
    assert stats.draft_acceptance_rate == stats.num_spec_steps == stats.overhead_share == 0
    assert stats.acceptance_by_depth == stats.acceptance_histogram == []


def test_a_call_prints_as_one_line_and_represents_itself_in_full():
    stats = counted()
    stats.prefill_seconds, stats.verify_seconds, stats.other_seconds = 0.26, 0.9, 0.1
    assert str(stats) == (
        "suffix: 11 tokens in 4 rounds (2.50 per round), 55% of 11 draft tokens accepted, 1.26 s, "
        "10% of the rounds' time outside the models"
    )
    assert "token_sources=[False, True" in repr(stats)
    lossy = SpeculationStats("suffix", "typical", False, [RowStats()])
    assert str(lossy).startswith(
        "suffix (lossy: typical): 0 tokens in 0 rounds (1.00 per round), none drafted, 0.00 s"
    )


def test_a_reason_is_noted_once():
    stats = counted()
    for reason in ("one", "two", "one"):
        stats.note(reason)
    assert stats.notes == ["one", "two"]


def test_to_dict_is_json():
    values = json.loads(json.dumps(counted().to_dict()))
    assert values["num_spec_steps"] == 4
    assert values["acceptance_histogram"] == [1, 2, 0, 0, 1]


@ways(("oracle-0", "oracle-0.3", "oracle-1", "tree-0", "suffix", "draft_model"), samples=(False,))
def test_sources_of_tokens(way):
    """A token is marked as drafted iff it was an accepted draft token."""
    stats = compare(way, replay=base_text(way)).spec.speculation
    for row in stats.rows:
        assert row.token_sources[0] is False, "the first token comes from the prompt's forward"
        assert row.token_sources.count(False) <= 1 + row.num_spec_steps
        if way.strategy == "oracle-1":
            assert not any(row.token_sources)
        if way.strategy in ("oracle-0", "tree-0"):
            longest = len(stats.drafted_at_depth)
            assert longest > 1 and row.token_sources[1 : longest + 2] == [True] * longest + [False]


@pytest.mark.usefixtures("constant_schedule")
def test_times_add_up():
    stats = compare(Way("draft_model", 1, False)).spec.speculation
    parts = (stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.other_seconds)
    assert all(part > 0 for part in parts)
    assert stats.total_seconds == pytest.approx(sum(parts))
    assert 0 < stats.overhead_share < 1
