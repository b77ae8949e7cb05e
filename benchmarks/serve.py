"""`ppd serve` under load: requests at once in a closed loop, or arriving at a rate in an open one, and its own cost.

    python -m benchmarks.serve --stages 2 --compile --at-once 1,2,4,8,16
    python -m benchmarks.serve --stages 2 --compile --rates 1,2,4

The server is a process of its own, as `ppd serve` starts it; the client here is asyncio's sockets and nothing else. In
a closed loop so many clients ask again as soon as they have their answer. In an open one requests arrive at random
(Poisson) at so many a second, whatever has become of the others. "Own cost" is what a token alone takes longer, and a
first token comes later, than from `PPDRuntime.stream` in this process: one request at a time, in turn with it.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread, whole_numbers
from ppd_runtime import PPDRuntime, SamplingParams
from ppd_runtime.config import DTYPES
from ppd_runtime.measure.prompt_files import read_prompts
from ppd_runtime.measure.quartiles import quartiles

_DEADLINE_S = 300.0


@dataclass
class Answer:
    """One request as its client saw it; times in seconds since it was sent."""

    arrivals: list[float] = field(default_factory=list)
    """When each token came."""
    status: int = 0

    @property
    def gaps(self) -> list[float]:
        """Between two tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def ask(url: str, prompt: str, tokens: int) -> Answer:
    """Stream one completion over a connection of its own."""
    place, answer = urlsplit(url), Answer()
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
    head += f"connection: close\r\ncontent-length: {len(body.encode())}\r\n\r\n"
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        began = time.perf_counter()
        writer.write(head.encode() + body.encode())
        answer.status = int((await asyncio.wait_for(reader.readline(), _DEADLINE_S)).split()[1])
        while line := await asyncio.wait_for(reader.readline(), _DEADLINE_S):
            if line.startswith(b"data: {") and b'"finish_reason":null' in line:
                answer.arrivals.append(time.perf_counter() - began)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return answer


async def closed_loop(url: str, prompts: Sequence[str], tokens: int, at_once: int) -> list[Answer]:
    """Each of `at_once` clients asks again as soon as it has its answer, until all prompts are answered."""
    left, answers = list(prompts)[::-1], list[Answer]()

    async def client() -> None:
        while left:
            answers.append(await ask(url, left.pop(), tokens))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return answers


