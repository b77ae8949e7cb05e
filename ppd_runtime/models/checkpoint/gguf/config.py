"""Makes a GGUF model's config.json from its metadata and its tensors' names and shapes."""

from collections.abc import Mapping

from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.checkpoint.gguf.architectures import WINDOW, Architecture, values_of
from ppd_runtime.models.checkpoint.gguf.metadata import OTHER_MODEL, Metadata
from ppd_runtime.models.checkpoint.gguf.rope import rope_parameters
from ppd_runtime.models.checkpoint.hub import one_line

_MOST_POSITIONS, _MOST_LAYERS = 2**24, 2**10
_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN, _KV_HEADS = "attention.sliding_window_pattern", "attention.head_count_kv"


def config_of(about: Metadata, architecture: Architecture, factors: Mapping[str, Tensor]) -> PretrainedConfig:
    """The configuration of a model.

    Args:
        about: the file's metadata; each setting is read or refused.
        architecture: the row of its architecture.
        factors: the file's tensors that divide rotary frequencies, by name.

    Raises:
        ValueError: for settings that contradict each other or are not supported.
    """
    sizes = _sizes(about, architecture)
    settings = {
        "rope_parameters": rope_parameters(about, architecture, sizes["head_dim"], factors),
        "tie_word_embeddings": "output.weight" not in about.tensors,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **values_of(architecture.settings, about),
        **_layer_types(about, architecture, sizes["num_hidden_layers"]),
    }
    about.check_read()
    try:
        config = CONFIG_MAPPING[architecture.model_type](**{**sizes, **settings})
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        skeleton_of(config, 1)
        return config
    except Exception as error:  # the library's own checks raise many kinds
        raise ValueError(f"says what no {architecture.model_type} can be: {one_line(error)}; {OTHER_MODEL}") from error


def _sizes(about: Metadata, architecture: Architecture) -> dict[str, int]:
    """The model's sizes by the library's names. The tensors are checked against them."""
    hidden, heads = about.whole("embedding_length"), about.whole("attention.head_count")
    layers = about.whole("block_count", most=_MOST_LAYERS)
    of_some = architecture.convolutions
    kv_heads = about.of_some(_KV_HEADS, layers)[0] if of_some else about.whole(_KV_HEADS, heads)
    head_dim = about.whole("attention.key_length", max(1, hidden // heads))
    _check_attention(about, heads, kv_heads, head_dim)
    return {
        "vocab_size": _vocabulary(about, hidden),
        "hidden_size": hidden,
        "intermediate_size": about.whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": about.whole("context_length", most=_MOST_POSITIONS),
    }


def _check_attention(about: Metadata, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse attention of a kind that the library's classes do not have."""
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"has {heads} heads for {kv_heads} of keys, of {head_dim} numbers: they do not fit")
    if (found := about.whole("attention.value_length", head_dim)) != head_dim:
        name = f"{about.architecture}.attention.value_length"
        raise ValueError(f"has {name} {found} for heads of {head_dim} numbers, which is not read; {OTHER_MODEL}")
    if not about.flag("attention.causal", True):
        raise ValueError(f"attends to later tokens too ({about.architecture}.attention.causal); {OTHER_MODEL}")


def _vocabulary(about: Metadata, hidden: int) -> int:
    """Tokens that the model has: rows of its embedding."""
    name = "token_embd.weight"
    if name not in about.tensors:
        raise ValueError(f"lacks the tensor {name}; convert the model again with llama.cpp")
    shape = about.tensors[name].shape
    if len(shape) != 2 or shape[1] != hidden:
        raise ValueError(f"is damaged: {name} has the shape {list(shape)}, for {hidden} inputs")
    if (said := about.whole("vocab_size", shape[0])) != shape[0]:
        raise ValueError(f"is damaged: {said} tokens and {shape[0]} rows of {name}")
    return shape[0]


def _layer_types(about: Metadata, architecture: Architecture, layers: int) -> dict[str, list[str]]:
    """Which layers have windows, or convolutions, for classes that have both kinds."""
    if architecture.convolutions:
        return {"layer_types": [_FULL if heads else "conv" for heads in about.of_some(_KV_HEADS, layers)[1]]}
    if architecture.windows is None:
        return {}
    if not (architecture.has_windows or about.has(WINDOW)):
        about.ignore(_PATTERN)
        return {"layer_types": [_FULL] * layers}
    windows = about.pattern(_PATTERN, architecture.windows, layers)
    return {"layer_types": [_SLIDING if window else _FULL for window in windows]}
