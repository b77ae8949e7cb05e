"""The CPU cores and memory that this process may use, by its affinity and its control groups; the processor's name.

A container's limits are those of its control group and of all that enclose it, in either version of them. The kernel
tells where this process is (/proc/self/cgroup) and where groups can be read (/proc/self/mountinfo).
"""

import contextlib
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")
_CPU, _MEMORY = "cpu", "memory"
UNDISTURBED = 0.9
"""The least share of its usable CPU time that a process gets if no other program computes."""


def available_cores(root: Path = _ROOT) -> int:
    """CPU cores that this process may use: those that it may run on, or the whole ones in its quota, one at least.

    Args:
        root: where /proc and mounts are looked for.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([allowed, *_shares(root)])))


def memory_bytes(root: Path = _ROOT) -> int:
    """Memory of this host, or of the tightest control group around this process, in bytes."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _limits(root))])


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Memory free without swapping, on this host and in each group around this process.

    Pages of files count as free, for the kernel gives them back.
    """
    return max(0, min([_free_here(root), *(limit - used for limit, used in _limits(root))]))


def _free_here(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # if the host does not say


def _shares(root: Path) -> Iterator[float]:
    """The quota in cores of each group that has one."""
    for group in _groups(root, _CPU):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        quota, period = quota or _text(group / "cpu.cfs_quota_us"), period or _text(group / "cpu.cfs_period_us")
        told = [int(word) for word in (quota, period) if word.isdigit()]  # "max", or -1 in the older version, is none
        if len(told) == 2 and all(told):
            yield told[0] / told[1]


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield each control group's limit and use, in bytes. A process above the limit "high" is slowed down."""
    for group in _groups(root, _MEMORY):
        kept = {name: value for name, _, value in (line.partition(" ") for line in _lines(group / "memory.stat"))}
        told = [_text(group / f"memory.{name}") for name in ("max", "high", "limit_in_bytes")]
        limits = [int(limit) for limit in (*told, kept.get("hierarchical_memory_limit", "")) if limit.isdigit()]
        used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        of_files = sum(int(kept.get(f"total_{name}", kept.get(name, 0))) for name in ("active_file", "inactive_file"))
        if limits and used:
            yield min(limits), max(0, int(used) - of_files)


class _Mount(NamedTuple):
    """Where groups can be read: the group `root` is at `place`."""

    root: PurePosixPath
    place: Path


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process' group and of those that enclose it, as far as they can be seen, of both versions."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts, own = list(_mounts(root, controllers and controller)), PurePosixPath(path)
        inside = [(mount.place, own.relative_to(mount.root)) for mount in mounts if own.is_relative_to(mount.root)]
        for place, below in inside or [(mount.place, PurePosixPath()) for mount in mounts]:  # else by another's paths
            if ".." not in below.parts:  # beyond what this namespace shows
                yield from (place / part for part in (below, *below.parents))


def _mounts(root: Path, controller: str) -> Iterator[_Mount]:
    """Mounts of a controller, or of cgroup v2's single tree."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, behind = line.partition(" - ")
        kind, options = behind.split(" ")[0], behind.split(" ")[-1]
        if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options.split(",")):
            *_, of_mount, place, _ = (_unescaped(word) for word in before.split(" ")[:6])
            yield _Mount(PurePosixPath(of_mount), root / place.lstrip("/"))


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def processor() -> str:
    """The processor's name, such as AMD EPYC 7B13; else what is known of its make."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