async def open_loop(url: str, prompts: Sequence[str], tokens: int, rate: float) -> list[Answer]:
    """Requests arrive at random, `rate` a second on the average."""
    chance, tasks = random.Random(0), []
    for prompt in prompts:
        tasks.append(asyncio.create_task(ask(url, prompt, tokens)))
        await asyncio.sleep(chance.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def under_load(load: Callable[[], Awaitable[list[Answer]]], about: Figures) -> Figures:
    """The figures of one load."""

    async def timed() -> tuple[list[Answer], float]:
        began = time.perf_counter()
        answers = await load()
        return answers, time.perf_counter() - began

    answers, seconds = asyncio.run(timed())
    answered = [answer for answer in answers if answer.arrivals]
    return {
        **about,
        "requests": len(answers),
        "refused": sum(answer.status != 200 for answer in answers),
        "tokens_per_second": sum(len(answer.arrivals) for answer in answered) / seconds,
        "first_token_ms": [1000 * answer.arrivals[0] for answer in answered],
        "between_tokens_ms": quartiles([1000 * gap for answer in answered for gap in answer.gaps] or [0.0]),
    }


@contextlib.contextmanager
def read_away(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Read the server's log away meanwhile: a full pipe would hold it up."""
    reading = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
    reading.start()
    yield


@contextlib.contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """A `ppd serve`, and its address."""
    command = [sys.executable, "-m", "ppd_runtime.cli.entry", "serve", "--port", "0", "--model", options.model]
    command += ["--dtype", options.dtype, *["--compile"] * options.compile]
    command += ["--stages", str(options.stages)] if options.stages else ["--method", "autoregressive"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if " at http" in line:
                break
        else:
            raise ValueError(f"the server did not start: exit code {process.wait()}")
        with read_away(process):
            yield line.rpartition(" at ")[2].strip()
    finally:
        process.terminate()
        process.wait(_DEADLINE_S)


def own_cost(options: argparse.Namespace, prompts: Sequence[str], url: str) -> Figures:
    """What a token takes longer, and a first token comes later, than in Python: medians of paired differences."""
    params = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    place = {"dtype": options.dtype, "compile": options.compile, "stages": options.stages}
    each: list[float] = []
    first: list[float] = []
    with PPDRuntime(options.model, **place) as runtime:
        for turn, prompt in enumerate([prompts[0], *prompts]):  # the first is dropped
            began, arrivals = time.perf_counter(), list[float]()
            for _ in runtime.stream(prompt, params):
                arrivals.append(time.perf_counter() - began)
            over_http = asyncio.run(ask(url, prompt, options.tokens)).arrivals
            if turn:
                first.append(1000 * (over_http[0] - arrivals[0]))
                spans = [times[-1] - times[0] for times in (over_http, arrivals)]
                each.append(1000 * (spans[0] - spans[1]) / (options.tokens - 1))
    return {"ms_per_token": each, "first_token_ms": first}


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    texts = [prompt.text for prompt in read_prompts(options.prompts, None)]
    prompts = [texts[number % len(texts)] for number in range(options.requests)]
    loads: list[Figures] = []
    with served(options) as url:
        asyncio.run(closed_loop(url, prompts[:2], options.tokens, 1))  # warm
        for at_once in options.at_once:
            about = {"loop": "closed", "at_once": at_once}
            loads.append(under_load(lambda n=at_once: closed_loop(url, prompts, options.tokens, n), about))
        for rate in options.rates:
            about = {"loop": "open", "rate": rate}
            loads.append(under_load(lambda r=rate: open_loop(url, prompts, options.tokens, r), about))
        cost = own_cost(options, prompts, url) if options.stages and options.own_cost else None
    return {
        "model": options.model,
        "stages": options.stages,
        "compiled": options.compile,
        "tokens": options.tokens,
        "loads": loads,
        "own_cost": cost,
    }


def table(figures: Figures) -> str:
    """The figures in Markdown."""
    columns = ["load", "requests", "refused", "tokens/s", "first token, ms", "between tokens, ms"]
    rows = [
        [
            f"{load['at_once']} at once" if load["loop"] == "closed" else f"{load['rate']:g} a second",
            load["requests"],
            load["refused"],
            f"{load['tokens_per_second']:.1f}",
            spread(load["first_token_ms"]),
            "{1:.3g} ({0:.3g} to {2:.3g})".format(*load["between_tokens_ms"]),
        ]
        for load in figures["loads"]
    ]
    shown = markdown(columns, rows)
    if cost := figures["own_cost"]:
        shown += (
            f"\n\nOwn cost: {spread(cost['ms_per_token'])} ms a token, first token {spread(cost['first_token_ms'])} ms"
        )
    return shown


def numbers(text: str) -> list[float]:
    """Numbers above 0 with commas between them."""
    found = [float(part) for part in text.split(",") if part]
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError(f"{text}: give numbers above 0")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = new_parser(__doc__)
    made.add_argument("--model", default="demo")
    made.add_argument("--stages", type=int, default=2, help="0: ordinary decoding")
    made.add_argument("--dtype", default="float32", choices=DTYPES)
    made.add_argument("--compile", action="store_true")
    made.add_argument("--prompts", default="demo", help="as `ppd bench` takes them")
    made.add_argument("--requests", type=positive, default=16, help="of each load")
    made.add_argument("--tokens", type=positive, default=64)
    made.add_argument("--at-once", type=whole_numbers, default=[1, 2, 4, 8, 16], help="in closed loops")
    made.add_argument("--rates", type=numbers, default=[], help="requests a second, in open loops")
    made.add_argument("--no-own-cost", dest="own_cost", action="store_false")
    return made


if __name__ == "__main__":
    run(parser(), measure, table)
