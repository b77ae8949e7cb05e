"""A GGUF model's config.json, out of its metadata and the names and shapes of its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.checkpoint.gguf.reader import GGUF, Value, shown
from ppd_runtime.models.checkpoint.hub import one_line

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The library's class for each architecture that is read; Mistral's models are written as llama."""
INTERLEAVED = {"llama"}
"""Architectures in whose queries and keys the two numbers that rotary turns together stand side by side."""
OTHER_MODEL = "give the hub name of the model that it was made of, or a folder with its config.json and safetensors"
ROPE_FACTORS = "rope_freqs.weight"
_READ = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.causal", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "tensor_data_layout"),
}
"""Keys of an architecture that are understood; others are refused unless they are zero."""
_MOST_POSITIONS, _MOST = 2**24, 2**31 - 1
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192
"""Positions that Llama 3 was trained for before they were scaled: the file does not say so."""
_CLOSE = 1e-5


@dataclass(frozen=True)
class Metadata:
    """The keys of a file's architecture, checked as they are asked for."""

    values: Mapping[str, Value]
    architecture: str

    def has(self, key: str) -> bool:
        """Whether the file says it."""
        return f"{self.architecture}.{key}" in self.values

    def whole(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number from 1 to `most`; where the file has one for each layer, the one that they share."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ValueError(f"says that {self.architecture}.{key} is {str(value)[:40]}; {OTHER_MODEL}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, as it was written before it was rounded to float32."""
        value = self._one(key, default)
        with np.errstate(over="ignore"):
            rounded = np.float32(value if isinstance(value, int | float) else math.nan)
        if isinstance(value, bool) or not 0 < rounded < math.inf:
            raise ValueError(f"says that {self.architecture}.{key} is {str(value)[:40]}; {OTHER_MODEL}")
        return float(str(rounded))

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, str):
            raise ValueError(f"says that {self.architecture}.{key} is {str(value)[:40]}; {OTHER_MODEL}")
        return value

    def _one(self, key: str, default: float | None) -> Value:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"lacks {self.architecture}.{key}; convert the model again with llama.cpp")
        if not isinstance(value, np.ndarray):
            return value
        if not len(value) or not (value == value[0]).all():
            raise ValueError(f"has layers of different {self.architecture}.{key}, which are not read; {OTHER_MODEL}")
        one: int | float = value[0].item()
        return one


def architecture_of(gguf: GGUF) -> str:
    """The model's architecture; raises ValueError for another file than a whole model of one that is read."""
    architecture, kind = gguf.metadata.get("general.architecture"), gguf.metadata.get("general.type", "model")
    if not isinstance(architecture, str):
        raise ValueError("lacks general.architecture; convert the model again with llama.cpp")
    if kind != "model":
        raise ValueError(f"holds no model but general.type {shown(str(kind))}; give the model's own file")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"has the architecture {shown(architecture)}, {known} are read as GGUF; {OTHER_MODEL}")
    parts = gguf.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ValueError(f"is one of {str(parts)[:20]} parts; join them with `llama-gguf-split --merge`")
    for key, value in gguf.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name != key and name not in _READ and not _is_zero(value):
            raise ValueError(f"has the setting {shown(key)} ({str(value)[:40]}), which is not read; {OTHER_MODEL}")
    return architecture


def _is_zero(value: Value) -> bool:
    return isinstance(value, int | float) and not value


def config_of(gguf: GGUF, rope_factors: torch.Tensor | None) -> PretrainedConfig:
    """The configuration of a model whose architecture is read.

    Args:
        rope_factors: the numbers of the tensor `ROPE_FACTORS`, by which frequencies are divided; None: there is none.

    Raises:
        ValueError: for settings that contradict the tensors or each other, or that are not read.
    """
    architecture = architecture_of(gguf)
    about = Metadata(gguf.metadata, architecture)
    sizes = _sizes(gguf, about)
    settings = {
        "architectures": [ARCHITECTURES[architecture]],
        "hidden_act": "silu",
        "rms_norm_eps": about.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(about, sizes["head_dim"], rope_factors),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **_own_settings(gguf, architecture),
    }
    try:
        config = CONFIG_MAPPING[architecture](**sizes, **settings)
        skeleton_of(config, 1)
        return config
    except Exception as error:  # the library's own checks raise many kinds
        raise ValueError(f"says what no {architecture} can be: {one_line(error)}; {OTHER_MODEL}") from error


