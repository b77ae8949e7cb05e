"""What the loss of a worker costs, and how long until the pipeline runs at full speed again.

    python -m benchmarks.recovery --victim sub-1 --rounds 5

In the middle of a text a worker is killed. Times between tokens are compared before the loss, while the worker is
missing, and after its successor's first hit; every text is compared with ordinary decoding's.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from benchmarks.resource_usage import workers
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.results import TokenEvent

_PROMPT = "def read_lines(path):"
_BEFORE = 100  # tokens until the loss
_SETTLED = 20  # tokens behind the first hit after it, in which the successor finds its pace


@dataclass
class Loss:
    """One text in which a worker was lost; times in seconds."""

    events: list[TokenEvent]
    times: list[float]
    lost_at: float

    @property
    def back(self) -> int | None:
        """The place of the first token that began with the successor's early start; for a main process, any token."""
        places = range(_BEFORE + 5, len(self.events))
        return next((place for place in places if self.events[place].hit), None)

    def gaps_ms(self, first: int, end: int) -> list[float]:
        """Milliseconds between the tokens of a range."""
        return [(b - a) * 1000 for a, b in zip(self.times[first:end], self.times[first + 1 : end], strict=False)]


def measure(options: argparse.Namespace) -> Figures:
    """One text a round."""
    settings = {"max_new_tokens": options.tokens, "ignore_eos": True}
    expected = OrdinaryDecoding(dtype="float32").generate(_PROMPT, **settings).token_ids
    losses = []
    for _ in range(options.rounds):
        with PPDRuntime(k=options.k, launcher="processes", dtype="float32") as runtime:
            runtime.generate(_PROMPT, max_new_tokens=50)
            losses.append(_lose(runtime, options.victim, settings))
    before = [gap for loss in losses for gap in loss.gaps_ms(_BEFORE // 2, _BEFORE)]
    came_back = [loss for loss in losses if loss.back is not None]
    between = [gap for loss in came_back for gap in loss.gaps_ms(_BEFORE - 1, loss.back or 0)]
    after = [gap for loss in came_back for gap in loss.gaps_ms((loss.back or 0) + _SETTLED, options.tokens)]
    return {
        "victim": options.victim,
        "texts": len(losses),
        "texts equal": sum(tuple(event.token_id for event in loss.events) == expected for loss in losses),
        "came back": len(came_back),
        "ms a token before": spread(before),
        "while missing": spread(between) if between else None,
        "after": spread(after) if after else None,
        "longest pause, ms": max(max(loss.gaps_ms(_BEFORE - 1, len(loss.times))) for loss in losses),
        "seconds to the first hit": spread([loss.times[loss.back or 0] - loss.lost_at for loss in came_back])
        if came_back
        else None,
        "median hit rate after": statistics.median(
            [sum(bool(e.hit) for e in loss.events[loss.back :]) / len(loss.events[loss.back :]) for loss in came_back]
        )
        if came_back
        else None,
    }


def _lose(runtime: PPDRuntime, victim: str, settings: dict[str, int]) -> Loss:
    events, times, lost_at = [], [], 0.0
    for event in runtime.stream(_PROMPT, **settings):
        events.append(event)
        times.append(time.monotonic())
        if len(events) == _BEFORE:
            next(worker for worker in workers() if worker.name() == f"ppd-{victim}").kill()
            lost_at = time.monotonic()
    return Loss(events, times, lost_at)


def table(figures: Figures) -> str:
    """One row in Markdown."""
    return markdown(list(figures), [list(figures.values())])


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--victim", default="sub-1", help="sub-1, sub-2, … or main")
    options.add_argument("--k", type=positive, default=1)
    options.add_argument("--tokens", type=positive, default=1800)
    options.add_argument("--rounds", type=positive, default=3)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
