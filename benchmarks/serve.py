"""`ppd serve` under load: requests at once in a closed loop, or arriving at a rate in an open one, and its own cost.

    python -m benchmarks.serve --stages 2 --compile --at-once 1,8 --beside
    python -m benchmarks.serve --stages 4 --compile --at-once 1,4,8,16 --beside --emulate-layer-ms 3 --rows 8
    python -m benchmarks.serve --stages 2 --compile --at-once 1,2,4,8,16 --rates 1,2,4 --own-cost

The server is a process of its own, as `ppd serve` starts it; the client here is sockets and nothing else. In a closed
loop so many clients ask again as soon as they have their answer. In an open one requests arrive at random
(Poisson) at so many a second, whatever has become of the others. "Beside" is a second server: ordinary decoding, one
process on one core (or one emulated device), asked for one request at a time in turn with each load. "Own cost" is what
a token alone takes longer, and a first token comes later, than from `PPDRuntime.stream` in this process: one request at
a time, in turn with it.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.keep_cores_awake import keep_cores_awake
from benchmarks.pipeline import woken_at_once
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread, whole_numbers
from benchmarks.server_process import PPD_SERVE, ServerProcess, server_process
from ppd_runtime import PPDRuntime, SamplingParams
from ppd_runtime.config import DTYPES
from ppd_runtime.tune.prompt_files import read_prompts

_DEADLINE_S = 300.0


@dataclass
class TimedAnswer:
    """One request as its client saw it; times in seconds since it was sent."""

    arrivals: list[float] = field(default_factory=list)
    """When each token came."""
    status: int = 0

    @property
    def gaps(self) -> list[float]:
        """Between two tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def _request(url: str, prompt: str, tokens: int) -> bytes:
    """For a streamed completion, over a connection of its own."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def ask(url: str, prompt: str, tokens: int) -> TimedAnswer:
    """Stream one completion, beside others."""
    place, answer = urlsplit(url), TimedAnswer()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        began = time.perf_counter()
        writer.write(_request(url, prompt, tokens))
        answer.status = int((await asyncio.wait_for(reader.readline(), _DEADLINE_S)).split()[1])
        while line := await asyncio.wait_for(reader.readline(), _DEADLINE_S):
            if line.startswith(b"data: {") and b'"finish_reason":null' in line:
                answer.arrivals.append(time.perf_counter() - began)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return answer


def ask_alone(url: str, prompt: str, tokens: int) -> list[float]:
    """Stream one completion with as little work of the client as can be: when each token came, in seconds."""
    place, arrivals, line = urlsplit(url), list[float](), b""
    with socket.create_connection((place.hostname, place.port), _DEADLINE_S) as connection:
        began = time.perf_counter()
        connection.sendall(_request(url, prompt, tokens))
        while received := connection.recv(2**16):
            *lines, line = (line + received).split(b"\n")
            told = sum(b'"finish_reason":null' in one for one in lines)
            arrivals += [time.perf_counter() - began] * told
    return arrivals


async def closed_loop(url: str, prompts: Sequence[str], tokens: int, at_once: int) -> list[TimedAnswer]:
    """Each of `at_once` clients asks again as soon as it has its answer, until all prompts are answered."""
    left, answers = list(prompts)[::-1], list[TimedAnswer]()

    async def client() -> None:
        while left:
            answers.append(await ask(url, left.pop(), tokens))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return answers


async def open_loop(url: str, prompts: Sequence[str], tokens: int, rate: float) -> list[TimedAnswer]:
    """Requests arrive at random, `rate` a second on the average."""
    chance, tasks = random.Random(0), []
    for prompt in prompts:
        tasks.append(asyncio.create_task(ask(url, prompt, tokens)))
        await asyncio.sleep(chance.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def under_load(load: Callable[[], Awaitable[list[TimedAnswer]]], about: Figures) -> Figures:
    """The figures of one load."""

    async def timed() -> tuple[list[TimedAnswer], float]:
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
        "between_tokens_ms": [1000 * gap for answer in answered for gap in answer.gaps],
    }


@contextlib.contextmanager
def served(options: argparse.Namespace, stages: int) -> Iterator[ServerProcess]:
    """A server of so many stages; 0: ordinary decoding, on one core where that is a real one."""
    arguments = ["--model", options.model, "--dtype", options.dtype, *["--compile"] * options.compile]
    for name in ("rows", "max_requests") if stages else ():
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    if options.emulate_layer_ms is not None:
        arguments += ["--stages", str(stages), "--emulate-layer-ms", str(options.emulate_layer_ms)]
        module: Sequence[str] = ("benchmarks.emulated_server",)
    else:
        arguments += ["--stages", str(stages)] if stages else ["--method", "autoregressive"]
        module = PPD_SERVE
    with server_process(arguments, module, one_core=not stages and options.emulate_layer_ms is None) as server:
        yield server


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
            over_http = ask_alone(url, prompt, options.tokens)
            if turn:
                first.append(1000 * (over_http[0] - arrivals[0]))
                spans = [times[-1] - times[0] for times in (over_http, arrivals)]
                each.append(1000 * (spans[0] - spans[1]) / (options.tokens - 1))
    return {"ms_per_token": each, "first_token_ms": first}


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    if options.own_cost and (options.emulate_layer_ms is not None or not options.stages):
        raise ValueError("--own-cost: is of stages on real devices, drop it, --emulate-layer-ms or --stages 0")
    texts = [prompt.text for prompt in read_prompts(options.prompts, None)]
    prompts = [texts[number % len(texts)] for number in range(options.requests)]
    with contextlib.ExitStack() as stack:
        if options.emulate_layer_ms is not None:
            stack.enter_context(woken_at_once())
            stack.enter_context(keep_cores_awake())
        url = stack.enter_context(served(options, options.stages)).url
        beside = stack.enter_context(served(options, 0)).url if options.beside else None
        for address in filter(None, (url, beside)):
            asyncio.run(closed_loop(address, prompts[:2], options.tokens, 1))  # warm
        rounds = [_all_loads(options, url, beside, prompts) for _ in range(options.rounds)]
        cost = own_cost(options, prompts, url) if options.own_cost else None
    shape = {name: getattr(options, name) for name in ("model", "stages", "tokens", "emulate_layer_ms")}
    return {**shape, "compiled": options.compile, "loads": _together(rounds), "own_cost": cost}


def _all_loads(options: argparse.Namespace, url: str, beside: str | None, prompts: Sequence[str]) -> list[Figures]:
    """One round: each load, and in turn with it one request at a time beside."""
    tokens, loads = options.tokens, list[tuple[Figures, Callable[[], Awaitable[list[TimedAnswer]]]]]()
    for at_once in options.at_once:
        about: Figures = {"loop": "closed", "at_once": at_once}
        loads.append((about, lambda n=at_once: closed_loop(url, prompts, tokens, n)))
    for rate in options.rates:
        loads.append(({"loop": "open", "rate": rate}, lambda r=rate: open_loop(url, prompts, tokens, r)))
    found = []
    for about, load in loads:
        figures = under_load(load, about)
        if beside:
            one = under_load(lambda: closed_loop(beside, prompts, tokens, 1), {})["tokens_per_second"]
            figures |= {"beside_tokens_per_second": one, "over_beside": figures["tokens_per_second"] / one}
        found.append(figures)
    return found


def _together(rounds: Sequence[Sequence[Figures]]) -> list[Figures]:
    """Each load's figures of all rounds: sums of requests, lists of the rest."""
    merged = []
    for same in zip(*rounds, strict=True):
        one: Figures = {name: same[0][name] for name in ("loop", "at_once", "rate") if name in same[0]}
        one |= {name: sum(load[name] for load in same) for name in ("requests", "refused")}
        one |= {
            name: [value for load in same for value in load[name]] for name in ("first_token_ms", "between_tokens_ms")
        }
        for name in ("tokens_per_second", "beside_tokens_per_second", "over_beside"):
            one[name] = [load[name] for load in same if name in load]
        merged.append(one)
    return merged


