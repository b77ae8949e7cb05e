"""What a report says of where its figures come from: the machine, and the versions of what computes on it."""

import platform
from importlib.metadata import version

from ppd_runtime import __version__
from ppd_runtime.host import available_cores
from ppd_runtime.processor import processor

_RECORDED = ("torch", "transformers", "ray", "pyzmq")


def machine() -> str:
    """The processor and the number of its cores that may be used."""
    return f"{processor()}, {available_cores()} cores"


def versions() -> dict[str, str]:
    """By the names of the packages, Python's among them."""
    return {
        "python": platform.python_version(),
        "ppd-runtime": __version__,
        **{name: version(name) for name in _RECORDED},
    }
