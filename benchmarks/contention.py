"""How much two cores slow each other down with nothing but matrix products, and what that leaves for the pipeline.

    python -m benchmarks.contention --model random:512x12 --match-rate 0.7 --json figures.json

No pipeline: two processes, each on a core of its own and with the stage that a worker would have loaded, run the floor
of `benchmarks.decode` over and over. The main process runs the products of its last d̄ layers, what a hit leaves to it,
or of all d; the sub-process those of its first d − d̄. Each runs alone and beside the other, in turn, in an order that
changes from round to round; the first round is dropped. Both run for a while before passes count, and after. The least
share of its core that a process had in a turn stands beside the bound: well below 1 others used the cores too, and the
figures are not to be trusted.

With k = 1 both processes are busy all the time, so a token after a hit takes the slower one's pass and one after a miss
all layers beside a busy sub-process. At match rate p, as a share of ordinary decoding's time (all layers, alone):

    bound = (p · max(last d̄ beside, first d − d̄ beside) + (1 − p) · all d beside) / all d alone
    theorem = 1 − p(d − d̄)/d                          (Theorem 4.1 for a token after the first)
    greatest realised saving = (1 − bound) / (1 − theorem)

That is for decoding which is its products and nothing else, without heads, messages and Python. A step that takes r
times its floor (`benchmarks.decode` measures r) and whose other time is not contended and shrinks as the theorem says
has the bound (bound + (r − 1) · theorem) / r; rows with r above 1 rest on that assumption.

A saving above 1 is possible: half the layers may fit a cache that all of them do not. Other programs that fill a shared
cache hide contention, for then a process alone does not find its weights there either.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.floor import Products
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from ppd_runtime.config import DTYPES
from ppd_runtime.cost_model.theory import realised_saving
from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores
from ppd_runtime.launch.supervisor import START_DEADLINE_S
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.dtype import choose_dtype
from ppd_runtime.models.opening import load_stage

_STEPS_TO_FLOOR = (1.0, 1.2, 1.5, 2.0)
_RAMP_S = 0.03  # both run for so long before passes count, and after
_MOST_TRIES = 5
_LONGEST_TURN_S, _DEADLINE_S, _STOP_DEADLINE_S = 30.0, 60.0, 5.0


@dataclass(frozen=True)
class TimedTurn:
    """Passes through the layers `first` to `last` (half-open); those from `begin` to `end` count (perf_counter)."""

    first: int
    last: int
    begin: float
    end: float


@dataclass(frozen=True)
class Round:
    """Seconds of a pass: the main process' last d̄ layers and all, the sub-process' first d − d̄ (beside the former)."""

    hit_alone: float
    hit_beside: float
    sub_alone: float
    sub_beside: float
    all_alone: float
    all_beside: float
    core_share: float
    """Of its core's time, the least that a process got in a turn; below 1 other programs were in the way."""

    def ratio(self, match_rate: float) -> float:
        """Pipelined over ordinary decoding's time for a token of nothing but products; the bound above."""
        hit = max(self.hit_beside, self.sub_beside)
        return (match_rate * hit + (1 - match_rate) * self.all_beside) / self.all_alone


class CoreProcess:
    """A process on a core of its own that holds a model's first layers and runs the products that it is told to."""

    def __init__(self, name: str, info: ModelInfo, last: int, dtype: torch.dtype, cores: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, info, last, dtype, cores), daemon=True)
        self._process.start()
        theirs.close()  # or its end would go unnoticed

    def ask(self, turn: TimedTurn | None) -> None:
        """Have it take a turn; None: end."""
        self._connection.send(turn)

    def answer(self, deadline_s: float = _DEADLINE_S) -> Any:
        """What it says next: its layers' bytes when it has loaded them, then what `pass_time` gives for each turn."""
        if not self._connection.poll(deadline_s):
            raise TimeoutError(f"the {self._name} has said nothing for {deadline_s:.0f} s")
        try:
            return self._connection.recv()
        except EOFError as error:
            raise RuntimeError(f"the {self._name} has ended; its last words are above") from error

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # it has ended already
            self.ask(None)
        self._process.join(_STOP_DEADLINE_S)
        self._process.kill()
        self._connection.close()


