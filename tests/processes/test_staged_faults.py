"""Stages that are stopped, or killed at once or within a prompt: the text is ordinary decoding's, and nothing stays.

`test_borders.py` kills each of them.
"""

import signal
import threading
import time

import pytest
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime

PROMPT = [5, 9, 200, 31]
TOKENS = 60
NAMES = ("stage-1", "stage-2", "stage-3")
GREEDY = {"max_new_tokens": TOKENS, "ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def runtime():
    """Three stages."""
    with PPDRuntime("demo", stages=3, k=2, rows=2, launcher="processes", transport="unix", dtype="float32") as runtime:
        yield runtime
    assert not worker_processes()


@pytest.fixture(scope="module")
def ordinary():
    """The oracle."""
    return OrdinaryDecoding("demo", dtype="float32")


def test_a_stage_that_is_stopped_for_a_while_goes_on(runtime, ordinary):
    before = runtime.restarts

    def stop():
        _send("stage-2", signal.SIGSTOP)
        time.sleep(1)
        _send("stage-2", signal.SIGCONT)

    assert _text(runtime, GREEDY, stop) == _expected(ordinary, GREEDY)
    assert runtime.restarts == before


def test_all_stages_may_be_killed_at_once(runtime, ordinary):
    text = _text(runtime, GREEDY, lambda: [_send(name, signal.SIGKILL) for name in NAMES])
    assert text == _expected(ordinary, GREEDY)


def test_a_stage_that_is_killed_within_a_prompt_of_several_chunks_has_a_successor(runtime, ordinary):
    prompt, settings = [*range(1, 1501)], SAMPLED | {"max_new_tokens": 8}
    before = runtime.restarts
    killer = threading.Timer(0.05, lambda: _send("stage-2", signal.SIGKILL))
    killer.start()
    texts = [runtime.generate(prompt, **settings).token_ids]
    killer.join()
    texts.append(runtime.generate(PROMPT, **settings).token_ids)
    assert texts == [ordinary.generate(each, **settings).token_ids for each in (prompt, PROMPT)]
    assert runtime.restarts == before + 1


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}])
def test_a_text_with_a_schema_survives_each_stage(runtime, ordinary, settings):
    """Also one of a process that has never seen the vocabulary before; the demo model's tokenizer is read by all."""
    properties = {name: {"type": "string", "minLength": 12, "maxLength": 20} for name in ("path", "line", "word")}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    settings = settings | {"max_new_tokens": 120, "schema": schema}
    expected = _expected(ordinary, settings)
    for name in NAMES:
        assert _text(runtime, settings, lambda name=name: _send(name, signal.SIGKILL)) == expected


def _expected(ordinary, settings):
    return list(ordinary.generate(PROMPT, **settings).token_ids)


def _text(runtime, settings, mishap):
    stream = runtime.stream(PROMPT, **settings)
    events = [next(stream) for _ in range(20)]
    mishap()
    events += stream
    assert [event.position for event in events] == list(range(len(PROMPT), len(PROMPT) + len(events)))
    return [event.token_id for event in events]


def _send(name, what):
    worker_processes()[name].send_signal(what)
