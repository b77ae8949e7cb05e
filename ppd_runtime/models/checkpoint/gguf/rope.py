"""Reads a GGUF file's rotary settings as the library's `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.checkpoint.gguf.architectures import Architecture, values_of
from ppd_runtime.models.checkpoint.gguf.metadata import OTHER_MODEL, Metadata
from ppd_runtime.models.checkpoint.gguf.reader import shown

FACTORS, LONG_FACTORS, SHORT_FACTORS = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
_KINDS = ("none", "linear", "yarn", "longrope")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192
"""Positions that Llama 3 was trained for before scaling; the file does not say."""
_CLOSE = 1e-5
_ORIGINAL = "rope.scaling.original_context_length"


def rope_parameters(
    about: Metadata, architecture: Architecture, head_dim: int, factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The library's settings of rotary.

    Args:
        about: what the file says.
        architecture: its row.
        head_dim: numbers of a head.
        factors: the file's tensors that divide rotary frequencies, by name.

    Raises:
        ValueError: for settings that contradict each other or are not supported.
    """
    theta = about.number("rope.freq_base", 10000.0)
    plain = {"rope_theta": theta, **_turned_part(about, architecture, head_dim)}
    rope = plain | _scaling(about, architecture, theta, head_dim, factors)
    if not architecture.rotary_of_windows:
        about.expect("rope.freq_base_swa", theta)
        return rope
    theta_of_windows = about.number("rope.freq_base_swa", architecture.theta_of_windows or theta)
    with_window = plain | {"rope_theta": theta_of_windows, "rope_type": "default"}
    return {"full_attention": rope, "sliding_attention": with_window}


def _turned_part(about: Metadata, architecture: Architecture, head_dim: int) -> dict[str, float]:
    """How much of a head is turned, for classes that turn a part."""
    turned = about.whole("rope.dimension_count", head_dim)
    if turned != head_dim and not (architecture.partial_rotary and turned < head_dim and turned % 2 == 0):
        name = f"{about.architecture}.rope.dimension_count"
        raise ValueError(f"has {name} {turned} for heads of {head_dim} numbers, which is not read; {OTHER_MODEL}")
    if not architecture.partial_rotary:
        return {}
    part = turned / head_dim
    return {"partial_rotary_factor": part if int(head_dim * part) == turned else math.nextafter(part, 1)}


def _scaling(
    about: Metadata, architecture: Architecture, theta: float, head_dim: int, factors: Mapping[str, Tensor]
) -> dict[str, Any]:
    usual = "linear" if about.has("rope.scaling.factor") or about.has("rope.scale_linear") else "none"
    kind = about.text("rope.scaling.type", usual)
    if kind not in _KINDS:
        raise ValueError(f"has rope.scaling.type {shown(kind)}; {', '.join(_KINDS)} are read; {OTHER_MODEL}")
    if LONG_FACTORS in factors or SHORT_FACTORS in factors or kind == "longrope":
        return _longrope(about, architecture, factors)
    if FACTORS in factors:
        if kind != "none":
            raise ValueError(f"has both {FACTORS} and rope.scaling.type {shown(kind)}; {OTHER_MODEL}")
        return _by_factors(about, theta, head_dim, factors[FACTORS])
    if kind == "none":
        for key in ("rope.scaling.factor", _ORIGINAL):
            about.ignore(key)
        return {"rope_type": "default"}
    if kind == "linear":
        about.ignore(_ORIGINAL)
        factor = about.number("rope.scaling.factor", about.number("rope.scale_linear", 1.0))
        return {"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"}
    return _yarn(about) | values_of(architecture.yarn, about)


def _yarn(about: Metadata) -> dict[str, Any]:
    about.expect("rope.scaling.yarn_ext_factor", 1.0)
    scaled: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": about.number("rope.scaling.factor"),
        "original_max_position_embeddings": about.whole(_ORIGINAL, about.whole("context_length")),
    }
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "mscale_all_dim": "yarn_log_multiplier"}
    for field, key in names.items():
        if about.has(f"rope.scaling.{key}"):
            scaled[field] = about.number(f"rope.scaling.{key}")
    if "mscale_all_dim" in scaled:
        scaled["mscale"] = 1.0  # the file has no key for it
    usual = 0.1 * math.log(max(scaled["factor"], 1.0)) + 1
    return scaled | _table_factor(about.number("rope.scaling.yarn_attn_factor", usual), usual)


def _longrope(about: Metadata, architecture: Architecture, factors: Mapping[str, Tensor]) -> dict[str, Any]:
    """LongRoPE: one set of factors up to the originally trained positions, and one for longer texts."""
    scaled: dict[str, Any] = {"rope_type": "longrope"}
    for field, name in (("short_factor", SHORT_FACTORS), ("long_factor", LONG_FACTORS)):
        if name not in factors:
            raise ValueError(f"lacks the tensor {name}; convert the model again with llama.cpp")
        scaled[field] = _checked(name, factors[name])
    positions = about.whole("context_length")
    original = scaled["original_max_position_embeddings"] = about.whole(_ORIGINAL, positions)
    ratio = positions / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 < original else 1.0
    said = about.number("rope.scaling.attn_factor", 1.0)
    if architecture.table_scales:
        return scaled | dict.fromkeys(architecture.table_scales, said)
    return scaled | _table_factor(said, usual)


def _table_factor(said: float, usual: float) -> dict[str, float]:
    """The factor of rotary's tables, unless it is the usual one, which the library computes with more digits."""
    return {"attention_factor": said} if np.float32(said) != np.float32(usual) else {}


def _by_factors(about: Metadata, theta: float, head_dim: int, factors: Tensor) -> dict[str, Any]:
    """Llama 3's scaling, if the factors match it; else the factors themselves."""
    context = about.whole(_ORIGINAL, _LLAMA3_CONTEXT)
    numbers = _checked(FACTORS, factors)
    if len(numbers) != head_dim // 2:
        raise ValueError(f"is damaged: {FACTORS} has {len(numbers)} numbers, for heads of {head_dim}")
    if found := _llama3(theta, head_dim, context, factors):
        return found
    positions = about.whole("context_length")
    own = {"short_factor": numbers, "long_factor": numbers, "attention_factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": positions, **own}


def _llama3(theta: float, head_dim: int, context: int, factors: Tensor) -> dict[str, Any] | None:
    """The library's Llama 3 scaling that divides frequencies by these factors; None if there is none."""
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = _LLAMA3.values()
    smooth = ((context / waves - low) / (high - low)).clamp(0, 1)
    longest = float(smooth[-1])  # 0 where the longest wave is divided by the whole factor
    last = 1 / max(1.0, float(factors[-1]))
    whole = (1 - longest) / (last - longest) if last > longest else 1.0
    factor = float(f"{whole:.4g}")
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors.double(), expected, rtol=_CLOSE, atol=0):
        return None
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": context, **_LLAMA3}


def _checked(name: str, factors: Tensor) -> list[float]:
    """Factors as numbers, as they were written before they were rounded to float32."""
    if not torch.isfinite(factors).all() or not (factors > 0).all():
        raise ValueError(f"is damaged: a factor of {name} is no number above 0")
    return [float(str(np.float32(factor))) for factor in factors.tolist()]