class ProcessPair:
    """The two processes, and what each of a round's turns has them do."""

    def __init__(self, main: CoreProcess, sub: CoreProcess, num_layers: int, exit_layer: int, seconds: float) -> None:
        self._processes, self._seconds = (main, sub), seconds
        self._early, self._all = (0, num_layers - exit_layer), (0, num_layers)
        self._late = (num_layers - exit_layer, num_layers)

    def round(self, number: int) -> Round:
        """Every turn once; the first of them is another one in the next round."""
        late, early, every = self._late, self._early, self._all
        turns = [(late, None), (None, early), (late, early), (every, None), (every, early)]
        first = number % len(turns)
        taken = {turn: self._take(turn) for turn in (*turns[first:], *turns[:first])}
        return Round(
            hit_alone=taken[late, None][0][0],
            hit_beside=taken[late, early][0][0],
            sub_alone=taken[None, early][0][0],
            sub_beside=taken[late, early][1][0],
            all_alone=taken[every, None][0][0],
            all_beside=taken[every, early][0][0],
            core_share=min(share for answers in taken.values() for _, share in answers),
        )

    def _take(self, ranges: Sequence[tuple[int, int] | None]) -> list[tuple[float, float]]:
        """Have both run their layers at the same time, or one alone; the answers of those that had something to do.

        A turn that others kept a core busy for is taken again.
        """
        asked = [(process, layers) for process, layers in zip(self._processes, ranges, strict=True) if layers]
        for _ in range(_MOST_TRIES):
            begin = time.perf_counter() + 2 * _RAMP_S
            for process, layers in asked:
                process.ask(TimedTurn(*layers, begin, begin + self._seconds))
            answers = [process.answer() for process, _ in asked]
            if all(seconds is not None for seconds, _ in answers):
                return answers
        raise ValueError(f"--seconds {self._seconds}: too short for a pass here, or the cores are busy; give more")


