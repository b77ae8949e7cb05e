"""A request whose time is up, or that another thread cancels, ends with what there is; the runtime goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppd_runtime import OrdinaryDecoding, open_method
from ppd_runtime.client.ending import Ending
from ppd_runtime.client.exchange import MessageExchange
from ppd_runtime.client.request import RequestClient
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.pipeline.messages import Begin, Cancel, Finished, Message, Token
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER

ModelFolder = Callable[..., Path]
PROMPT = [40, 7, 291, 65, 133]
LONG = {"max_new_tokens": 500, "ignore_eos": True}
WAYS = {
    "autoregressive": {"method": "autoregressive"},
    "pipelined, k=1": {"method": "ppd", "k": 1, "transport": "local"},
    "pipelined, k=3": {"method": "ppd", "k": 3, "transport": "local"},
    "layerskip": {"method": "layerskip", "exit_layer": 2},
}
STAGES = {"stages": {"method": "ppd", "stages": 3, "transport": "local"}}
"""Where several stages share a core, a short time may be up before the first token."""


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> str:
    return str(model_folder("llama", num_layers=6, hidden_size=256))


@pytest.fixture(scope="module")
def expected(folder: str) -> tuple[int, ...]:
    return OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, **LONG).token_ids


@pytest.fixture
def method(folder: str, request: pytest.FixtureRequest) -> Iterator[TextGenerator]:
    with open_method(folder, **(WAYS | STAGES)[request.param], dtype="float32") as opened:
        yield opened


def check_part(generator: TextGenerator, result: object, expected: tuple[int, ...], reason: str) -> None:
    """The result is a beginning of the whole text, and tells why it is no more; the next request is whole."""
    size = len(result.token_ids)
    assert result.finish_reason == reason
    assert 0 < size < len(expected)
    assert result.token_ids == expected[:size]
    assert result.text == generator.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.stats.new_tokens == sum(result.stats.run_lengths) == size
    assert result.to_dict()["stats"]["tokens_per_second"] > 0
    after = generator.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert (after.token_ids, after.finish_reason) == (expected[:20], "length")


@pytest.mark.parametrize(("method", "live"), [*zip(WAYS, (False, True, False, True), strict=True)], indirect=["method"])
def test_a_request_whose_time_is_up_ends_with_what_there_is(
    method: TextGenerator, expected: tuple[int, ...], live: bool
) -> None:
    method.generate(PROMPT, max_new_tokens=2)  # workers load before a request's time begins, but not its first pass
    began = time.monotonic()
    if live:
        stream = method.stream(PROMPT, timeout_s=0.05, **LONG)
        texts = [event.text for event in stream]
        assert len(texts) == len(stream.result.token_ids)
        result = stream.result
    else:
        result = method.generate(PROMPT, timeout_s=0.05, **LONG)
    assert time.monotonic() - began < 20
    check_part(method, result, expected, "timeout")


@pytest.mark.parametrize("method", WAYS, indirect=True)
def test_another_thread_cancels(method: TextGenerator, expected: tuple[int, ...]) -> None:
    method.cancel()  # nothing is running: nothing happens
    assert len(method.generate(PROMPT, max_new_tokens=2, ignore_eos=True).token_ids) == 2
    results = []
    worker = threading.Thread(target=lambda: results.append(method.generate(PROMPT, **LONG)))
    worker.start()
    while worker.is_alive() and not method.queue.running:
        time.sleep(0.001)
    time.sleep(0.05)
    method.cancel()
    method.cancel()
    worker.join(20)
    assert not worker.is_alive()
    check_part(method, results[0], expected, "cancelled")


@pytest.mark.parametrize("method", WAYS | STAGES, indirect=True)
def test_who_streams_may_cancel(method: TextGenerator, expected: tuple[int, ...]) -> None:
    stream = method.stream(PROMPT, **LONG)
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 3:
            method.cancel()
    assert [event.token_id for event in events] == list(stream.result.token_ids)
    check_part(method, stream.result, expected, "cancelled")


@pytest.mark.parametrize("method", STAGES, indirect=True)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_stop_texts_end_a_text_in_stages(method: TextGenerator, folder: str, sampling: dict[str, float]) -> None:
    """Candidates behind the end are in flight then; the next request is whole."""
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    whole = ordinary.generate(PROMPT, max_new_tokens=30, ignore_eos=True, **sampling)
    for first in (1, 12, 25):
        piece = ordinary.tokenizer.decode(whole.token_ids[first : first + 2])
        settings = {"max_new_tokens": 30, "ignore_eos": True, "stop": ["never said", piece], **sampling}
        expected = ordinary.generate(PROMPT, **settings)
        got = method.generate(PROMPT, **settings)
        assert expected.finish_reason == "stop"
        assert (got.token_ids, got.text, got.finish_reason) == (expected.token_ids, expected.text, "stop")
        stream = method.stream(PROMPT, **settings)
        assert "".join(event.text for event in stream) == expected.text
    assert method.generate(PROMPT, max_new_tokens=30, ignore_eos=True, **sampling).token_ids == whole.token_ids


def test_a_cancel_leaves_calls_that_wait_alone(folder: str, expected: tuple[int, ...]) -> None:
    generator = OrdinaryDecoding(folder, dtype="float32")
    first = generator.stream(PROMPT, **LONG)
    next(first)
    waiting: list[object] = []
    other = threading.Thread(
        target=lambda: waiting.append(generator.generate(PROMPT, max_new_tokens=9, ignore_eos=True))
    )
    other.start()
    time.sleep(0.1)
    generator.cancel()
    assert len(list(first)) < 10
    assert first.result.finish_reason == "cancelled"
    other.join(20)
    assert (waiting[0].token_ids, waiting[0].finish_reason) == (expected[:9], "length")


class _NewMain:
    """Endpoint and supervisor of a main process that takes another's place and knows nothing of the request."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.told: list[Message] = [Token(DECIDER, 1, 1, 7, 0), Token(DECIDER, 1, 2, 8, 0)]
        self.cancels = 0
        self.endpoint = self.supervisor = self

    def send(self, address: int, message: Message) -> None:
        if isinstance(message, Cancel):
            self.cancels += 1
            self.told += [Finished.cut_short(message.request)] * self.answers

    def receive(self, timeout: float | None) -> Message | None:
        time.sleep(0 if self.told else 0.01)
        return self.told.pop(0) if self.told else None

    def check(self, hear: object) -> None: ...

    def note_success(self, rank: int) -> None: ...

    def starts(self, rank: int) -> int:
        return 1

    def is_serving(self, rank: int) -> bool:
        return True


@pytest.mark.parametrize("answers", [True, False])
def test_a_cancel_does_not_wait_for_a_main_process_that_knows_or_says_nothing(answers: bool) -> None:
    """What has been delivered is the result; the rest is not asked for again and again."""
    workers, ending = _NewMain(answers), Ending(None)
    begin = Begin(CLIENT, 1, [5], SamplingParams(100), live=True)
    call, tokens = RequestClient(MessageExchange(workers), begin, ending), []
    for token in call:
        tokens.append(token.token_id)
        if len(tokens) == 2:
            ending.cancel()
    assert tokens == [7, 8]
    assert (call.reports.finished.num_tokens, call.reports.finished.reason) == (2, "cancelled")
    assert 0 < call.reports.finished.path.latency_s < 10
    assert workers.cancels == 1 or not answers


def test_a_clock_starts_once_and_runs_out() -> None:
    ending = Ending(0.02)
    assert (ending.reason(), ending.seconds_left()) == (None, float("inf"))
    ending.start_clock()
    assert ending.reason() is None
    assert 0 < ending.seconds_left() <= 0.02
    time.sleep(0.03)
    ending.start_clock()
    assert (ending.reason(), ending.seconds_left()) == ("timeout", 0)
