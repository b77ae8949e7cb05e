"""Workers killed and stopped at random moments: every text compared with ordinary decoding's, and what a loss costs.

    python -m benchmarks.faults --faults 20 --seed 7
    python -m benchmarks.faults --layouts "k=2;launcher=ray,stages=3;rows=4" --faults 60 --every-s 3 --stop-share 0.2

A seed draws prompts, sampling and faults. On average every so many seconds a worker is killed (SIGKILL) or stopped
(SIGSTOP), once all of them serve. A pause is the time between the tokens before and behind a fault. The
exit code is 1 where a text is another one, or something is left behind.
"""

import argparse
import bisect
import contextlib
import logging
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.layouts import settings_of
from benchmarks.models import model_folder
from benchmarks.recording import Figures, new_parser, positive, run, table_of
from ppd_runtime import OrdinaryDecoding, PPDRuntime

_LEAVE_S = 10.0  # for what has been told to end
Times = list[tuple[float, bool]]
"""When each token of a text came, and whether it was a hit."""


def serving(program: psutil.Process) -> list[psutil.Process]:
    """The workers of a program that listen among Unix sockets, which they do once their layers are loaded."""
    found = []
    for process in program.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            names = [Path(str(one.laddr)).name for one in process.net_connections("unix")]
            is_well = process.status() != psutil.STATUS_STOPPED
            found += [process] * (is_well and any(name.startswith("worker-") for name in names))
    return found


@dataclass
class Trouble:
    """A thread that kills and stops a program's workers at random moments, whenever all of them serve."""

    generator: random.Random
    every_s: float
    """On average; 0: never."""
    num_workers: int
    stop_share: float = 0.0
    program: psutil.Process = field(default_factory=psutil.Process)
    done: Counter[str] = field(default_factory=Counter)
    moments: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def brewing(self) -> Iterator[None]:
        """Make trouble for as long as the block lasts."""
        thread = threading.Thread(target=self._make, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join()

    def _make(self) -> None:
        while self.every_s and not self.over.wait(self.generator.expovariate(1 / self.every_s)):
            with contextlib.suppress(psutil.Error):
                if len(victims := serving(self.program)) == self.num_workers:
                    stop = self.generator.random() < self.stop_share
                    self.generator.choice(victims).send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
                    self.moments.append(time.monotonic())
                    self.done["stopped" if stop else "killed"] += 1


def measure(options: argparse.Namespace) -> Figures:
    """Decode texts in each layout until there were enough faults; a row a layout."""
    if not options.every_s > 0:
        raise ValueError(f"--every-s {options.every_s}: give more than 0")
    with model_folder(options.model) as model, OrdinaryDecoding(model, dtype="float32") as ordinary:
        rows = [_row(layout, model, ordinary, options) for layout in options.layouts.split(",")]
    return {"model": options.model, "seed": options.seed, "rows": rows}


def _row(layout: str, model: str, ordinary: OrdinaryDecoding, options: argparse.Namespace) -> Figures:
    generator, settings = random.Random(options.seed), {"launcher": "processes", **settings_of(layout)}
    texts: list[Times] = []
    equal, others, family = 0, _children(), set[psutil.Process]()
    with PPDRuntime(model, dtype="float32", max_restarts=10**6, **settings) as runtime:
        trouble = Trouble(
            random.Random(options.seed + 1), options.every_s, 1 + runtime.config.num_subs, options.stop_share
        )
        with trouble.brewing():
            while len(texts) < options.requests or len(trouble.moments) < options.faults:
                prompt, ask = _draw(generator, options.tokens, ordinary.info.vocab_size)
                tokens, times = _stream(runtime, prompt, ask)
                equal += tokens == ordinary.generate(prompt, **ask).token_ids
                texts.append(times)
                family |= _children() - others
        restarts = runtime.restarts
    pauses, to_hits = losses(texts, trouble.moments)
    return {
        "layout": layout,
        "requests": len(texts),
        "equal": equal,
        **{name: trouble.done[name] for name in ("killed", "stopped")},
        "restarts": restarts,
        "pauses_s": pauses,
        "to_hits_s": to_hits,
        "left": left_behind(list(family)),
    }


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _draw(generator: random.Random, tokens: int, vocab_size: int) -> tuple[list[int], dict[str, Any]]:
    prompt = [generator.randrange(vocab_size) for _ in range(generator.randint(1, 30))]
    ask: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    if generator.random() < 0.5:
        ask |= {"temperature": 0.8, "top_p": 0.95, "seed": generator.randrange(1000)}
    return prompt, ask


def _stream(runtime: PPDRuntime, prompt: list[int], ask: dict[str, Any]) -> tuple[tuple[int, ...], Times]:
    tokens, times = [], [(time.monotonic(), False)]
    for event in runtime.stream(prompt, **ask):
        tokens.append(event.token_id)
        times.append((time.monotonic(), bool(event.hit)))
    return tuple(tokens), times


def losses(texts: Sequence[Times], moments: Sequence[float]) -> tuple[list[float], list[float]]:
    """Of faults within a text: seconds between the tokens before and behind it, and from it to the next hit."""
    pauses, to_hits = [], []
    for times in texts:
        for moment in moments:
            place = bisect.bisect(times, (moment,))
            if 0 < place < len(times):
                pauses.append(times[place][0] - times[place - 1][0])
                to_hits += [came - moment for came, hit in times[place:] if hit][:1]
    return pauses, to_hits


def left_behind(family: Sequence[psutil.Process]) -> int:
    """How many processes have not ended once they had time to."""
    _, alive = psutil.wait_procs(family, timeout=_LEAVE_S)
    return len([process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE])


def table(figures: Figures) -> str:
    """A row a layout."""
    heads = {name: name for name in ("layout", "requests", "equal", "killed", "stopped", "restarts")}
    heads |= {"pauses_s": "pause at a fault, s (quartiles)", "to_hits_s": "to the next hit, s"}
    return table_of(figures["rows"], **heads | {"equal": "texts equal", "left": "processes left"})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo")
    found.add_argument("--layouts", default="k=2,stages=2", help="as `layouts` takes them")
    found.add_argument("--requests", type=positive, default=10, help="of each layout, at least")
    found.add_argument("--tokens", type=positive, default=100, help="of a text")
    found.add_argument("--faults", type=positive, default=10, help="of each layout, at least")
    found.add_argument("--every-s", type=float, default=3.0, help="between two faults, on average")
    found.add_argument("--stop-share", type=float, default=0.1, help="of the faults are stops")
    found.add_argument("--seed", type=int, default=0)
    return found


def is_wrong(figures: Figures) -> bool:
    """Whether a text is not ordinary decoding's or a process is left."""
    return any(row["equal"] < row["requests"] or row["left"] for row in figures["rows"])


if __name__ == "__main__":
    logging.getLogger("ppd_runtime").setLevel(logging.ERROR)  # each loss would be a line
    sys.exit(is_wrong(run(parser(), measure, table)))
