"""The server over stages, in threads: what it counts, what a client that goes away leaves, and when it is not well."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from families.specimens import UNUSUAL, Specimen
from grids import nightly
from models_for_tests import build_tokenizer
from servers import running
from waiting import wait_until

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch import threads
from ppd_runtime.methods.request_queue import RequestQueue
from ppd_runtime.models.stage.chunks import PROMPT_CHUNKS
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.server.completions import Service
from ppd_runtime.server.requests import ChatRequest
from ppd_runtime.server.settings import ServerSettings
from ppd_runtime.workers.worker import Worker

PROMPT = [5, 9, 200, 31]
ROOM, MOST = 16_000, 8000  # tokens of all requests, and new ones of one


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama", num_layers=4)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    found: list[Worker] = []
    monkeypatch.setattr(threads, "Worker", lambda spec: found.append(Worker(spec)) or found[-1])
    return found


@pytest.fixture
def spacious(model_folder: Callable[..., Path], workers: list[Worker]) -> Iterator[PPDRuntime]:
    """Stages for texts that take minutes."""
    folder = model_folder("llama", num_layers=4, max_position_embeddings=2 * MOST)
    layout = {"stages": 2, "rows": 2, "k": 2, "cuts": (2,), "transport": "local", "dtype": "float32"}
    with PPDRuntime(folder, **layout, max_cache_tokens=ROOM) as found:
        yield found


def test_a_client_that_goes_away_frees_its_slots_within_a_token(spacious: PPDRuntime, workers: list[Worker]) -> None:
    asked = {"prompt": PROMPT, "max_tokens": MOST, "ignore_eos": True, "stream": True}
    with running(spacious) as server:
        with server.client() as client, client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()  # dropped, it would leave
            assert next(lines).startswith("data:")
            assert server.counts()["vllm:kv_cache_usage_perc"] == (len(PROMPT) + MOST) / ROOM
            assert all(worker._sessions for worker in workers)
        wait_until(lambda: server.counts()["vllm:kv_cache_usage_perc"] == 0 and not any(w._sessions for w in workers))
        (last,) = [session.machine for worker in workers for session in worker._past.values() if worker.spec.rank == 0]
        assert isinstance(last, LastStage)
        assert len(last.history) < len(PROMPT) + MOST / 2
        assert all(worker._role.tree_range._cache.capacity < MOST for worker in workers)


def test_boundaries_are_counted_and_the_layout_is_told(folder: Path) -> None:
    expected = OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    layout = {"stages": 3, "rows": 2, "k": 2, "cuts": (1, 3), "transport": "local", "dtype": "float32"}
    with PPDRuntime(folder, **layout) as runtime, running(runtime) as server:
        before = server.counts()
        asked = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        (choice,) = server.post("/v1/completions", **asked).json()["choices"]
        after = server.counts()
        with server.client() as client:
            told = client.get("/metrics").text.splitlines()
    assert choice["text"] == expected.text
    lines = [line for line in told if line.startswith("ppd:first_boundary_total")]
    told = choice["ppd"]
    assert told["layout"] == {"method": "ppd", "cuts": [1, 3], "rows": 2, "k": 2}
    assert sum(told["first_boundary"]) == 19
    assert told["one_process"] is False
    names = ("1", "2", "none")
    counted = [next(float(line.split()[-1]) for line in lines if f'boundary="{name}"' in line) for name in names]
    assert counted == told["first_boundary"]
    assert after["vllm:spec_decode_num_draft_tokens_total"] - before["vllm:spec_decode_num_draft_tokens_total"] == 19
    assert after["vllm:spec_decode_num_accepted_tokens_total"] == sum(told["first_boundary"][:-1])


@nightly
@pytest.mark.parametrize("specimen", UNUSUAL, ids=lambda specimen: specimen.name)
def test_texts_of_unusual_layers_at_once(specimen: Specimen, tmp_path: Path) -> None:
    """Two texts run at once, and a third waits; all are ordinary decoding's."""
    specimen.build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    ordinary, asked = OrdinaryDecoding(tmp_path, dtype="float32"), (PROMPT, [40, 7], list(range(20, 60)))
    expected = [ordinary.generate(prompt, max_new_tokens=20, ignore_eos=True).text for prompt in asked]
    layout = {"stages": 3, "rows": 2, "k": 2, "max_requests": 2, "transport": "local", "dtype": "float32"}
    with PPDRuntime(tmp_path, **layout) as runtime, running(runtime) as server, ThreadPoolExecutor(3) as callers:
        settings = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
        answers = callers.map(lambda prompt: server.post("/v1/completions", prompt=prompt, **settings).json(), asked)
        assert [answer["choices"][0]["text"] for answer in answers] == expected


