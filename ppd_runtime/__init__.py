"""Predictive pipelined decoding: the same tokens, sooner."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppd_runtime.async_runtime import AsyncPPDRuntime
    from ppd_runtime.methods.ordinary import OrdinaryDecoding
    from ppd_runtime.methods.registry import decode, open_method
    from ppd_runtime.request_error import RequestError
    from ppd_runtime.results import GenerationResult, TokenEvent
    from ppd_runtime.runtime import PPDRuntime
    from ppd_runtime.sampling.params import SamplingParams
    from ppd_runtime.settings.config import RuntimeConfig
    from ppd_runtime.training.adapt.run import adapt

__version__ = "0.2.0"
__all__ = [
    "AsyncPPDRuntime",
    "GenerationResult",
    "OrdinaryDecoding",
    "PPDRuntime",
    "RequestError",
    "RuntimeConfig",
    "SamplingParams",
    "TokenEvent",
    "__version__",
    "adapt",
    "decode",
    "open_method",
]
_HOMES = {
    "AsyncPPDRuntime": "ppd_runtime.async_runtime",
    "GenerationResult": "ppd_runtime.results",
    "OrdinaryDecoding": "ppd_runtime.methods.ordinary",
    "PPDRuntime": "ppd_runtime.runtime",
    "RequestError": "ppd_runtime.request_error",
    "RuntimeConfig": "ppd_runtime.settings.config",
    "SamplingParams": "ppd_runtime.sampling.params",
    "TokenEvent": "ppd_runtime.results",
    "adapt": "ppd_runtime.training.adapt.run",
    "decode": "ppd_runtime.methods.registry",
    "open_method": "ppd_runtime.methods.registry",
}


def __dir__() -> list[str]:
    """What tab completion offers: the exports too, imported or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import an export when it is first used: the command line's help needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from ppd_runtime.imports import whole_imports

    with whole_imports():
        return getattr(import_module(_HOMES[name]), name)
