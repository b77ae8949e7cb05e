"""`ppd serve` under bad requests: each is refused by its field, none makes it fail, and nothing of them is left."""

import contextlib
import http.client
import io
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from heapq import nlargest
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import psutil
import pytest
from bad_requests import Bad, bad_request
from seeds import SEED
from served import DEADLINE_S, Served
from servers import HERMES
from worker_processes import worker_processes

_IN_THE_NIGHT = int(os.environ.get("PPD_BAD_REQUESTS", "10000"))
_AT_ONCE = 8
_PATIENCE_S = 1.0  # for the answer to what is no whole request, before the client says that no more comes
_MOST_MORE = {"MB": 150, "open files": 3, "threads": 8}
"""What the server and its workers may hold at the end beyond what they held when half of the requests were answered.

In 6,000 requests, with the usual cache for prompts, the three processes grew by 340 MB (glibc's `mallinfo2`, two cores,
2026-11-29). 250 MB of it was free: malloc keeps what a long form took while it was read, such as 40 MB for `a{99999}`,
once for each thread that has read one. `malloc_trim` gave 200 MB of it back. 70 MB was the cache for prompts in the two
stages, which is smaller here. Kept forms and all else took 2 to 7 MB in each process.
"""
_ENOUGH = 4000
"""Requests of a half behind which what is kept for later requests is full; before, memory is not compared."""
_IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "chat.jinja").write_text(HERMES)
    options = ("--stages", "2", "--speculation", "always", "--chat-template", str(folder / "chat.jinja"))
    bounds = ("--prefix-cache-tokens", "512", "--request-timeout-s", "2", "--max-body-mib", "1")
    with Served(folder / "log", *options, *bounds) as found:
        yield found


def test_two_hundred_bad_requests_leave_nothing(served: Served) -> None:
    leave_nothing(served, 200)


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_thousands_of_bad_requests_leave_nothing(served: Served) -> None:
    leave_nothing(served, _IN_THE_NIGHT)


def leave_nothing(served: Served, number: int) -> None:
    """Send so many; the first half warms the server up."""
    half = number // 2
    texts, workers = good(served), {name: one.pid for name, one in workers_of(served).items()}
    problems = problems_of(served, range(half))
    wait_until_idle(served)
    before = held(served)
    problems += problems_of(served, range(half, number))
    wait_until_idle(served)
    after = held(served)
    assert not problems, "\n".join([f"{len(problems)} of {number}, PPD_SEED={SEED}:", *problems[:50]])
    assert {name: one.pid for name, one in workers_of(served).items()} == workers, "none was restarted"
    assert "Traceback" not in served.log.read_text()
    grown = {what: after[what] - before[what] for what in _MOST_MORE if what != "MB" or half >= _ENOUGH}
    assert all(more <= _MOST_MORE[what] for what, more in grown.items()), (before, after)
    assert good(served) == texts


def good(served: Served) -> list[str]:
    """The texts of good requests."""
    said = [{"role": "user", "content": "import os"}]
    chat = served.client.post(
        "/v1/chat/completions", json={"messages": said, "max_tokens": 16, "temperature": 0}
    ).json()
    sampled = served.complete(temperature=0.8, seed=5)
    shaped = served.complete(guided_regex="[a-z]{5,20}")
    return [
        *(one["choices"][0]["text"] for one in (served.complete(), sampled, shaped)),
        str(chat["choices"][0]["message"]),
    ]


def workers_of(served: Served) -> dict[str, psutil.Process]:
    return worker_processes(psutil.Process(served.process.pid))


def wait_until_idle(served: Served) -> None:
    """Until no choice runs or waits, and no entry of the cache is taken."""
    served.wait_until(lambda: [value for name, value in counts(served).items() if name in _IDLE] == [0.0] * len(_IDLE))


