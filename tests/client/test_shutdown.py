"""Closing a runtime at any moment: a thread in a call is told so, nothing hangs, and a fork closes nothing."""

import os
import signal
import threading
import time

import pytest

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.client.shutdown import ShutdownGuard

PROMPT = [5, 9, 200, 31]


@pytest.fixture
def runtime(folder):
    """On threads, where a call that waits for somebody who is gone would wait for ever."""
    with PPDRuntime(folder, k=1, transport="local") as runtime:
        yield runtime


def _decode_for_long(runtime):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="^the runtime is closed: make a new one$"):
        while time.monotonic() < began + 60:
            runtime.generate(PROMPT, max_new_tokens=500, ignore_eos=True)
    assert time.monotonic() - began < 60


def _threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ppd-")]


def test_between_two_tokens(runtime):
    stream = runtime.stream(PROMPT, max_new_tokens=100)
    next(stream)
    runtime.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    stream.close()
    assert not _threads()


def test_from_another_thread_and_from_two(runtime):
    closers = [threading.Timer(0.3, runtime.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    _decode_for_long(runtime)
    for closer in closers:
        closer.join(10)
        assert not closer.is_alive()
    assert not _threads()


def test_from_a_signal_handler(runtime):
    before = signal.signal(signal.SIGALRM, lambda *_: (runtime.close(), runtime.close()))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        _decode_for_long(runtime)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not _threads()


def test_while_it_starts(folder, monkeypatch):
    runtime = PPDRuntime(folder, k=1, transport="local")
    monkeypatch.setattr(runtime, "_progress", lambda line: "waiting" in line and runtime.close())
    with pytest.raises(RuntimeError, match="closed"):
        runtime.start()
    assert not _threads()


def test_a_fork_may_neither_use_nor_close_it(runtime, folder):
    child = os.fork()
    if not child:
        said = ""
        try:
            runtime.generate(PROMPT, max_new_tokens=2)
        except RuntimeError as error:
            said = str(error)
        runtime.close()
        os._exit(0 if "a fork: make one here" in said else 1)
    assert os.waitpid(child, 0)[1] == 0
    expected = OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=5).token_ids
    assert runtime.generate(PROMPT, max_new_tokens=5).token_ids == expected


def test_a_main_process_that_fails_while_a_stream_is_dropped_closes_the_runtime(runtime, monkeypatch):
    stream = runtime.stream(PROMPT, max_new_tokens=500, ignore_eos=True)
    next(stream)

    def fail(_):
        raise RuntimeError("the main process failed: it fell")

    monkeypatch.setattr("ppd_runtime.client.request.RequestClient.cancel", fail)
    with pytest.raises(RuntimeError, match="it fell"):
        stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        runtime.generate(PROMPT, max_new_tokens=2)


def test_an_interrupted_cancel_gives_the_turn_back(runtime, folder, monkeypatch):
    stream = runtime.stream(PROMPT, max_new_tokens=500, ignore_eos=True)
    next(stream)

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ppd_runtime.client.request.RequestClient.cancel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    expected = OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=5).token_ids
    assert runtime.generate(PROMPT, max_new_tokens=5).token_ids == expected


class _Workers:
    """Counts how often they are closed, and by whom."""

    def __init__(self) -> None:
        self.supervisor, self.closed = self, []

    def dismiss(self) -> None:
        """As a supervisor's."""

    def close(self) -> None:
        self.closed.append(threading.get_ident())


def test_a_step_is_never_closed_under():
    closing = ShutdownGuard(workers := _Workers())
    closer = threading.Thread(target=closing.close)
    with closing:
        closer.start()
        closing.close()  # as a signal handler does
        closer.join(0.2)
        assert closer.is_alive()
        assert not workers.closed
    closer.join(5)
    closing.close()
    assert workers.closed == [threading.get_ident()]


def test_a_life_that_nobody_has_greeted_ends_too(runtime):
    runtime.generate(PROMPT, max_new_tokens=4)
    runtime._workers._spawn(1)
    runtime.close()
    deadline = time.monotonic() + 30
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads()
