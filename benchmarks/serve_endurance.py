"""`ppd serve` for an hour: all kinds of requests, clients that go away, nonsense, and workers killed at random.

    python -m benchmarks.serve_endurance --minutes 60 --seed 7 --json endurance.json
    python -m benchmarks.serve_endurance --requests 10000 --bad-share 1 --fault-every-s 0

Every text is compared with the one that ordinary decoding gave before. What the server and its workers hold (memory,
open files, sockets, threads) is noted while no request runs: after a warm-up in which every text was asked for, and at
the end; and what is left of them behind it. Whatever is wrong is listed, and the exit code is 1 then.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.endurance import Trouble, left_behind
from benchmarks.mixed_load import OUTCOMES, Client, KnownRequest, Outcomes, known, write_template
from benchmarks.models import model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from benchmarks.resource_usage import (
    HELD,
    Holding,
    Watch,
    growth,
    held,
    own_temporary_folder,
    rank_served,
    shared_memory,
    workers,
)
from benchmarks.server_process import ServerProcess, server_process
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.config import DTYPES

_SETTLE_S = 60.0  # until lost workers are replaced and connections closed
_TOLD_TO_END = 143  # exit code
_TELL_EVERY_S = 60.0
_WARM_UP = 10  # looks at a process, one a second, after which growth counts
_AT_LEAST_AT_ONCE = 4
_WAITING = 4  # with more clients than run at once some are refused
_MOST_MORE = dict(zip(HELD, (None, 50.0, 3, 3, 8), strict=True))
"""What a process may hold at the end beyond what it held at the start; memory settles within some tens of MB."""


def measure(options: argparse.Namespace) -> Figures:
    """Serve until minutes, requests and faults are enough; what happened, what is held, what is left, what is wrong."""
    check(options)
    print(f"seed {options.seed}", file=sys.stderr)
    shared = shared_memory()
    with own_temporary_folder() as temporary, model_folder(options.model) as model:
        texts = _texts(options, model)
        own = set(temporary.iterdir())
        with server_process(_arguments(options, model, temporary)) as server:
            figures, watch = asyncio.run(_try(options, server, texts))
            figures |= {"exit code": server.end(), "losses": server.log.count(" is lost, ")}
            figures["tracebacks"] = server.log.count("Traceback")
        (temporary / "chat.jinja").unlink()
        figures["left"] = left_behind(watch, temporary, shared, own)
    return {**figures, "wrong": _wrong(figures)}


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that cannot work."""
    for name, share in (("bad", options.bad_share), ("leave", options.leave_share), ("stop", options.stop_share)):
        if not 0 <= share <= 1:
            raise ValueError(f"--{name}-share {share}: choose a share from 0 to 1")
    if options.faults and not options.fault_every_s:
        raise ValueError(f"--faults {options.faults}: none happen with --fault-every-s 0")


def _texts(options: argparse.Namespace, model: str) -> list[KnownRequest]:
    generator = random.Random(options.seed)
    with OrdinaryDecoding(model, dtype=options.dtype, compile=options.compile) as ordinary:
        return [known(ordinary, generator, options.tokens, options.prompt_tokens) for _ in range(options.texts)]


def _arguments(options: argparse.Namespace, model: str, folder: Path) -> list[str]:
    given = {
        "model": model,
        "stages": options.stages,
        "dtype": options.dtype,
        "chat-template": write_template(folder),
        "max-restarts": 10**6,  # how many faults come before a token is chance's here
        "max-waiting": _WAITING,
    }
    return [f"--{name}={value}" for name, value in given.items()] + ["--compile"] * options.compile


async def _try(
    options: argparse.Namespace, server: ServerProcess, texts: Sequence[KnownRequest]
) -> tuple[Figures, Watch]:
    program, tally, over = psutil.Process(server.process.pid), Outcomes(), asyncio.Event()
    watch, notes = Watch(program, strangers=set()), list[Holding]()
    trouble = Trouble(
        random.Random(options.seed + 1), options.fault_every_s, options.stages, options.stop_share, program
    )
    clients = [
        Client(server.url, texts, tally, random.Random(f"{options.seed} {n}"), options.leave_share, options.bad_share)
        for n in range(options.clients)
    ]
    await asyncio.gather(*(client.ask_for(texts[n :: len(clients)]) for n, client in enumerate(clients)))
    start, began = await _settled(options, server, tally), time.monotonic()
    told = began
    with trouble.brewing():
        asking = [asyncio.create_task(client.ask_until(over)) for client in clients]
        while (
            time.monotonic() < began + 60 * options.minutes
            or tally.requests < options.requests
            or trouble.faults < options.faults
        ) and not any(task.done() for task in asking):
            await asyncio.sleep(1)
            watch.look()
            notes.append(held(program))
            if time.monotonic() > told + _TELL_EVERY_S:
                told = time.monotonic()
                print(f"{dict(tally.outcomes)}, {trouble.faults} faults", file=sys.stderr)
        over.set()
        await asyncio.gather(*asking)
    minutes = (time.monotonic() - began) / 60
    end = await _settled(options, server, tally)
    right = tally.outcomes["right"]
    await asyncio.gather(*(client.ask_for(texts[:1]) for client in clients[:_AT_LEAST_AT_ONCE]))
    if tally.outcomes["right"] < right + min(len(clients), _AT_LEAST_AT_ONCE):
        tally.problems.append("not all of the last requests got their texts, with no other client there")
    return {
        "seed": options.seed,
        "minutes": minutes,
        "requests": tally.requests,
        **{name: tally.outcomes[name] for name in OUTCOMES},
        "tokens": tally.tokens,
        "slowest, s": tally.slowest_s,
        "killed": trouble.done["killed"],
        "stopped": trouble.done["stopped"],
        "problems": tally.problems,
        "held": {"start": start, "end": end},
        "more per minute": {"server": _per_minute([notes]), "a worker": _per_minute(list(watch.lives.values()))},
    }, watch


