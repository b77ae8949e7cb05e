"""A trace is well-formed, on one clock, complete, and changes no token."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.files.images import check_image_file
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.pipeline.messages import Spans
from ppd_runtime.pipeline.span_messages import MOST_SPANS, pack, unpack
from ppd_runtime.pipeline.wire import WireError, decode, encode
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span
from ppd_runtime.tracing.timeline import Timeline, draw_timeline
from ppd_runtime.tracing.trace import Trace

PROMPT = [5, 9, 200, 31]
NUM_TOKENS, NUM_LAYERS = 20, 4


@pytest.fixture(scope="module")
def expected(folder):
    """The oracle's result, without a trace."""
    return OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=[(2, 2), (3, 2), (2, 1)], ids=["half-depth", "late-exit", "run-ahead"])
def traced(request, folder, expected):
    """A pipeline's second result, with its trace."""
    head = OracleHead(((*PROMPT, *expected.token_ids),), 0.7, 300)
    exit_layer, k = request.param
    options = {
        "exit_layer": exit_layer,
        "exit_head": head,
        "emulate": EmulatedDevice(layer_ms=3.0),
        "speculation": "always",
    }
    with PPDRuntime(folder, k=k, transport="local", trace=True, **options) as runtime:
        first = runtime.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
        result = runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert first.trace.processes[0].spans[-1].ended_ns < result.trace.processes[0].spans[0].began_ns
    return result


@pytest.fixture(scope="module")
def ordinary(folder):
    """Ordinary decoding's result with its trace."""
    return OrdinaryDecoding(folder, trace=True).generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)


def spans_of(trace: Trace, rank: int, *kinds: Kind) -> list[Span]:
    return [span for span in trace.processes[rank].spans if span.kind in kinds]


def num_layer_passes(trace: Trace, rank: int) -> int:
    return sum(span.last - span.first for span in spans_of(trace, rank, Kind.LAYERS))


def assert_disjoint(process: ProcessSpans) -> None:
    assert process.spans
    ended = 0
    for span in process.spans:
        assert ended <= span.began_ns <= span.ended_ns
        if span.kind not in (Kind.HIT, Kind.MISS):
            ended = span.ended_ns


def test_tokens_and_untraced_results_stay_what_they_are(traced, ordinary, expected):
    assert traced.token_ids == ordinary.token_ids == expected.token_ids
    assert expected.trace is None


def test_spans_of_a_process_are_disjoint_and_in_order(traced, ordinary):
    for trace in (traced.trace, ordinary.trace):
        for process in trace.processes:
            assert_disjoint(process)
            assert process.dropped == 0
    ranks = [process.rank for process in traced.trace.processes]
    assert ranks == list(range(len(traced.stats.sub_layer_passes) + 1))


def test_every_layer_pass_is_there(traced, ordinary):
    stats = traced.stats
    assert num_layer_passes(traced.trace, 0) == stats.main_layer_passes + stats.main_recomputed_layer_passes
    for rank, passes in enumerate(zip(stats.sub_layer_passes, stats.sub_coherence_layer_passes, strict=True), 1):
        assert num_layer_passes(traced.trace, rank) == sum(passes)
    assert num_layer_passes(ordinary.trace, 0) == ordinary.stats.main_layer_passes == NUM_TOKENS * NUM_LAYERS


def test_hits_misses_and_tokens_are_the_texts(traced, ordinary):
    verdicts = spans_of(traced.trace, 0, Kind.HIT, Kind.MISS)
    assert Counter(span.kind for span in verdicts) == {Kind.HIT: traced.stats.hits, Kind.MISS: traced.stats.misses}
    assert tuple(span.token for span in verdicts) == traced.token_ids[:-1]
    assert [span.position for span in verdicts] == list(range(len(PROMPT), len(PROMPT) + NUM_TOKENS - 1))
    for result in (traced, ordinary):
        assert tuple(span.token for span in spans_of(result.trace, 0, Kind.CHOOSE)) == result.token_ids


def test_spans_sum_to_the_ledger(traced, ordinary):
    parts = {
        "layers_s": (Kind.LAYERS,),
        "heads_s": (Kind.HEAD, Kind.CHOOSE),
        "hops_s": (Kind.SEND, Kind.RECEIVE, Kind.ENTRIES),
        "waiting_s": (Kind.WAIT,),
    }
    for result in (traced, ordinary):
        for part, kinds in parts.items():
            seconds = sum(span.ended_ns - span.began_ns for span in spans_of(result.trace, 0, *kinds)) / 1e9
            assert seconds == pytest.approx(getattr(result.stats.ledger, part), abs=1e-6), part


def test_every_message_arrives_after_it_was_sent(traced):
    hops = list(traced.trace.hops())
    assert all(hop.received.ended_ns >= hop.sent.began_ns for hop in hops)
    kinds = Counter(hop.sent.message for hop in hops)
    assert kinds["HeadStart"] >= traced.stats.hits > 0
    told = Counter((hop.receiver, hop.sent.message) for hop in hops if hop.sender == 0)
    for sub in range(1, len(traced.trace.processes)):
        assert told[sub, "Token"] == NUM_TOKENS - 1
        assert told[sub, "End"] == 1
    received = spans_of(traced.trace, 0, Kind.RECEIVE)
    assert sum(bool(span.message) for span in received) == sum(hop.receiver == 0 for hop in hops)


