"""The text model within a model that also reads pictures: its configuration, and its tensors' names."""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

_WRAPPERS = """
    aria aya_vision cohere2_vision exaone4_5 gemma3 gemma3n gemma4 gemma4_unified got_ocr2 idefics3 internvl lighton_ocr
    llama4 llava llava_next llava_onevision mistral3 qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe
    smolvlm video_llama_3 vipllava
"""
WRAPPERS = tuple(_WRAPPERS.split())
"""Model types whose text model runs here by itself."""

_SAME_WITHOUT_PICTURES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text models that have no causal language model of their own: the family that computes the same on text alone."""
_OF_PICTURES = ("mrope_section", "mrope_interleaved")
"""Rotary settings without effect on text: all coordinates of a position are its number."""

_EXPERTS = {"mlp.experts.gate_up_proj": -1, "mlp.experts.down_proj": -2}
"""Tensors that the files of `qwen3_vl_moe` may store with inputs before outputs: which dimension is the model's own."""

_INNER = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_HEAD = re.compile(r"^(?:language_model\.|text_model\.)?(lm_head\..*)$")
_PLAIN = re.compile(r"^model\.((?:layers\.\d+|embed_tokens|norm)\..*)$")


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The text model's configuration in that of one of `WRAPPERS`; any other configuration itself."""
    if config.model_type not in WRAPPERS:
        return config
    text = config.get_text_config(decoder=True)
    from_wrapper = {name: getattr(config, name, None) for name in ("tie_word_embeddings", "dtype")}
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        text = _plain(text)
    for name, value in from_wrapper.items():
        if value is not None:
            setattr(text, name, value)
    if getattr(text, "eos_token_id", None) is None:
        text.eos_token_id = getattr(config, "eos_token_id", None)
    return text


def _plain(text: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the family that computes what this text model computes on text alone."""
    settings: dict[str, Any] = text.to_dict()
    family = _SAME_WITHOUT_PICTURES[settings.pop("model_type")]
    rotary = {name: value for name, value in settings["rope_parameters"].items() if name not in _OF_PICTURES}
    if rotary.get("rope_type") == "mrope":
        rotary["rope_type"] = "default"
    always = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
    return CONFIG_MAPPING[family](**settings | always | {"rope_parameters": rotary})


def text_names(model_type: str) -> Callable[[str], str | None]:
    """A map from a file's tensor names to those of the text model's own files; None for other parts' tensors."""
    return _text_name if model_type in WRAPPERS else _same


def text_tensor(model_type: str, name: str, tensor: Tensor, hidden_size: int) -> Tensor:
    """A file's tensor as the text model's own files have it."""
    own = _EXPERTS.get(".".join(name.split(".")[-3:])) if model_type == "qwen3_vl_moe" else None
    return tensor if own is None or tensor.shape[own] == hidden_size else tensor.transpose(1, 2)


def _same(name: str) -> str:
    return name


def _text_name(name: str) -> str | None:
    if found := _HEAD.match(name) or _PLAIN.match(name):
        return name if found.re is _PLAIN else found[1]
    if inner := _INNER.match(name):
        return "model." + name[inner.end() :]
    return None