def _sizes(gguf: GGUF, about: Metadata) -> dict[str, int]:
    """Those of the model, by the library's names, which fit each other and the first layer's tensors."""
    hidden, heads = about.whole("embedding_length"), about.whole("attention.head_count")
    kv_heads = about.whole("attention.head_count_kv", heads)
    head_dim = about.whole("attention.key_length", max(1, hidden // heads))
    _check_attention(about, heads, kv_heads, head_dim)
    sizes = {
        "vocab_size": _rows(gguf, "token_embd.weight", hidden),
        "hidden_size": hidden,
        "intermediate_size": about.whole("feed_forward_length"),
        "num_hidden_layers": about.whole("block_count", most=len(gguf.tensors)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": about.whole("context_length", most=_MOST_POSITIONS),
    }
    _check_sizes(gguf, about, sizes)
    return sizes


def _own_settings(gguf: GGUF, architecture: str) -> dict[str, Any]:
    """What only some architectures have."""
    bias = {"attention_bias": "blk.0.attn_output.bias" in gguf.tensors}
    return {
        "llama": {**bias, "mlp_bias": "blk.0.ffn_down.bias" in gguf.tensors},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {**bias, "use_sliding_window": False},
    }[architecture]


def _check_attention(about: Metadata, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse attention of a kind that the library's classes do not have."""
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"has {heads} heads for {kv_heads} of keys, of {head_dim} numbers: they do not fit")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := about.whole(key, head_dim)) != head_dim:
            name = f"{about.architecture}.{key}"
            raise ValueError(f"has {name} {found} for heads of {head_dim} numbers, which is not read; {OTHER_MODEL}")
    if about.values.get(f"{about.architecture}.attention.causal", True) is not True:
        raise ValueError(f"attends to later tokens too ({about.architecture}.attention.causal); {OTHER_MODEL}")


def _check_sizes(gguf: GGUF, about: Metadata, sizes: Mapping[str, int]) -> None:
    """Compare the sizes with the first layer's tensors, so that they are bounded by the file's."""
    hidden = sizes["hidden_size"]
    for name, size, what in (
        ("blk.0.attn_q.weight", sizes["num_attention_heads"] * sizes["head_dim"], "attention.head_count"),
        ("blk.0.attn_k.weight", sizes["num_key_value_heads"] * sizes["head_dim"], "attention.head_count_kv"),
        ("blk.0.ffn_up.weight", sizes["intermediate_size"], "feed_forward_length"),
    ):
        if (rows := _rows(gguf, name, hidden)) != size:
            raise ValueError(f"is damaged: {name} has {rows} rows, by {about.architecture}.{what} it has {size}")
    if (said := about.whole("vocab_size", sizes["vocab_size"])) != sizes["vocab_size"]:
        raise ValueError(f"is damaged: {said} tokens and {sizes['vocab_size']} rows of token_embd.weight")


def _rows(gguf: GGUF, name: str, inputs: int) -> int:
    """Rows of a matrix with so many inputs."""
    if name not in gguf.tensors:
        raise ValueError(f"lacks the tensor {name}; convert the model again with llama.cpp")
    shape = gguf.tensors[name].shape
    if len(shape) != 2 or shape[1] != inputs:
        raise ValueError(f"is damaged: {name} has the shape {list(shape)}, for {inputs} inputs")
    return shape[0]


def _rope(about: Metadata, head_dim: int, factors: torch.Tensor | None) -> dict[str, Any]:
    """The library's `rope_parameters`."""
    theta = about.number("rope.freq_base", 10000.0)
    kind = about.text("rope.scaling.type", "linear" if about.has("rope.scaling.factor") else "none")
    if factors is not None:
        if kind != "none":
            raise ValueError(f"has both {ROPE_FACTORS} and rope.scaling.type {shown(kind)}; {OTHER_MODEL}")
        context = about.whole("rope.scaling.original_context_length", _LLAMA3_CONTEXT)
        return {"rope_theta": theta, **_llama3(theta, head_dim, context, factors)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"has rope.scaling.type {shown(kind)}; linear and yarn are read; {OTHER_MODEL}")
    scaled = {"rope_theta": theta, "rope_type": kind, "factor": about.number("rope.scaling.factor")}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = about.whole("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if about.has(f"rope.scaling.yarn_{key}"):
                scaled[key] = about.number(f"rope.scaling.yarn_{key}")
    return scaled


def _llama3(theta: float, head_dim: int, context: int, factors: torch.Tensor) -> dict[str, Any]:
    """Llama 3's scaling, as the library calls it, that divides frequencies by these factors."""
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = _LLAMA3.values()
    smooth = ((context / waves - low) / (high - low)).clamp(0, 1)
    longest = float(smooth[-1])  # 0 where the longest wave is divided by the whole factor
    last = 1 / max(1.0, float(factors[-1]))
    whole = (1 - longest) / (last - longest) if last > longest else 1.0
    factor = float(f"{whole:.4g}")
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors.double(), expected, rtol=_CLOSE, atol=0):
        raise ValueError(
            f"has other factors in {ROPE_FACTORS} than Llama 3's scaling, which are not read; {OTHER_MODEL}"
        )
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": context, **_LLAMA3}