async def _settled(options: argparse.Namespace, server: ServerProcess, tally: Outcomes) -> dict[str, Holding]:
    """What the server and each worker hold once all of them serve, and no request is in."""
    program, deadline = psutil.Process(server.process.pid), time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        found = {"server": held(program)}
        with contextlib.suppress(psutil.Error, OSError):
            serving = [worker for worker in workers(program) if rank_served(worker) is not None]
            found |= {worker.name().removeprefix("ppd-"): held(worker) for worker in serving}
        if len(found) == 1 + options.stages and await _is_idle(server.url):
            return dict(sorted(found.items()))
        await asyncio.sleep(0.2)
    tally.problems.append(f"not well or not empty {_SETTLE_S:.0f} s after the last request: {sorted(found)} serve")
    return found


async def _is_idle(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        well, told = await http.get("/health"), (await http.get("/metrics")).text
    inside = [
        line for line in told.splitlines() if line.startswith(("vllm:num_requests_running", "vllm:num_requests_w"))
    ]
    return well.status_code == 200 and all(line.endswith(" 0.0") for line in inside)


def _per_minute(lives: Sequence[Sequence[Holding]]) -> list[float | None]:
    slopes = [growth(lives, place, _WARM_UP) for place in range(len(HELD))]
    return [None if slope is None else 60 * slope for slope in slopes]


def _wrong(figures: Figures) -> list[str]:
    """What must not be."""
    found = [
        f"{figures[name]} {name}"
        for name in ("wrong text", "lost", "failed", "bad, taken", "tracebacks")
        if figures[name]
    ]
    if figures["losses"] > figures["killed"] + figures["stopped"]:
        found.append(f"{figures['losses']} workers lost, {figures['killed']} killed and {figures['stopped']} stopped")
    if figures["exit code"] != _TOLD_TO_END:
        found.append(f"exit code {figures['exit code']}")
    found += [f"{count} {what} left" for what, count in figures["left"].items() if count]
    start, end = figures["held"]["start"], figures["held"]["end"]
    for name in start.keys() & end.keys():
        for what, before, after in zip(HELD, start[name], end[name], strict=True):
            if _MOST_MORE[what] is not None and after > before + _MOST_MORE[what]:
                found.append(f"{name}: {what} {before:g}, at the end {after:g}")
    return found + figures["problems"]


def table(figures: Figures) -> str:
    """Tables in Markdown: what happened, what is held, what is wrong."""
    counts = {name: value for name, value in figures.items() if not isinstance(value, dict | list)}
    counts |= {f"left: {name}": value for name, value in figures["left"].items()}
    rows = [[f"{name}, {when}", *held] for when, all_held in figures["held"].items() for name, held in all_held.items()]
    rows += [[f"{name}, more per minute", *slopes] for name, slopes in figures["more per minute"].items()]
    wrong = "\n".join(f"- {line}" for line in figures["wrong"]) or "Nothing is wrong."
    return "\n\n".join([markdown(["", "figure"], list(counts.items())), markdown(["held", *HELD], sorted(rows)), wrong])


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo")
    options.add_argument("--stages", type=positive, default=2)
    options.add_argument("--dtype", default="float32", choices=DTYPES)
    options.add_argument("--compile", action="store_true")
    options.add_argument("--minutes", type=float, default=0.0, help="at least")
    options.add_argument("--requests", type=int, default=0, help="at least")
    options.add_argument("--faults", type=int, default=0, help="at least")
    options.add_argument("--clients", type=positive, default=12)
    options.add_argument("--texts", type=positive, default=60, help="different requests with known answers")
    options.add_argument("--tokens", type=positive, default=64, help="of an answer, at the most")
    options.add_argument("--prompt-tokens", type=positive, default=600, help="at the most")
    options.add_argument("--bad-share", type=float, default=0.2, help="of the requests are nonsense")
    options.add_argument("--leave-share", type=float, default=0.2, help="of the others: their clients go away")
    options.add_argument("--fault-every-s", type=float, default=5.0, help="on average; 0: none")
    options.add_argument("--stop-share", type=float, default=0.05, help="of the faults are stops")
    options.add_argument("--seed", type=int, default=0)
    return options


if __name__ == "__main__":
    if run(parser(), measure, table)["wrong"]:
        sys.exit(1)
