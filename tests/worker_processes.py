"""The worker processes of a program, by the name that `top` shows."""

import psutil


def worker_processes(program: psutil.Process | None = None) -> dict[str, psutil.Process]:
    """Those of this program, or of another, that run: main, sub-1, …"""
    found = {}
    for child in (program or psutil.Process()).children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "ppd_runtime.workers.entry" in child.cmdline():
                found[child.name()] = child
        except psutil.NoSuchProcess:
            pass
    return {name.removeprefix("ppd-"): child for name, child in found.items() if name.startswith("ppd-")}