def counts(served: Served) -> dict[str, float]:
    """The metrics by name."""
    lines = [line for line in served.client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def held(served: Served) -> Counter[str]:
    """What the server and its workers hold: memory that is their own, open files, threads."""
    found = Counter[str]()
    for one in (psutil.Process(served.process.pid), *workers_of(served).values()):
        memory = one.memory_info()
        found += Counter(
            {"MB": (memory.rss - memory.shared) // 10**6, "open files": one.num_fds(), "threads": one.num_threads()}
        )
    return found


class Sent(NamedTuple):
    """What came of a request."""

    seconds: float
    kind: str
    """What was wrong with it, in a word, and the status of its answer."""
    problem: str
    """What is wrong with the answer; empty if nothing is."""


def problems_of(served: Served, numbers: Sequence[int]) -> list[str]:
    """Send the requests of these numbers, several at once; what is wrong with their answers."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sent = list(pool.map(partial(send, urlsplit(served.url)), numbers))
    print(dict(sorted(Counter(one.kind for one in sent).items())), "slowest:", nlargest(3, sent))
    return [one.problem for one in sent if one.problem]


def send(place: SplitResult, number: int) -> Sent:
    """Send the request of a number."""
    bad, began = bad_request(random.Random(f"{SEED} {number}")), time.monotonic()
    try:
        status, body = answer_to((str(place.hostname), int(place.port or 0)), bad)
        fault = fault_of(bad, status, body)
    except (OSError, http.client.HTTPException) as error:
        status, body, fault = 0, b"", repr(error)
    problem = f"{number}: {bad.kind}, {bad.path}: {fault}; {status} {body[:300]!r}" if fault else ""
    return Sent(time.monotonic() - began, f"{bad.kind.split()[0]} {status}", problem)


def answer_to(place: tuple[str, int], bad: Bad) -> tuple[int, bytes]:
    """The status and the body; 0 without an answer, which a client that goes away does not read."""
    with socket.create_connection(place, DEADLINE_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # an answer may have come all the same
            connection.sendall(bad.sent)
        if bad.leaves:
            return 0, b""
        if not bad.is_whole:
            connection.settimeout(_PATIENCE_S)
        try:
            said = _all_of(connection)
        except TimeoutError:
            connection.settimeout(DEADLINE_S)
            connection.shutdown(socket.SHUT_WR)
            said = _all_of(connection)
    return _read(said, bad)


def _all_of(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):  # behind the answer, where the server has not read all
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


class _Said(io.BytesIO):
    """Bytes as http.client wants a socket."""

    def makefile(self, *_: Any) -> "_Said":
        return self


def _read(said: bytes, bad: Bad) -> tuple[int, bytes]:
    if not said:
        return 0, b""
    answer = http.client.HTTPResponse(_Said(said), method="HEAD" if bad.kind == "method HEAD" else "POST")  # type: ignore[arg-type]
    answer.begin()
    return answer.status, answer.read()


def fault_of(bad: Bad, status: int, body: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if status == 0:
        return "" if bad.leaves or not bad.is_whole else "no answer"
    if 200 <= status < 300:
        return "the server failed" if b'"server_error"' in body else ""
    if status == 307 and bad.path.endswith("/"):
        return ""  # to the path without it
    if not 400 <= status < 500:
        return "neither an answer nor a refusal"
    return "" if bad.kind == "method HEAD" else _fault_of_refusal(bad, status, body)


def _fault_of_refusal(bad: Bad, status: int, body: bytes) -> str:
    try:
        told = json.loads(body)
        message, kind, param = (told["error"][name] for name in ("message", "type", "param"))
    except (ValueError, LookupError, TypeError) as fault:
        return f"no error object: {fault!r}"
    if not 5 < len(message) < 2000 or not kind:
        return "an error object without words"
    if bad.path.startswith("/v1/messages") and bad.is_whole and told.get("type") != "error":
        return "not Anthropic's form"
    if "positions:" in message or "half a character" in message:  # of a rendered conversation
        return ""
    named = any(field == param or field[:30] in message for field in bad.fields)
    return f"names none of {bad.fields}" if bad.fields and status == 400 and not named else ""
