"""Request after request through one runtime while its processes are killed and stopped: every token, and no growth.

    python -m benchmarks.endurance --requests 500 --tokens 20 --fault-every-s 3 --seed 7
    python -m benchmarks.endurance --stages 3 --requests 150 --tokens 20 --faults 60 --seed 7

A seed draws prompts, sampling and faults. At random times, on average every so many seconds, a random worker is killed
(SIGKILL) or, one time in five by default, stopped (SIGSTOP): while it serves, and while it starts. Where it is missing
already nothing happens, so that a worker lasts as long as chance has it, however many others there are. With --stages
the workers are stages, each as likely to be struck. Every text is compared with ordinary decoding's; one that differs
ends the run. What the owning process and its workers hold (memory,
open files, sockets, threads) is noted after each request, and at the end what is left of them.
"""

import argparse
import contextlib
import logging
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.models import model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from benchmarks.resource_usage import (
    HELD,
    Holding,
    Watch,
    at_age,
    growth,
    held,
    own_temporary_folder,
    rank_served,
    running,
    shared_memory,
    workers,
)
from ppd_runtime import OrdinaryDecoding, PPDRuntime

_OWNERS = (*HELD, "children")
_AGES = (1, 10, 100, 1000)
_WARM_UP = 10  # requests of a worker after which growth counts
_TELL_EVERY = 50  # requests
_LEAVE_S = 10.0  # for what has been told to end