def load_name(load: Figures) -> str:
    """What a load is called in tables."""
    return f"{load['at_once']} at once" if load["loop"] == "closed" else f"{load['rate']:g} a second"


def table(figures: Figures) -> str:
    """The figures in Markdown, as an emulation's where they are."""
    emulated = figures["emulate_layer_ms"]
    columns = ["load" if emulated is None else f"load, EMULATED devices of {emulated:g} ms a layer"]
    columns += ["requests", "refused", "tokens/s", "over one process with one request at a time"]
    columns += ["first token, ms", "between tokens, ms"]
    rows = [
        [load_name(load), load["requests"], load["refused"]]
        + [
            spread(load[name]) if load[name] else None
            for name in ("tokens_per_second", "over_beside", "first_token_ms", "between_tokens_ms")
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


def load_options(doc: str | None) -> argparse.ArgumentParser:
    """Options of programs that put a server under load."""
    made = new_parser(doc)
    made.add_argument("--model", default="demo")
    made.add_argument("--stages", type=int, default=2, help="0: ordinary decoding")
    made.add_argument("--dtype", default="float32", choices=DTYPES)
    made.add_argument("--compile", action="store_true")
    made.add_argument("--rows", type=positive, help="of a pass, with stages")
    made.add_argument("--max-requests", type=positive, help="that run at once, with stages")
    made.add_argument("--emulate-layer-ms", type=float, help="on devices that take so long for a layer")
    made.add_argument("--requests", type=positive, default=16, help="of each load")
    made.add_argument("--tokens", type=positive, default=64)
    made.add_argument("--at-once", type=whole_numbers, default=[1, 2, 4, 8, 16], help="in closed loops")
    made.add_argument("--rates", type=numbers, default=[], help="requests a second, in open loops")
    return made


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = load_options(__doc__)
    made.add_argument("--prompts", default="demo", help="as `ppd bench` takes them")
    made.add_argument("--rounds", type=positive, default=1, help="of all loads")
    made.add_argument("--beside", action="store_true", help="compare with one process and one request at a time")
    made.add_argument("--own-cost", action="store_true")
    return made


if __name__ == "__main__":
    run(parser(), measure, table)
