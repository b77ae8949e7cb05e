"""Several requests at once in the staged layout: each text is the one that it has alone, and no request starves."""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from seeds import SEED
from servers import Stepwise
from waiting import wait_until

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.client.ending import Ending
from ppd_runtime.methods import request_queue
from ppd_runtime.methods.request_queue import Place, RequestQueue
from ppd_runtime.pipeline.ports import Work
from ppd_runtime.workers.session import Session
from ppd_runtime.workers.worker import Worker

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def ordinary(folder: str) -> OrdinaryDecoding:
    return OrdinaryDecoding(folder, dtype="float32")


def test_requests_of_all_kinds(folder: str, ordinary: OrdinaryDecoding) -> None:
    """Greedy and sampled, long and short, some with prompts of several chunks, some cancelled in the middle."""
    draw = random.Random(SEED)
    jobs = [
        (
            [draw.randrange(300) for _ in range(draw.choice([1, 4, 20, 300 if number < 4 else 7]))],
            {
                "max_new_tokens": draw.randint(1, 40),
                "ignore_eos": True,
                "temperature": float(number % 2),
                "seed": number,
            },
            draw.choice([3, 100]),
        )
        for number in range(12)
    ]

    with PPDRuntime(folder, stages=3, rows=4, transport="local", dtype="float32", max_requests=6) as runtime:

        def decode(job: tuple[list[int], dict[str, int], int]) -> tuple[int, ...]:
            prompt, settings, most = job
            stream, tokens = runtime.stream(prompt, **settings), []
            for event in stream:
                tokens.append(event.token_id)
                if len(tokens) == most:
                    stream.close()
                    break
            return tuple(tokens)

        with ThreadPoolExecutor(len(jobs)) as pool:
            texts = list(pool.map(decode, jobs))
    for (prompt, settings, most), tokens in zip(jobs, texts, strict=True):
        assert tokens == ordinary.generate(prompt, **settings).token_ids[:most]


def test_several_prompts_in_the_order_given(folder: str, ordinary: OrdinaryDecoding) -> None:
    prompts = [[i + 1, 2 * i + 1] for i in range(5)]
    settings = {"max_new_tokens": 9, "ignore_eos": True}
    expected = [ordinary.generate(prompt, **settings).token_ids for prompt in prompts]
    assert [result.token_ids for result in ordinary.generate(prompts, **settings)] == expected
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32", max_requests=3) as runtime:
        assert [result.token_ids for result in runtime.generate(prompts, **settings)] == expected
        assert [result.text for result in runtime.generate(["word1", "word2 word3"], **settings)] == [
            ordinary.generate(text, **settings).text for text in ("word1", "word2 word3")
        ]
        with pytest.raises(ValueError, match="the prompt is empty"):
            runtime.generate([[1, 2], []], **settings)