def serve(connection: Connection, info: ModelInfo, last: int, dtype: torch.dtype, cores: Sequence[int]) -> None:
    """In a process of its own: load the stage, say so, take turns until told to end."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    layers = load_stage(info, last, dtype, "cpu").model.model.layers
    connection.send([Products(layer).num_bytes for layer in layers])
    with contextlib.suppress(EOFError):  # the one who asks has gone
        while turn := connection.recv() if connection.poll(START_DEADLINE_S) else None:
            connection.send(pass_time(Products(layers[turn.first : turn.last]), turn))


@torch.inference_mode()
def pass_time(products: Products, turn: TimedTurn) -> tuple[float | None, float]:
    """Median seconds of the passes that count, None where none was short enough; and the share of the core it had.

    A median, because now and then a pass also holds another program's turn on the core.
    """
    start = turn.begin - _RAMP_S
    time.sleep(max(0.0, start - time.perf_counter()))
    spent_before, moments = time.process_time(), [time.perf_counter()]
    while moments[-1] < turn.end + _RAMP_S:
        products.run()
        moments.append(time.perf_counter())
    counted = [b - a for a, b in itertools.pairwise(moments) if turn.begin <= a and b <= turn.end]
    share = (time.process_time() - spent_before) / (moments[-1] - start)
    return statistics.median(counted) if counted else None, share


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name, times by round."""
    cores = _checked_cores(options)
    with contextlib.ExitStack() as stack:
        info = describe(stack.enter_context(model_folder(options.model)))
        dtype, exit_layer = choose_dtype(options.dtype, "cpu", info), -(-info.num_layers // 2)
        depths = {"main process": info.num_layers, "sub-process": info.num_layers - exit_layer}
        main, sub = (
            stack.enter_context(contextlib.closing(CoreProcess(name, info, last, dtype, place)))
            for (name, last), place in zip(depths.items(), cores, strict=True)
        )
        layer_bytes, _ = main.answer(START_DEADLINE_S), sub.answer(START_DEADLINE_S)
        pair = ProcessPair(main, sub, info.num_layers, exit_layer, options.seconds)
        rounds = [pair.round(number) for number in range(options.rounds + 1)][1:]
    return {
        "model": options.model,
        "dtype": str(dtype).removeprefix("torch."),
        "exit_layer": exit_layer,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "rows": _rows(rounds, layer_bytes, exit_layer),
        "core_share": [times.core_share for times in rounds],
        "bounds": bounds(rounds, options.match_rate, info.num_layers, exit_layer),
    }


def _checked_cores(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """A core for each process; raises ValueError for options that cannot work, or where there is only one."""
    if not 0 <= options.match_rate <= 1:
        raise ValueError(f"--match-rate {options.match_rate}: give a share from 0 to 1")
    if not 0 < options.seconds <= _LONGEST_TURN_S:
        raise ValueError(f"--seconds {options.seconds}: give more than 0 and {_LONGEST_TURN_S:.0f} at the most")
    cores = assign_cores(2, 1)
    if not cores[0]:
        raise ValueError(f"contention is between two cores, and this process may use {available_cores()}: allow it two")
    return cores


def _rows(rounds: Sequence[Round], layer_bytes: Sequence[int], exit_layer: int) -> list[Figures]:
    depth = len(layer_bytes)
    ranges = {
        "hit": ("main", depth - exit_layer, depth),
        "sub": ("sub", 0, depth - exit_layer),
        "all": ("main", 0, depth),
    }
    return [
        {
            "products": f"{process}: layers {first + 1} to {last}",
            "megabytes": sum(layer_bytes[first:last]) / 1e6,
            "alone_ms": [getattr(times, f"{name}_alone") * 1000 for times in rounds],
            "beside_ms": [getattr(times, f"{name}_beside") * 1000 for times in rounds],
        }
        for name, (process, first, last) in ranges.items()
    ]


def bounds(rounds: Sequence[Round], match_rate: float, num_layers: int, exit_layer: int) -> Figures:
    """For steps of each r: the ratios by round and, where the theorem saves anything, the savings."""
    theorem = 1 - match_rate * (num_layers - exit_layer) / num_layers
    rows = []
    for r in _STEPS_TO_FLOOR:
        ratios = [for_step(times.ratio(match_rate), theorem, r) for times in rounds]
        savings = [realised_saving(ratio, theorem) for ratio in ratios] if match_rate else None
        rows.append({"step_to_floor": r, "ratio": ratios, "greatest_saving": savings})
    return {"match_rate": match_rate, "theorem": theorem, "rows": rows}


def for_step(bound: float, theorem: float, step_to_floor: float) -> float:
    """The bound of decoding whose step takes so many times its products' time; see above."""
    return (bound + (step_to_floor - 1) * theorem) / step_to_floor


def table(figures: Figures) -> str:
    """Times and their bounds, in Markdown, medians with quartiles."""
    columns = ["model", "dtype", "products", "MB", "alone, ms", "beside the other, ms", "factor"]
    columns += ["alone, GB/s", "beside, GB/s"]
    rows = [[figures["model"], figures["dtype"], *_cells(row)] for row in figures["rows"]]
    return f"{markdown(columns, rows)}\n\n{_bounds_table(figures['bounds'], spread(figures['core_share']))}"


def _bounds_table(told: Figures, share: str) -> str:
    columns = ["match rate", "step / floor", "bound on the ratio, k = 1", "Theorem 4.1", "greatest realised saving"]
    rows = [
        [
            told["match_rate"],
            row["step_to_floor"],
            spread(row["ratio"]),
            told["theorem"],
            spread(row["greatest_saving"]) if row["greatest_saving"] else None,
            share,
        ]
        for row in told["rows"]
    ]
    return markdown([*columns, "a core's share, least"], rows)


def _cells(row: Figures) -> list[object]:
    alone, beside = row["alone_ms"], row["beside_ms"]
    factors = [b / a for a, b in zip(alone, beside, strict=True)]
    rates = [f"{row['megabytes'] / statistics.median(times):.1f}" for times in (alone, beside)]  # MB in ms: GB in s
    return [row["products"], f"{row['megabytes']:.1f}", spread(alone), spread(beside), spread(factors), *rates]


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--dtype", choices=DTYPES, default="auto")
    options.add_argument("--match-rate", type=float, default=0.7, help="what the bound is for")
    options.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    options.add_argument("--rounds", type=positive, default=9, help="of five turns each")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