@dataclass
class Trouble:
    """A thread that kills and stops a program's workers at random times, if at all.

    Of workers that start it strikes one, and none until all serve: on a slow machine nobody would ever come to serve.
    """

    generator: random.Random
    every_s: float
    """On average while all are there; 0: never."""
    num_workers: int
    stop_share: float
    program: psutil.Process = field(default_factory=psutil.Process)
    """Whose workers."""
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._has_struck_a_start = False

    @property
    def faults(self) -> int:
        """Up to now."""
        return self.done["killed"] + self.done["stopped"]

    @contextlib.contextmanager
    def brewing(self) -> Iterator[None]:
        """Trouble for as long as the block lasts."""
        thread = threading.Thread(target=self._make, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _make(self) -> None:
        while self.every_s and not self._over.wait(self.generator.expovariate(1 / self.every_s)):
            number, victims = self.generator.randrange(self.num_workers), workers(self.program)
            with contextlib.suppress(psutil.Error):
                if number < len(victims) and not self._spares(victims):
                    self._strike(victims[number])

    def _spares(self, victims: Sequence[psutil.Process]) -> bool:
        """Whether a worker that started has been struck, and not all serve since."""
        all_serve = len(victims) == self.num_workers and all(rank_served(victim) is not None for victim in victims)
        self._has_struck_a_start = self._has_struck_a_start and not all_serve
        return self._has_struck_a_start

    def _strike(self, victim: psutil.Process) -> None:
        stop, rank = self.generator.random() < self.stop_share, rank_served(victim)
        if stop and victim.status() == psutil.STATUS_STOPPED:
            return
        victim.send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
        self.done["stopped" if stop else "killed"] += 1
        self.done["starting" if rank is None else "main" if rank == 0 else "sub"] += 1
        self._has_struck_a_start = rank is None


@dataclass
class Tally:
    """What came of the requests."""

    watch: Watch = field(default_factory=Watch)
    owner: list[Holding] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    hits: int = 0
    slowest_s: float = 0.0
    restarts: int = 0

    def note(self) -> None:
        """A request has ended."""
        process = psutil.Process()
        self.owner.append((*held(process), len(process.children(recursive=True))))
        self.watch.look()


def measure(options: argparse.Namespace) -> Figures:
    """Run all requests, and more until there were enough faults; what happened, what is held, and what is left.

    Raises:
        RuntimeError: where a text is not ordinary decoding's.
    """
    if options.faults and not options.fault_every_s:
        raise ValueError(f"--faults {options.faults}: none happen with --fault-every-s 0")
    if not 0 <= options.stop_share <= 1:
        raise ValueError(f"--stop-share {options.stop_share}: a share of the faults, from 0 to 1")
    print(f"seed {options.seed}", file=sys.stderr)
    generator, tally = random.Random(options.seed + 1), Tally()
    trouble = Trouble(generator, options.fault_every_s, options.stages or 1 + options.k, options.stop_share)
    deciding, others = ("last stage", "other stages") if options.stages else ("main process", "sub-processes")
    began, shared = time.monotonic(), shared_memory()
    with own_temporary_folder() as temporary:
        _serve(options, trouble, tally)
        left = left_behind(tally.watch, temporary, shared)
    done = trouble.done
    return {
        "seed": options.seed,
        "launcher": options.launcher,
        "stages": options.stages,
        "requests": tally.requests,
        "tokens": tally.tokens,
        "texts equal": tally.requests,
        "hits": tally.hits,
        "killed": done["killed"],
        "stopped": done["stopped"],
        f"of these {deciding}, {others}, starting": f"{done['main']}, {done['sub']}, {done['starting']}",
        "new lives": tally.restarts,
        "slowest request, s": tally.slowest_s,
        "minutes": (time.monotonic() - began) / 60,
        "left": left,
        "held": {name: _early_and_late([note[at] for note in tally.owner]) for at, name in enumerate(_OWNERS)},
        "lives": {deciding: _by_age(tally.watch, True), others: _by_age(tally.watch, False)},
    }


def table(figures: Figures) -> str:
    """Tables in Markdown: what happened, what is left, what the owner holds, what its workers do."""
    counts = {name: value for name, value in figures.items() if name not in ("held", "lives", "left")}
    counts |= {f"left: {name}": value for name, value in figures["left"].items()}
    owner = ["held by the owning process, median of a fifth of the requests", "first", "second", "last", "most"]
    ages = [f"after {age} of its requests" for age in _AGES]
    lives = ["held by a worker, median of lives", *ages, f"more per 100 requests after {_WARM_UP}", "most"]
    return "\n\n".join(
        [
            markdown(list(counts), [list(counts.values())]),
            markdown(owner, [[name, *values] for name, values in figures["held"].items()]),
            markdown(lives, [[f"{who}: {what}", *row] for who, rows in figures["lives"].items() for what, row in rows]),
        ]
    )


def _serve(options: argparse.Namespace, trouble: Trouble, tally: Tally) -> None:
    generator = random.Random(options.seed)
    settings = {"k": options.k, "launcher": options.launcher, "dtype": "float32", "max_restarts": 10**6}
    settings |= {"stages": options.stages, "rows": options.rows} if options.stages else {}
    with model_folder(options.model) as folder, PPDRuntime(folder, **settings) as runtime:
        ordinary = OrdinaryDecoding(folder, dtype="float32")
        with trouble.brewing():
            while tally.requests < options.requests or trouble.faults < options.faults:
                prompt, wanted = _draw(generator, options.tokens, ordinary.info.vocab_size)
                asked = time.monotonic()
                got = runtime.generate(prompt, **wanted)
                tally.slowest_s = max(tally.slowest_s, time.monotonic() - asked)
                expected = ordinary.generate(prompt, **wanted).token_ids
                if got.token_ids != expected:
                    found = f"{got.token_ids}, ordinary decoding's are {expected}"
                    raise RuntimeError(f"seed {options.seed}, request {tally.requests}, {prompt}, {wanted}: {found}")
                tally.requests += 1
                tally.tokens += len(expected)
                tally.hits += got.stats.hits + sum(got.stats.first_boundary[:-1])
                tally.note()
                if not tally.requests % _TELL_EVERY:
                    print(f"{tally.requests} requests, {trouble.faults} faults", file=sys.stderr)
        tally.restarts = runtime.restarts


def left_behind(
    watch: Watch, temporary: Path, shared: set[str], own: AbstractSet[Path] = frozenset()
) -> dict[str, int]:
    """What is there of processes, temporary files and shared memory once they had time to leave, but for own files."""
    deadline = time.monotonic() + _LEAVE_S
    while True:
        left = {
            "processes": len(running(watch.family)),
            "temporary files": len(set(temporary.iterdir()) - own),
            "in /dev/shm": len(shared_memory() - shared),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _by_age(watch: Watch, main: bool) -> list[tuple[str, list[float | None]]]:
    """Rows of a table: how many workers there were, and what they held."""
    lives = watch.lives_of(main)
    rows: list[tuple[str, list[float | None]]] = [
        ("lives so long", [*(sum(len(notes) >= age for notes in lives) for age in _AGES), None, None])
    ]
    for place, name in enumerate(HELD):
        more = growth(lives, place, _WARM_UP)
        most = max((note[place] for notes in lives for note in notes), default=None)
        values = [at_age(lives, place, age) for age in _AGES]
        rows.append((name, [*values, None if more is None else 100 * more, most]))
    return rows


def _draw(generator: random.Random, tokens: int, vocab_size: int) -> tuple[list[int], dict[str, float]]:
    prompt = [generator.randrange(vocab_size) for _ in range(generator.randint(1, 30))]
    settings: dict[str, float] = {"max_new_tokens": tokens, "ignore_eos": True}
    if generator.random() < 0.5:
        settings |= {"temperature": 0.8, "top_p": 0.95, "seed": generator.randrange(1000)}
    return prompt, settings


def _early_and_late(values: list[float]) -> tuple[float, float, float, float]:
    fifth = max(len(values) // 5, 1)
    parts = (values[:fifth], values[fifth : 2 * fifth] or values, values[-fifth:])
    first, second, last = (float(statistics.median(part)) for part in parts)
    return first, second, last, float(max(values))


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo")
    options.add_argument("--k", type=positive, default=2)
    options.add_argument("--stages", type=positive, help="instead of a main process and sub-processes")
    options.add_argument("--rows", type=positive, default=4, help="of a stage's pass, at the most")
    options.add_argument("--launcher", choices=("ray", "processes"), default="processes")
    options.add_argument("--requests", type=positive, default=500)
    options.add_argument("--tokens", type=positive, default=20)
    options.add_argument("--fault-every-s", type=float, default=3.0, help="on average; 0: none")
    options.add_argument("--stop-share", type=float, default=0.2, help="of the faults are stops")
    options.add_argument("--faults", type=int, default=0, help="go on until there were so many")
    options.add_argument("--seed", type=int, default=0)
    return options


if __name__ == "__main__":
    logging.getLogger("ppd_runtime").setLevel(logging.ERROR)  # each loss would be a line
    run(parser(), measure, table)
