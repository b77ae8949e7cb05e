"""What a report says of where its figures come from: the machine, and the versions of what computes on it."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

from ppd_runtime import __version__

_RECORDED = ("torch", "transformers", "ray", "pyzmq")


def machine() -> str:
    """The processor and the number of its cores."""
    return f"{_processor()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """By the names of the packages, Python's among them."""
    return {
        "python": platform.python_version(),
        "ppd-runtime": __version__,
        **{name: version(name) for name in _RECORDED},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