def test_the_chrome_trace_is_one(traced, tmp_path):
    path = tmp_path / "trace.json"
    traced.trace.write(path)
    assert list(tmp_path.iterdir()) == [path]
    whole = json.loads(path.read_text())
    by_phase = defaultdict(list)
    for event in whole["traceEvents"]:
        by_phase[event["ph"]].append(event)
        assert {"name", "pid", "tid"} <= set(event)
        assert event["ph"] == "M" or event["ts"] >= 0
    assert set(by_phase) == {"M", "X", "i", "s", "f"}
    names = {event["pid"]: event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"}
    assert [name.split(" (")[0] for name in names.values()] == [
        traced.trace.name(p.rank) for p in traced.trace.processes
    ]
    assert list(names.values())[1].startswith("sub-process 1 (pid ")
    assert {event["pid"] for event in by_phase["X"]} == set(names)
    assert len(by_phase["X"]) + len(by_phase["i"]) == sum(len(p.spans) for p in traced.trace.processes)
    assert all(event["dur"] >= 0 and event["args"].get("position", 0) >= 0 for event in by_phase["X"])
    starts = {event["id"]: event for event in by_phase["s"]}
    assert len(starts) == len(by_phase["s"]) == len(by_phase["f"])
    assert all(event["ts"] >= starts[event["id"]]["ts"] for event in by_phase["f"])
    assert whole["otherData"]["conditions"] == "EMULATED devices of 3 ms a layer"


def test_the_newest_spans_are_kept():
    recorder = Recorder(most_spans=10)
    recorder.begin(traced=True)
    for position in range(25):
        recorder.note(Kind.LAYERS, 1.0, 2.0, position)
    recorded = recorder.spans(0)
    assert [span.position for span in recorded.spans] == list(range(15, 25))
    assert recorded.dropped == 15
    recorder.begin()
    recorder.note(Kind.LAYERS, 1.0, 2.0)
    assert recorder.spans(0) is None


spans = st.builds(
    lambda kind, began, length, numbers, message: Span(kind, began, began + length, *numbers, message),
    st.sampled_from([int(kind) for kind in Kind]),
    st.integers(0, 2**60),
    st.integers(0, 2**40),
    st.tuples(*[st.integers(-1, 2**40)] * 5),
    st.sampled_from(["", "HeadStart", "Token", "Spans"]),
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(spans, max_size=30))
def test_spans_survive_the_journey(recorded):
    process = ProcessSpans(2, 1234, -5, 7, tuple(recorded))
    pieces = list(pack(process, 3))
    assert all(piece.request == 3 and piece.sender == 2 for piece in pieces)
    assert unpack([decode([bytes(frame) for frame in encode(piece)]) for piece in pieces]) == process


@pytest.mark.parametrize(
    "numbers",
    [
        [0],
        [0] * 10,
        [len(Kind), 1, 2, 0, 0, 0, 0, 0, -1],
        [-1, 1, 2, 0, 0, 0, 0, 0, -1],
        [0, 2, 1, 0, 0, 0, 0, 0, -1],
        [0, -2, 1, 0, 0, 0, 0, 0, -1],
        [0, 1, 2, 0, 0, 0, 0, 0, -2],
        [0, 1, 2, 0, 0, 0, 0, 0, 100],
        [0, 1, 2, 0, 0, 0, 0, 0, -1] * (MOST_SPANS + 1),
    ],
    ids=lambda numbers: str(numbers)[:40],
)
def test_spans_that_nobody_recorded_are_refused(numbers):
    with pytest.raises(WireError):
        unpack([Spans(1, 1, 1, 1, 0, numbers)])


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=30))
def test_arbitrary_numbers_are_spans_or_a_wire_error(numbers):
    try:
        process = unpack([Spans(1, 1, 1, 1, 0, numbers)])
    except WireError:
        return
    assert len(process.spans) * len(Span._fields) == len(numbers)


def test_the_timeline_shows_every_token_candidate_and_hit(traced):
    timeline = Timeline(traced.trace, num_tokens=12, word=str)
    assert [verdict.token for verdict in timeline.verdicts] == list(traced.token_ids[:12])
    assert [verdict.hit for verdict in timeline.verdicts] == _hits(traced)[:12]
    assert [verdict.time for verdict in timeline.verdicts] == sorted(verdict.time for verdict in timeline.verdicts)
    main = Counter(box.kind for box in timeline.boxes() if box.row == 0)
    assert main["layers behind the exit"] + main["layers across the exit"] == 12
    assert main["layers up to the exit"] <= main["layers behind the exit"]
    labels = {box.label for box in timeline.boxes() if box.kind == "a candidate that was right"}
    assert labels <= {str(token) for token in traced.token_ids}
    used = [hop for hop, sent, received in timeline.early_starts() if sent <= received]
    assert len(used) == sum(hit is True for hit in _hits(traced)[:11])
    assert {hop.sent.token for hop in used} <= set(traced.token_ids)


def test_timelines_are_drawn(traced, ordinary, tmp_path):
    pytest.importorskip("matplotlib")
    for result in (traced, ordinary):
        path = tmp_path / "timeline.png"
        draw_timeline(result.trace, path, lambda token: f"$ {token}\n")
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no kind of image"):
        check_image_file(Path("timeline.txt"))


def _hits(result) -> list[bool | None]:
    verdicts = spans_of(result.trace, 0, Kind.HIT, Kind.MISS)
    return [*(span.kind == Kind.HIT for span in verdicts), None]
