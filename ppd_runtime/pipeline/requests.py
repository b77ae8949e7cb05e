"""A request's settings on their way, into the client's `Begin` and out of it in each worker; and an early end."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ppd_runtime.config import SamplingParams
from ppd_runtime.pipeline.messages import CLIENT, MAIN, Begin, BeginHere, Finished

_AS_THEY_ARE = ("max_new_tokens", "top_k", "seed", "ignore_eos", "num_generated")
_NUMBERS = ("temperature", "top_p", "repetition_penalty", "min_p", "presence_penalty", "frequency_penalty")
_SEVERAL = ("stop", "stop_token_ids")


def begin_request(request: int, prompt_ids: Sequence[int], params: SamplingParams, live: bool) -> Begin:
    """The client's first message of a request; with functions among its settings, one that stays in this process."""
    settings: dict[str, Any] = {
        **{name: getattr(params, name) for name in _AS_THEY_ARE},
        **{name: float(getattr(params, name)) for name in _NUMBERS},
        **{name: list(getattr(params, name)) for name in _SEVERAL},
    }
    if params.logits_processors:
        processors = params.logits_processors
        return BeginHere(CLIENT, request, list(prompt_ids), live=live, logits_processors=processors, **settings)
    return Begin(CLIENT, request, list(prompt_ids), live=live, **settings)


def sampling_params(begin: Begin) -> SamplingParams:
    """The settings that a request carries: all but `timeout_s`, which its client sees to.

    Raises:
        ValueError: for values that are out of range.
    """
    settings: dict[str, Any] = {name: getattr(begin, name) for name in (*_AS_THEY_ARE, *_NUMBERS)}
    settings |= {name: tuple(getattr(begin, name)) for name in _SEVERAL}
    processors = begin.logits_processors if isinstance(begin, BeginHere) else ()
    return SamplingParams(**settings, logits_processors=processors)


def cut_short(request: int, num_tokens: int = 0, latency_s: float = 0.0) -> Finished:
    """The end of a cancelled request that no main process tells more of: times and passes are unknown."""
    times = {field.name: 0.0 for field in fields(Finished) if field.name.endswith("_s")} | {"latency_s": latency_s}
    return Finished(MAIN, request, "cancelled", num_tokens, layer_passes=0, recomputed_layer_passes=0, **times)
