"""`ppd serve` as a user runs it: a process of its own over two stages, and its end."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from commands import refused
from served import DEADLINE_S, PROMPT, Served
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--stages", "2", "--speculation", "always", "--log-format", "json")
    with Served(tmp_path_factory.mktemp("serve") / "log", *options) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> str:
    with OrdinaryDecoding("demo") as ordinary:
        return ordinary.generate(PROMPT, max_new_tokens=16).text


def test_a_completion_of_two_stages_is_ordinary_decodings(served: Served, expected: str) -> None:
    answer = served.complete(logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == expected
    assert choice["ppd"]["layout"]["cuts"]
    assert sum(choice["ppd"]["first_boundary"]) == 15
    assert len(choice["logprobs"]["token_logprobs"]) == 16
    served.wait_until(lambda: '"path": "/v1/completions"' in served.log.read_text())
    (row,) = [json.loads(line) for line in served.log.read_text().splitlines() if "/v1/completions" in line]
    assert (row["method"], row["status"]) == ("POST", 200)


def test_a_streams_pieces_tell_who_foresaw_each_token_and_its_passes_where_they_are_wanted(served: Served) -> None:
    for wanted in (None, {"foreseen": True}, {"timeline": True}):
        chunks = served.stream(ppd=wanted)
        told = [chunk["choices"][0].get("ppd", {}) for chunk in chunks]
        named = dict(pair for ppd in told for pair in ppd.get("foreseen", ()))
        assert sorted(named) == ([] if wanted is None else list(range(15)))
        if wanted is None:
            assert (sum(told[-1]["first_boundary"]), len(chunks)) == (15, 17)
            continue
        counts = [sum(max(boundary, 1) == place for boundary in named.values()) for place in (1, 2)]
        assert counts == told[-1]["first_boundary"]
        passes = [one for ppd in told for one in ppd.get("passes", ())]
        if "foreseen" in wanted:
            assert (passes, len(chunks)) == ([], 17)
            continue
        assert (told[0]["processes"], told[0]["stages"]) == (["stage 2", "stage 1"], 2)
        assert {rank for rank, *_ in passes} == {0, 1}
        assert [token for rank, what, *_, token in passes if (rank, what) == (0, "choice")] == list(range(16))
        assert all(0 <= began <= ended for _, _, began, ended, _ in passes)


def test_a_lost_worker_is_replaced_while_nobody_asks(served: Served, expected: str) -> None:
    workers = worker_processes(psutil.Process(served.process.pid))
    workers["stage-1"].kill()
    served.wait_until(lambda: served.client.get("/health").status_code == 503)
    served.wait_until(lambda: "stage 1 is lost" in served.log.read_text())
    served.wait_until(lambda: served.client.get("/health").status_code == 200)
    assert served.complete()["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["--chat-template", "none.jinja"], "--chat-template none.jinja"),
        (["--port", "70000"], "--port"),
        (["--stages", "0"], "--stages"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PPD_API_KEY", raising=False)
    assert words in refused("serve", *options)


def test_sigterm_finishes_what_runs(served: Served) -> None:
    ends_at_sigterm(served, 1)


@pytest.mark.nightly
def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    with Served(tmp_path / "log", "--method", "autoregressive") as found:
        ends_at_sigterm(found, 2)


def ends_at_sigterm(served: Served, times: int) -> None:
    """While a stream runs, whose end comes behind one signal and not behind two."""
    asked = {"prompt": PROMPT, "max_tokens": 60 if times == 1 else 1500, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        served.process.send_signal(signal.SIGTERM)
        if times == 1:
            assert "data: [DONE]" in list(lines)
        else:
            served.wait_until(lambda: "shutting down" in served.log.read_text())
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.HTTPError):
                list(lines)
    assert served.process.wait(DEADLINE_S) == 143
