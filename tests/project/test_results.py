"""The arithmetic of results: run lengths, match rate, speeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.results import Stats, run_lengths
from ppd_runtime.tracing.breakdown import LatencyBreakdown


def make_stats(**changes: object) -> Stats:
    values: dict[str, object] = {
        "prompt_tokens": 5,
        "new_tokens": 11,
        "hits": 6,
        "misses": 4,
        "run_lengths": (3, 2, 2, 2, 2),
        "latency_s": 2.0,
        "time_to_first_token_s": 0.5,
        "stall_s": 0.1,
        "main_layer_passes": 50,
        "main_recomputed_layer_passes": 0,
        "sub_layer_passes": (20,),
        "sub_coherence_layer_passes": (8,),
        "predicted_ratio": 0.7,
        "ledger": LatencyBreakdown(1.0, 0.5, 0.25, 0.125, 0.125),
        "first_token_ledger": LatencyBreakdown(0.25, 0.125, 0.0, 0.0625, 0.0625),
    }
    return Stats(**values | changes)


@given(st.lists(st.booleans(), max_size=200))
def test_run_lengths_tell_exactly_which_tokens_were_hits(hits: list[bool]) -> None:
    lengths = run_lengths(hits)
    assert sum(lengths) == len(hits) + 1
    assert len(lengths) == hits.count(False) + 1
    told = [hit for length in lengths for hit in [*[True] * (length - 1), False]]
    assert told[:-1] == hits


def test_match_rate_is_the_share_of_hits() -> None:
    assert make_stats().match_rate == 0.6
    assert make_stats(hits=0).match_rate == 0
    assert make_stats(misses=0).match_rate == 1
    assert make_stats(hits=0, misses=0, new_tokens=1).match_rate is None


def test_speeds() -> None:
    stats = make_stats()
    assert stats.tokens_per_second == 5.5
    assert stats.time_per_token_s == pytest.approx(0.15)
    assert make_stats(new_tokens=1).time_per_token_s == 2.0
    assert make_stats(new_tokens=2).time_per_token_s == 1.5


def test_a_tokens_ledger_leaves_the_first_token_out() -> None:
    stats = make_stats()
    assert stats.ledger.total_s == stats.latency_s
    assert stats.ledger_per_token == LatencyBreakdown(0.075, 0.0375, 0.025, 0.00625, 0.00625)
    assert stats.ledger_per_token.total_s == pytest.approx(stats.time_per_token_s)
    assert make_stats(new_tokens=1).ledger_per_token == stats.ledger
