"""What processes hold (memory, open files, sockets, threads), whether it grows while they live, and what they leave.

Needs a /proc.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HELD = ("memory, MB", "memory of its own, MB", "open files", "sockets", "threads")
"""Memory is what is resident; of its own: without pages of files, which others may share."""
Holding = tuple[float, ...]
_SHARED_MEMORY = Path("/dev/shm")


def held(process: psutil.Process) -> Holding:
    """What a process holds, as `HELD` names it."""
    memory = process.memory_info()
    files = []
    for file in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files.append(str(file.readlink()))
    sockets = sum(file.startswith("socket:") for file in files)
    return (memory.rss / 1e6, (memory.rss - memory.shared) / 1e6, len(files), sockets, process.num_threads())


def workers(of: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes that serve this one or another, however they were launched, and those that are about to."""
    found = []
    for process in (of or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and (process.name().startswith("ppd-") or line[0].startswith("ray::PPD")):
                found.append(process)
    return found


def rank_served(process: psutil.Process) -> int | None:
    """The rank that a worker listens for among Unix sockets, which it does once its layers are loaded; else None."""
    for connection in process.net_connections("unix"):
        name = Path(str(connection.laddr)).name
        if name.startswith("worker-"):
            return int(name.removeprefix("worker-"))
    return None


@dataclass
class Watch:
    """Looks at the workers after each request, and keeps what it saw of each process."""

    of: psutil.Process = field(default_factory=psutil.Process)
    """Whose workers."""
    lives: dict[psutil.Process, list[Holding]] = field(default_factory=dict)
    """What a worker held after its first request, its second, …"""
    ranks: dict[psutil.Process, int] = field(default_factory=dict)
    family: set[psutil.Process] = field(default_factory=set)
    """Every process that was ever seen below this one, but not below those that were there before."""
    strangers: set[psutil.Process] = field(default_factory=lambda: set(psutil.Process().children()))
    """This process' children that were there before, such as a Ray node that others share."""

    def look(self) -> None:
        """A request has ended."""
        for child in set(self.of.children()) - self.strangers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.family.update([child, *child.children(recursive=True)])
        for worker in workers(self.of):
            with contextlib.suppress(psutil.Error, OSError):  # it dies while being looked at
                if (rank := rank_served(worker)) is not None:
                    holding = held(worker)
                    self.ranks[worker] = rank
                    self.lives.setdefault(worker, []).append(holding)

    def lives_of(self, main: bool) -> list[list[Holding]]:
        """What main processes held, or sub-processes, one list a process."""
        return [notes for worker, notes in self.lives.items() if (self.ranks[worker] == 0) == main]


def at_age(lives: Iterable[Sequence[Holding]], place: int, age: int) -> float | None:
    """The median of what processes held after so many requests; None where none lasted so long."""
    values = [notes[age - 1][place] for notes in lives if len(notes) >= age]
    return statistics.median(values) if values else None


def growth(lives: Iterable[Sequence[Holding]], place: int, warm_up: int) -> float | None:
    """How much more is held per request, once `warm_up` requests have passed; None where no process lasted longer.

    The slope of least squares with a constant of its own for each process (the within estimator): it is compared with
    itself only, and a long one tells more. So short runs add up to one figure.
    """
    covariance = variance = 0.0
    for notes in lives:
        values = [note[place] for note in notes[warm_up:]]
        if values:
            middle, mean = (len(values) - 1) / 2, statistics.fmean(values)
            covariance += sum((age - middle) * (value - mean) for age, value in enumerate(values))
            variance += sum((age - middle) ** 2 for age in range(len(values)))
    return covariance / variance if variance else None


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder where this process and those below it put what is temporary, while the block lasts."""
    before, named = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="ppd-t", dir="/tmp") as folder:  # short, for names of sockets
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before
            os.environ.pop("TMPDIR")
            if named is not None:
                os.environ["TMPDIR"] = named


def shared_memory() -> set[str]:
    """What is in shared memory."""
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.exists() else set()


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left