def test_kept_prefixes_are_counted(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama", num_layers=2, max_position_embeddings=1024)
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32") as runtime, running(runtime) as server:
        for _ in range(2):
            assert server.post("/v1/completions", prompt=[7] * 300, max_tokens=1).status_code == 200
        found = server.counts()
    assert found["vllm:prefix_cache_queries_total"] == 600
    assert found["vllm:prefix_cache_hits_total"] == found["vllm:prompt_tokens_cached_total"] == PROMPT_CHUNKS[0]


def chat(words: int = 1, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a " * words}], "temperature": 0, "ignore_eos": True, **more}


def test_a_chat_without_max_tokens_gets_what_fits(model_folder: Callable[..., Path], template: Path) -> None:
    """The model has more positions than there is room."""
    folder = model_folder("llama", num_layers=2, max_position_embeddings=4096)
    layout = {"stages": 2, "transport": "local", "dtype": "float32", "max_cache_tokens": 60}
    with PPDRuntime(folder, **layout) as runtime, running(runtime, chat_template=template) as server:
        usage = server.post("/v1/chat/completions", **chat()).json()["usage"]
        assert usage["total_tokens"] == 60
        assert server.post("/v1/chat/completions", **chat(words=100)).status_code == 400, "it never fits"


def test_chats_without_max_tokens_run_at_once(spacious: PPDRuntime, template: Path) -> None:
    asked = chat(stream=True)
    with running(spacious, chat_template=template) as server, ExitStack() as opened:
        clients = [opened.enter_context(server.client()) for _ in range(2)]
        streams = [client.stream("POST", "/v1/chat/completions", json=asked) for client in clients]
        answers = [opened.enter_context(stream).iter_lines() for stream in streams]
        assert all(next(lines).startswith("data:") for lines in answers)
        wait_until(lambda: server.counts()["vllm:num_requests_running"] == 2)
        assert server.counts()["vllm:kv_cache_usage_perc"] == 2 * (ROOM // spacious.max_requests) / ROOM


@pytest.mark.parametrize(("prompt", "new"), [(10, 1490), (1300, 256), (2900, 100), (2999, 1)])
def test_a_long_prompt_leaves_new_tokens_while_there_is_room(folder: Path, prompt: int, new: int) -> None:
    """Each of two has half of the room."""
    ordinary = OrdinaryDecoding(folder)
    ordinary.queue, ordinary.info = RequestQueue(2, 3000), replace(ordinary.info, max_positions=10_000)
    service = Service(ordinary, ServerSettings())
    (generation,) = service._generations(ChatRequest(**chat()), [5] * prompt, False)
    service.end_threads()
    assert generation.most_tokens - generation.prompt_tokens == new


def test_the_papers_layout_is_told(folder: Path) -> None:
    with PPDRuntime(folder, k=1, exit_layer=3, transport="local") as runtime, running(runtime) as server:
        stream = server.post("/v1/completions", prompt=PROMPT, max_tokens=2, stream=True).text
    told = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    assert told[-1]["choices"][0]["ppd"]["layout"] == {"method": "ppd", "k": 1, "exit_layer": 3}


class Ailing(OrdinaryDecoding):
    """Ordinary decoding that says of itself what a test wants."""

    lost: tuple[str, ...] = ()

    def unwell(self) -> list[str]:
        return [*self.lost]


def test_a_server_whose_workers_are_lost_for_good_ends(folder: Path) -> None:
    ailing = Ailing(folder)
    with running(ailing) as server, server.client() as client:
        assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)
        ailing.lost = ("stage 1",)
        answer = client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "unwell", "lost": ["stage 1"]})
        wait_until(lambda: client.get("/ready").status_code == 503)
        ailing.lost = ()
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert not server.server.failed
        ailing.lost = ("the runtime",)
        wait_until(lambda: server.server.failed)
        assert server.server.failed.startswith("the workers are lost")
