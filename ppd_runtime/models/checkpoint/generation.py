"""Defaults of requests from a model's `generation_config.json`, as in transformers' `generate`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ppd_runtime.models.checkpoint.config import GENERATION, read_json
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.sampling.params import FROM_THE_MODEL, SamplingParams

logger = logging.getLogger(__name__)

_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "token_healing": (False,),
    "remove_invalid_values": (False,),
    "watermarking_config": (),
    "stop_strings": ([], ""),
    "max_time": (),
}
"""Unsupported fields that change `generate`'s texts, with the values that change nothing."""
_IDS = ("suppress_tokens", "begin_suppress_tokens")
"""Fields in which `generate` ignores ids that the vocabulary lacks."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults of requests."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """See `FROM_THE_MODEL`."""
    temperature: float | None = None
    """The temperature of sampled requests that name none."""


def generation_defaults(info: ModelInfo, wanted: bool = True) -> GenerationDefaults:
    """The model's defaults, if wanted; warns once in a process of fields that are unsupported.

    Raises:
        ValueError: for values that `generate` could not work with either.
    """
    if not wanted:
        return GenerationDefaults()
    given = _fields(info)
    left_out = [f"{name}={given[name]!r:.100}" for name, nothing in _LEFT_OUT.items() if _asks(given, name, nothing)]
    if left_out:
        _tell(info.name, ", ".join(left_out))
    settings = {name: given[name] for name in FROM_THE_MODEL if given.get(name) is not None}
    settings |= {name: _within(info, settings[name]) for name in _IDS if isinstance(settings.get(name), list)}
    temperature = given.get("temperature")
    try:
        params = SamplingParams(**settings)
        usual = None if temperature is None else SamplingParams(temperature=temperature).temperature
        check_tokens(params, info.vocab_size)
    except ValueError as error:
        raise ValueError(
            f"model {info.name!r}: {GENERATION}: {error}; mend the file, or leave it out "
            "(generation_config=False, --no-generation-config)"
        ) from error
    return GenerationDefaults(params, usual)


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError for a setting that names a token which the vocabulary does not have."""
    for name, token in params.named_tokens():
        if token >= vocab_size:
            raise ValueError(f"{name}={token}: is outside the vocabulary, choose 0 to {vocab_size - 1}")


def _fields(info: ModelInfo) -> dict[str, Any]:
    """Fields of `generation_config.json`; without that file, of `config.json`, where older models have them."""
    path = info.folder / GENERATION
    return read_json(path if path.exists() else info.folder / "config.json")


def _asks(given: Mapping[str, Any], name: str, nothing: tuple[Any, ...]) -> bool:
    return given.get(name) is not None and given[name] not in nothing


def _within(info: ModelInfo, ids: list[Any]) -> list[Any]:
    return [token for token in ids if not isinstance(token, int) or 0 <= token < info.vocab_size]


@cache
def _tell(model: str, fields: str) -> None:
    logger.warning("%s: left out of %s, for it cannot be taken here: %s", model, GENERATION, fields)