def test_nobody_waits_for_more_turns_than_there_are_others(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a long prompt is read, too."""
    passed_over: Counter[tuple[Worker, int]] = Counter()
    longest = 0
    choose = Worker._give_turn

    def counted(self: Worker) -> None:
        nonlocal longest
        works = {session: session.wanted.work() for session in self._sessions.values() if session.wanted.patience == 0}
        gone: list[Session] = []
        go_on = Worker._go_on
        with monkeypatch.context() as patch:
            patch.setattr(self, "_go_on", lambda session, rows: (gone.append(session), go_on(self, session, rows)))
            choose(self)
        for session in (session for session, work in works.items() if work == Work.NEEDED):
            key = self, session.begin.request
            passed_over[key] = 0 if session in gone else passed_over[key] + any(works.get(other) for other in gone)
            longest = max(longest, passed_over[key])

    monkeypatch.setattr(Worker, "_give_turn", counted)
    folder = str(model_folder("llama", num_layers=4, max_position_embeddings=2048))
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32", max_requests=3) as runtime:
        prompts = [[7] * 1500, [8] * 1500, PROMPT]
        runtime.generate(prompts, max_new_tokens=40, ignore_eos=True)
    assert 0 < longest <= 2


def test_streams_of_one_thread_go_on_side_by_side(folder: str, ordinary: OrdinaryDecoding) -> None:
    expected = ordinary.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32", max_requests=2) as runtime:
        streams = [runtime.stream(PROMPT, max_new_tokens=30, ignore_eos=True) for _ in range(2)]
        pairs = list(zip(*streams, strict=True))
        assert [tuple(event.token_id for event in events) for events in zip(*pairs, strict=True)] == [expected] * 2
        streams = [runtime.stream(PROMPT, max_new_tokens=30) for _ in range(3)]
        next(streams[0]), next(streams[1])
        with pytest.raises(RuntimeError, match="2 other streams of this runtime are open in this thread"):
            next(streams[2])
        streams[0].close()
        assert [event.token_id for event in streams[1]] == list(expected[1:])


def take(queue: RequestQueue, tokens: int = 0) -> Place:
    (place,) = queue.join()
    queue.wait(place, tokens, Ending(None))
    return place


def test_there_is_room_for_so_many_tokens(folder: Path) -> None:
    """The next request waits for room, however small those behind it are; what never fits is refused at once."""
    room, order = RequestQueue(8, 100), list[str]()
    first, second = take(room, 50), threading.Thread(target=lambda: (take(room, 51), order.append("second")))
    third = threading.Thread(target=lambda: (take(room, 49), order.append("third")))
    for number, thread in enumerate((second, third)):
        thread.start()
        while len(room.waiting) <= number:
            time.sleep(0.001)
    assert not order
    with pytest.raises(RuntimeError, match="another stream of this runtime is open in this thread"):
        take(room, 51)
    room.leave(first)
    for thread in (second, third):
        thread.join(10)
    assert sorted(order) == ["second", "third"]
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32", max_cache_tokens=20) as runtime:
        tokens = len(runtime.prompt_ids(PROMPT))
        with pytest.raises(
            ValueError, match=f"{tokens} prompt tokens .* make {tokens + 20}, more than max_cache_tokens=20"
        ):
            runtime.generate(PROMPT, max_new_tokens=20)
        asked = {"max_new_tokens": 10, "ignore_eos": True}
        alone = runtime.generate(PROMPT, **asked)
        assert runtime.generate([PROMPT] * 3, **asked)[2].token_ids == alone.token_ids
        stream = runtime.stream(PROMPT, **asked)
        next(stream)
        with pytest.raises(RuntimeError, match="another stream of this runtime is open in this thread"):
            runtime.generate([PROMPT] * 2, **asked)
        stream.close()


def test_a_request_that_is_cancelled_while_it_waits_ends_without_a_turn(folder: Path) -> None:
    stepwise = Stepwise(folder)
    running = stepwise.stream(PROMPT, max_new_tokens=5, ignore_eos=True)
    next(running)
    waiting, behind = (stepwise.stream(PROMPT, max_new_tokens=2, ignore_eos=True) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        ended, after = threads.submit(list, waiting), threads.submit(list, behind)
        wait_until(lambda: len(stepwise.queue.waiting) == 2)
        waiting.cancel()
        assert ended.result(10) == []
        result = waiting.result
        assert (result.text, result.token_ids, result.finish_reason) == ("", (), "cancelled")
        assert result.to_dict()["stats"]["new_tokens"] == 0
        stepwise.allow(100)
        running.close()
        assert len(after.result(10)) == 2


def test_turns_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    room, order = RequestQueue(2), list[int]()
    holders = [take(room)]
    with ThreadPoolExecutor(1) as other:
        holders.append(other.submit(take, room).result())
        waiting = []
        for number in range(4):
            waiting.append(threading.Thread(target=lambda n=number: (holders.append(take(room)), order.append(n))))
            waiting[-1].start()
            while len(room.waiting) <= number:
                time.sleep(0.001)
        monkeypatch.setattr(request_queue, "MOST_WAITING", 4)
        with pytest.raises(RuntimeError, match="4 calls wait for this runtime: try again later"):
            take(room)
        for number in range(4):
            room.leave(holders[0] if number == 0 else holders[-1])
            waiting[number].join(10)
        assert order == [0, 1, 2, 3]
        full = RequestQueue(1)
        other.submit(take, full).result()
        monkeypatch.setattr(request_queue, "_TURN_DEADLINE_S", 0.0)
        with pytest.raises(TimeoutError, match=re.escape("other calls have held this runtime for 0 s")):
            take(full)


def test_cancels_at_any_moment_keep_the_limits_and_lose_no_place() -> None:
    queue, at_work, most = RequestQueue(3, 100), list[int](), list[tuple[int, int]]()

    def make(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            (place,), tokens, told = queue.join(), draw.randint(1, 60), threading.Event()
            if draw.random() < 0.4:
                threading.Timer(draw.random() / 500, queue.cancel, [place]).start()
            if draw.random() < 0.5:
                queue.wait(place, tokens, Ending(None))
            else:
                queue.line_up(place, tokens, Ending(None), told.set)
                assert told.wait(20)
            if place.runs_since is not None:
                at_work.append(tokens)
                most.append((len(at_work), sum(at_work)))
                time.sleep(draw.random() / 2000)
                at_work.remove(tokens)
            queue.leave(place)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(make, range(SEED, SEED + 16))) == [None] * 16
    assert max(running for running, _ in most) == 3
    assert max(tokens for _, tokens in most) <= 100
    assert not queue.taken


def test_a_place_that_is_only_kept_ends_with_those_that_wait() -> None:
    queue, told = RequestQueue(2), threading.Event()
    runs = take(queue)
    (kept,) = queue.join()
    queue.cancel_waiting()
    ending = Ending(None)
    queue.line_up(kept, 1, ending, told.set)
    assert (told.is_set(), ending.reason(), kept.runs_since) == (True, "cancelled", None)
    assert queue.running == [runs]
    assert queue.taken == 1
