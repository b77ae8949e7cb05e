"""The origin of a report's figures: the machine, and the versions of what computes on it."""

import platform
from importlib.metadata import version

from ppd_runtime import __version__
from ppd_runtime.host import available_cores, processor

_RECORDED = ("torch", "transformers", "ray", "pyzmq")


def machine() -> str:
    """The processor and the number of its cores that may be used."""
    return f"{processor()}, {available_cores()} cores"


def versions() -> dict[str, str]:
    """Versions by package name, Python's included."""
    return {
        "python": platform.python_version(),
        "ppd-runtime": __version__,
        **{name: version(name) for name in _RECORDED},
    }
