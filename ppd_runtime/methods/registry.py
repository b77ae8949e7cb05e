"""Every way of decoding by its name: `decode`, and `open_method` for many prompts."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.choices import METHODS, SELF_SPECULATIVE_NAMES
from ppd_runtime.methods.kangaroo import KangarooSettings
from ppd_runtime.methods.layerskip import AdaSpeedSettings, LayerSkipSettings
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.methods.prompts import Prompt
from ppd_runtime.methods.self_speculative import SelfSpeculativeDecoding
from ppd_runtime.methods.speculation import MethodSettings
from ppd_runtime.methods.swift import SwiftSettings
from ppd_runtime.results import GenerationResult
from ppd_runtime.sampling.params import SAMPLING_SETTINGS
from ppd_runtime.settings.fields import UnknownSettingError

_SETTINGS = (LayerSkipSettings, AdaSpeedSettings, KangarooSettings, SwiftSettings)
SELF_SPECULATIVE: Mapping[str, Callable[..., Any]] = dict(zip(SELF_SPECULATIVE_NAMES, _SETTINGS, strict=True))


def decode(model: str | Path, prompt: Prompt, method: str = "ppd", **settings: Any) -> GenerationResult:
    """Continue a prompt with a model, by any method: the tokens are the same.

    Args:
        model: a local folder, a GGUF file, a hub name, "demo" for the embedded model, or "smollm2".
        prompt: a text, or token ids; see `TextGenerator.generate`.
        method: one of `METHODS`.
        settings: the method's own (`LayerSkipSettings` and so on, or `PPDRuntime`'s), the generator's (dtype, device,
            threads, compile) and `generate`'s (max_new_tokens, temperature and so on, or `params`).

    Raises:
        ValueError: for an unknown setting, or one that cannot work, before any weights are read.
    """
    wanted = {*SAMPLING_SETTINGS, "params", "add_special_tokens"}
    asked = {name: value for name, value in settings.items() if name in wanted}
    others = {name: value for name, value in settings.items() if name not in wanted}
    with open_method(model, method, **others) as generator:
        return generator.generate(prompt, **asked)


def open_method(model: str | Path, method: str = "ppd", **settings: Any) -> TextGenerator:
    """A method ready for many prompts: `generate`, `stream`, and `close`; for the settings see `decode`."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: choose one of {', '.join(METHODS)}")
    if method in SELF_SPECULATIVE:
        return _self_speculative(model, method, settings)
    if method == "autoregressive":
        _check_names(method, settings, _names(OrdinaryDecoding) - {"model"})
        return OrdinaryDecoding(model, **settings)
    from ppd_runtime.runtime import PPDRuntime  # the other methods start without it, and sooner

    if "threads" in settings:  # what the other methods call it
        settings["threads_per_worker"] = settings.pop("threads")
    _check_names(method, settings, _names(PPDRuntime) - {"model"})
    return PPDRuntime(model, **settings)


def method_settings(method: str, settings: Mapping[str, Any]) -> tuple[MethodSettings, dict[str, Any]]:
    """A self-speculative method's own settings, ready to be checked against a model, and the others."""
    own, shared = _names(SELF_SPECULATIVE[method]), _names(SelfSpeculativeDecoding) - {"model", "method"}
    _check_names(method, settings, own | shared)
    chosen = SELF_SPECULATIVE[method](**{name: value for name, value in settings.items() if name in own})
    return chosen, {name: value for name, value in settings.items() if name in shared}


def _self_speculative(model: str | Path, method: str, settings: Mapping[str, Any]) -> SelfSpeculativeDecoding:
    chosen, shared = method_settings(method, settings)
    return SelfSpeculativeDecoding(chosen, model, **shared)


def _names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "prompt", "config"}


def _check_names(method: str, settings: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(settings) - known)
    if unknown:
        raise UnknownSettingError(method, unknown[0], known)
