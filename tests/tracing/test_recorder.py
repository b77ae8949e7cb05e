"""The latency ledger: its parts are the whole, none is counted twice."""

import time
from dataclasses import asdict

import pytest

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind

PROMPT = [5, 9, 200, 31]


def assert_whole(stats):
    for ledger, seconds in ((stats.ledger, stats.latency_s), (stats.first_token_ledger, stats.time_to_first_token_s)):
        assert ledger.total_s == pytest.approx(seconds, rel=0.03)
        assert min(asdict(ledger).values()) >= 0
    assert min(asdict(stats.ledger_per_token).values()) >= 0
    assert stats.ledger_per_token.total_s == pytest.approx(stats.time_per_token_s, rel=0.03)


def test_spans_and_what_lies_between_sum_to_the_whole():
    recorder = Recorder()
    outside = -time.perf_counter()
    recorder.begin()
    inside = -time.perf_counter()
    for kind, seconds in ((Kind.LAYERS, 0.02), (Kind.HEAD, 0.01), (Kind.CHOOSE, 0.01), (Kind.WAIT, 0.03)):
        time.sleep(0.005)
        began = time.perf_counter()
        time.sleep(seconds)
        recorder.note(kind, began, time.perf_counter())
    inside += time.perf_counter()
    recorder.pause()
    outside += time.perf_counter()
    time.sleep(0.05)  # nobody's
    recorder.resume()
    ledger = recorder.ledger()
    assert inside <= ledger.total_s <= outside
    assert ledger.layers_s >= 0.02
    assert ledger.heads_s >= 0.02
    assert ledger.waiting_s >= 0.03
    assert 0.02 <= ledger.python_s < outside - 0.07
    assert ledger.hops_s == 0


def test_ordinary_decodings_ledger_leaves_the_callers_time_out(folder):
    ordinary = OrdinaryDecoding(folder, emulate=EmulatedDevice(layer_ms=2.0, head_ms=3.0))
    began = time.perf_counter()
    stream = ordinary.stream(PROMPT, max_new_tokens=8, ignore_eos=True)
    for _ in stream:
        time.sleep(0.02)
    stats = stream.result.stats
    assert_whole(stats)
    assert stats.ledger.total_s <= time.perf_counter() - began - 8 * 0.02, "the caller's time was counted"
    assert stats.ledger.layers_s >= 8 * 4 * 0.002
    assert stats.ledger.heads_s >= 8 * 0.003
    assert stats.ledger.hops_s == stats.ledger.waiting_s == 0
    assert stats.first_token_ledger.layers_s >= 4 * 0.002


@pytest.mark.parametrize("match_rate", [0.0, 0.5, 1.0])
def test_a_pipelines_ledger_is_whole(folder, match_rate):
    expected = OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids
    head = OracleHead(((*PROMPT, *expected),), match_rate, 300)
    device = EmulatedDevice(layer_ms=2.0, head_ms=1.0)
    with PPDRuntime(folder, k=2, transport="local", exit_head=head, emulate=device) as runtime:
        for _ in range(2):
            result = runtime.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
            assert result.token_ids == expected
            assert_whole(result.stats)
    ledger, stats = result.stats.ledger, result.stats
    assert ledger.layers_s >= stats.main_layer_passes * 0.002
    assert ledger.heads_s >= 24 * 0.001
    assert ledger.hops_s > 0
    assert ledger.waiting_s <= stats.stall_s <= ledger.waiting_s + ledger.hops_s
