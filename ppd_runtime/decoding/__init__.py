"""Decoding algorithms that run in one process, and `decode`: every method behind one call."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppd_runtime.methods import METHODS, decode, open_method

__all__ = ["METHODS", "decode", "open_method"]


def __getattr__(name: str) -> Any:
    """Import the methods when they are asked for: they stand above this package, which holds their algorithms."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("ppd_runtime.methods"), name)
