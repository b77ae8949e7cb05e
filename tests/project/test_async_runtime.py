"""Several texts, chats, and the runtime for event loops; requests are cancelled one by one."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import DEADLINE_S, TEMPLATE, Stepwise

from ppd_runtime import AsyncPPDRuntime, OrdinaryDecoding
from ppd_runtime.async_runtime import AsyncDecoding

SAMPLED = {"max_new_tokens": 6, "temperature": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def ordinary(folder: str) -> Iterator[OrdinaryDecoding]:
    with OrdinaryDecoding(folder, dtype="float32") as found:
        yield found


def test_several_texts_have_the_next_seeds(ordinary: OrdinaryDecoding) -> None:
    last = 2**64 - 1
    texts = ordinary.generate("a", n=3, seed=last, **SAMPLED)
    assert [text.token_ids for text in texts] == [
        ordinary.generate("a", seed=seed, **SAMPLED).token_ids for seed in (last, 0, 1)
    ]
    for wrong in (0, True, 5000):
        with pytest.raises(ValueError, match="n="):
            ordinary.generate("a", n=wrong)
    with pytest.raises(ValueError, match="n=2 with 2 prompts"):
        ordinary.generate(["a", "b"], n=2)


def test_a_chat_is_its_templates_text_continued(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    expected = ordinary.generate("user: hi\n", add_special_tokens=False, max_new_tokens=4)
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    for template in (TEMPLATE, file, str(file)):
        assert ordinary.chat(messages, chat_template=template, max_new_tokens=4).token_ids == expected.token_ids
    with pytest.raises(ValueError, match="no chat template"):
        ordinary.chat(messages)
    with pytest.raises(ValueError, match="no Jinja template"):
        ordinary.chat(messages, chat_template="{% for")
    with pytest.raises(ValueError, match="does not take them"):
        ordinary.chat(messages, chat_template="{{ raise_exception('never') }}")
    for wrong in ("hi", [], [{"role": "user"}], ["hi"]):
        with pytest.raises(ValueError, match="messages"):
            ordinary.chat(wrong, chat_template=TEMPLATE)


def test_a_generation_is_cancelled_from_another_thread(folder: str) -> None:
    stepwise = Stepwise(folder)
    stream = stepwise.stream("a", max_new_tokens=500, ignore_eos=True)
    next(stream)
    threading.Timer(0.01, stream.cancel).start()
    assert len(list(stream)) <= 1
    assert stream.result.finish_reason == "cancelled"


def test_a_loop_streams_and_generates(folder: str, ordinary: OrdinaryDecoding) -> None:
    async def run() -> tuple[list[int], tuple[int, ...], list[tuple[int, ...]]]:
        async with AsyncPPDRuntime(folder, k=1, transport="local", dtype="float32") as runtime:
            stream = runtime.stream("a", **SAMPLED)
            events = [event.token_id async for event in stream]
            many = await asyncio.gather(*(runtime.generate("a", seed=seed, **SAMPLED) for seed in range(3)))
            return events, stream.result.token_ids, [one.token_ids for one in many]

    events, result, many = asyncio.run(run())
    assert many == [ordinary.generate("a", seed=seed, **SAMPLED).token_ids for seed in range(3)]
    assert tuple(events) == result == many[0]


def test_a_cancelled_task_ends_its_request_and_no_other(folder: str) -> None:
    stepwise = Stepwise(folder)

    async def run() -> int:
        decoding = AsyncDecoding(stepwise)
        running = asyncio.create_task(decoding.generate("a", max_new_tokens=500, ignore_eos=True))
        while not stepwise.is_busy:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(decoding.generate("b", max_new_tokens=500))
        last = asyncio.create_task(decoding.generate("c", max_new_tokens=2, ignore_eos=True))
        await asyncio.sleep(0.01)
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        stepwise.allow(10)
        result = await asyncio.wait_for(last, DEADLINE_S)
        await decoding.close()
        return result.stats.new_tokens

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize("leaves", ["cancelled", "breaks"])
def test_a_stream_that_nobody_reads_any_more_ends(folder: str, leaves: str) -> None:
    stepwise = Stepwise(folder)

    async def read(decoding: AsyncDecoding[Stepwise], begun: asyncio.Event) -> None:
        async for _ in decoding.stream("a", max_new_tokens=500, ignore_eos=True):
            begun.set()
            if leaves == "breaks":
                return
            await asyncio.sleep(DEADLINE_S)

    async def run() -> None:
        decoding, begun = AsyncDecoding(stepwise), asyncio.Event()
        reading = asyncio.create_task(read(decoding, begun))
        await begun.wait()
        reading.cancel()
        await asyncio.wait([reading])
        del reading
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        while stepwise.is_busy:  # no token is allowed any more
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        await decoding.close()

    asyncio.run(run())


def test_a_stream_is_closed_beside_a_task_that_reads_it(folder: str) -> None:
    async def scenario() -> str:
        decoding = AsyncDecoding(Stepwise(folder))
        stream = decoding.stream("a", max_new_tokens=500, ignore_eos=True)
        await stream.__anext__()

        async def read() -> None:
            async for _ in stream:
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(stream.aclose(), reading), DEADLINE_S)
        await decoding.close()
        return stream.result.finish_reason

    assert asyncio.run(scenario()) == "cancelled"
