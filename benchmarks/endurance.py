"""Request after request through one runtime while its processes are killed and stopped: every token, and no growth.

    python -m benchmarks.endurance --requests 500 --tokens 20 --fault-every-s 3 --seed 7

A seed draws prompts, sampling and faults. At random times, on average every so many seconds, a random worker is killed
(SIGKILL) or, one time in five, stopped (SIGSTOP). Every text is compared with ordinary decoding's. What the owning
process holds (memory, open files, threads, children) is noted after each request.
"""

import argparse
import contextlib
import logging
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from benchmarks.models import model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.config import LAUNCHERS

_STOP_SHARE = 0.2
_HELD = ("memory, MB", "open files", "threads", "children")


@dataclass
class Trouble:
    """A thread that kills and stops this process' workers at random times."""

    generator: random.Random
    every_s: float
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._over = threading.Event()

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
        while not self._over.wait(self.generator.expovariate(1 / self.every_s)):
            if victims := workers():
                victim = self.generator.choice(victims)
                number = signal.SIGSTOP if self.generator.random() < _STOP_SHARE else signal.SIGKILL
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(number)
                    self.done[number.name] += 1


def workers() -> list[psutil.Process]:
    """The processes that serve this one, however they were launched."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and ("ppd_runtime.start_worker" in line or line[0].startswith("ray::PPD")):
                found.append(process)
    return found


def held() -> tuple[float, ...]:
    """What this process holds, as `_HELD` names it."""
    process = psutil.Process()
    return (
        process.memory_info().rss / 1e6,
        process.num_fds(),
        process.num_threads(),
        len(process.children(recursive=True)),
    )


def measure(options: argparse.Namespace) -> Figures:
    """Run all requests; what happened and what is held, early and late."""
    generator = random.Random(options.seed)
    trouble = Trouble(random.Random(options.seed + 1), options.fault_every_s)
    notes: list[tuple[float, ...]] = []
    tokens = hits = equal = 0
    slowest = 0.0
    began = time.monotonic()
    with (
        model_folder(options.model) as folder,
        PPDRuntime(folder, k=options.k, launcher=options.launcher, dtype="float32", max_restarts=10**6) as runtime,
    ):
        ordinary = OrdinaryDecoding(folder, dtype="float32")
        with trouble.brewing():
            for _ in range(options.requests):
                prompt, settings = _draw(generator, options.tokens, ordinary.info.vocab_size)
                asked = time.monotonic()
                got = runtime.generate(prompt, **settings)
                slowest = max(slowest, time.monotonic() - asked)
                equal += got.token_ids == ordinary.generate(prompt, **settings).token_ids
                tokens, hits = tokens + len(got.token_ids), hits + got.stats.hits
                notes.append(held())
    left = len(workers())
    return {
        "seed": options.seed,
        "launcher": options.launcher,
        "requests": options.requests,
        "tokens": tokens,
        "texts equal": equal,
        "hits": hits,
        "killed": trouble.done["SIGKILL"],
        "stopped": trouble.done["SIGSTOP"],
        "slowest request, s": slowest,
        "minutes": (time.monotonic() - began) / 60,
        "workers left": left,
        "held": {name: _early_and_late([note[place] for note in notes]) for place, name in enumerate(_HELD)},
    }


def table(figures: Figures) -> str:
    """Two tables in Markdown."""
    counts = {name: value for name, value in figures.items() if name != "held"}
    rows = [[name, *values] for name, values in figures["held"].items()]
    columns = ["held by the owning process, median of a fifth of the requests", "first", "second", "last", "most"]
    return markdown(list(counts), [list(counts.values())]) + "\n\n" + markdown(columns, rows)


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
    options.add_argument("--launcher", choices=LAUNCHERS, default="processes")
    options.add_argument("--requests", type=positive, default=500)
    options.add_argument("--tokens", type=positive, default=20)
    options.add_argument("--fault-every-s", type=float, default=3.0)
    options.add_argument("--seed", type=int, default=0)
    return options


if __name__ == "__main__":
    logging.getLogger("ppd_runtime").setLevel(logging.ERROR)  # each loss would be a line
    run(parser(), measure, table)
