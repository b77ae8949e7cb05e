"""The architectures of GGUF files: their classes in transformers, their settings, how tensors differ.

A row says what llama.cpp's converter makes of the library's model, and so what has to be undone. The library's defaults
are those of one model, so each setting that a class has is set.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppd_runtime.models.checkpoint.gguf.metadata import (
    OTHER_MODEL,
    Metadata,
    Setting,
    flag,
    number,
    number_or_none,
    tensor,
    whole,
)
from ppd_runtime.models.checkpoint.gguf.reader import GGUF, shown

Settings = Mapping[str, Any]
"""Fields of the library's configuration: values or readers."""


@dataclass(frozen=True)
class Architecture:
    """How a GGUF file of an architecture is read."""

    model_type: str
    """The library's name for it."""
    settings: Settings
    """Configuration fields beside those that all have."""
    interleaved: bool = False
    """Whether the two numbers of a rotary pair are adjacent in queries and keys."""
    norms_plus_one: bool = False
    """Whether 1 was added to the norms' weights."""
    turned_experts: bool = False
    """Whether the class transposes experts' matrices and interleaves gate and up."""
    partial_rotary: bool = False
    """Whether rotary may turn only a part of a head."""
    rotary_of_windows: bool = False
    """Whether layers with and without a window have rotary settings of their own."""
    theta_of_windows: float | None = None
    """The default theta of layers with a window; None: the other layers' theta."""
    yarn: Settings = field(default_factory=dict)
    """Further settings of the class for YaRN scaling."""
    table_scales: tuple[str, ...] = ()
    """The class's names for the rotary tables' factor, if it computes none itself."""
    windows: int | None = None
    """If some layers have windows: the default period, whose last layer has none."""
    has_windows: bool = False
    """Whether layers have windows even if the file gives no length."""
    convolutions: bool = False
    """Whether the layers without heads of keys have a short convolution in the attention's place."""
    instead: Mapping[str, "Architecture"] = field(default_factory=dict)
    """The row of a file with one of these keys."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Keys whose values the class hard-codes."""
    ignored: tuple[str, ...] = ()
    """Keys that change nothing."""


_RMS = {"rms_norm_eps": number("attention.layer_norm_rms_epsilon")}
_LAYER_NORM = number("attention.layer_norm_epsilon")
_SILU = {"hidden_act": "silu"}
_ATTENTION_BIAS = {"attention_bias": tensor("blk.0.attn_output.bias")}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": tensor("blk.0.ffn_down.bias")}
_NO_WINDOWS = {"use_sliding_window": False, "sliding_window": None}
_USED = {"num_experts_per_tok": whole("expert_used_count")}
_LOCAL_EXPERTS = {"num_local_experts": whole("expert_count"), **_USED}
_EXPERTS = {"num_experts": whole("expert_count"), **_USED}
_MOE = {**_EXPERTS, "moe_intermediate_size": whole("expert_feed_forward_length")}
_ORIGINAL = "rope.scaling.original_context_length"
WINDOW, _LONGEST_WINDOW = "attention.sliding_window", 2**24


def _window(about: Metadata) -> int:
    """Tokens that layers with a window attend to."""
    return about.whole(WINDOW, most=_LONGEST_WINDOW)


def _window_or_none(about: Metadata) -> int | None:
    return _window(about) if about.has(WINDOW) else None


def _feed_forward_of_experts(about: Metadata) -> int:
    """Feed-forward size of an expert. Older files give it under the layers' key."""
    return about.whole("expert_feed_forward_length", about.whole("feed_forward_length"))


def _gemma_scale(layers_of_27b: int) -> Setting:
    """The number whose root divides attention scores; not in the file, and different in 27 B models."""

    def scale(about: Metadata) -> int:
        hidden, heads = about.whole("embedding_length"), about.whole("attention.head_count")
        of_27b = about.whole("block_count") == layers_of_27b
        return hidden // heads if of_27b else about.whole("attention.key_length", max(1, hidden // heads))

    return scale


_LLAMA = {**_RMS, **_SILU, **_BIASES}
_MULTIPLIERS: Settings = {
    "embedding_multiplier": number("embedding_scale", 1.0),
    "residual_multiplier": number("residual_scale", 1.0),
    "attention_multiplier": number("attention.scale"),
    "logits_scaling": number("logit_scale"),
}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", **_RMS, "attention_bias": False}
_GRANITE_MOE = {**_RMS, **_SILU, **_ATTENTION_BIAS, **_MULTIPLIERS, **_LOCAL_EXPERTS}
_QWEN_MOE: Settings = {**_RMS, **_SILU, **_NO_WINDOWS, **_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []}
_SHARED = "expert_shared_feed_forward_length"
_OLMO = {**_SILU, **_ATTENTION_BIAS, "clip_qkv": number_or_none("attention.clamp_kqv")}
_COHERE = {**_SILU, **_ATTENTION_BIAS, "layer_norm_eps": _LAYER_NORM, "logit_scale": number("logit_scale")}

_MIXTRAL = Architecture("mixtral", {**_RMS, **_SILU, **_LOCAL_EXPERTS, "sliding_window": None}, interleaved=True)
_MINISTRAL3 = Architecture(
    "ministral3",
    {**_RMS, **_SILU, "sliding_window": None},
    interleaved=True,
    yarn={"llama_4_scaling_beta": number("attention.temperature_scale")},
)
_SHARED_GRANITE = Architecture(
    "granitemoeshared", {**_GRANITE_MOE, "shared_intermediate_size": whole(_SHARED)}, interleaved=True
)
_OLMO3 = Architecture(
    "olmo3", {**_RMS, **_SILU, **_ATTENTION_BIAS, "sliding_window": _window}, rotary_of_windows=True, windows=4
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, interleaved=True, instead={"expert_count": _MIXTRAL}),
    "mistral3": Architecture(
        "mistral",
        {**_RMS, **_SILU, "sliding_window": None},
        interleaved=True,
        instead={"attention.temperature_scale": _MINISTRAL3},
    ),
    "qwen2": Architecture("qwen2", {**_RMS, **_SILU, **_NO_WINDOWS}),
    "qwen3": Architecture("qwen3", {**_RMS, **_SILU, **_ATTENTION_BIAS, **_NO_WINDOWS}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {
            **_QWEN_MOE,
            "shared_expert_intermediate_size": whole(_SHARED),
            "norm_topk_prob": False,
            "qkv_bias": tensor("blk.0.attn_q.bias"),
        },
    ),
    "qwen3moe": Architecture("qwen3_moe", {**_QWEN_MOE, **_ATTENTION_BIAS, "norm_topk_prob": True}),
    "gemma": Architecture(
        "gemma", {**_RMS, "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}, norms_plus_one=True
    ),
    "gemma2": Architecture(
        "gemma2",
        {
            **_GELU,
            "sliding_window": lambda about: _window_or_none(about) or 4096,
            "attn_logit_softcapping": number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": number("final_logit_softcapping", 30.0),
            "query_pre_attn_scalar": _gemma_scale(46),
        },
        norms_plus_one=True,
        windows=2,
        has_windows=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **_GELU,
            "sliding_window": lambda about: _window_or_none(about) or about.whole("context_length"),
            "final_logit_softcapping": number_or_none("final_logit_softcapping"),
            "attn_logit_softcapping": None,
            "query_pre_attn_scalar": _gemma_scale(62),
        },
        norms_plus_one=True,
        rotary_of_windows=True,
        theta_of_windows=10000.0,
        windows=6,
    ),
    "phi3": Architecture(
        "phi3",
        {
            **_RMS,
            **_SILU,
            "sliding_window": _window_or_none,
            "original_max_position_embeddings": lambda about: about.whole(_ORIGINAL, about.whole("context_length")),
        },
        partial_rotary=True,
    ),
    "phimoe": Architecture(
        "phimoe",
        {
            **_RMS,
            **_SILU,
            **_LOCAL_EXPERTS,
            **_ATTENTION_BIAS,
            "sliding_window": _window_or_none,
            "lm_head_bias": tensor("output.bias"),
        },
        table_scales=("short_mscale", "long_mscale"),
    ),
    "smollm3": Architecture("smollm3", {**_LLAMA, **_NO_WINDOWS, "no_rope_layer_interval": 4}, interleaved=True),
    "granite": Architecture("granite", {**_LLAMA, **_MULTIPLIERS}, interleaved=True),
    "granitemoe": Architecture("granitemoe", _GRANITE_MOE, interleaved=True, instead={_SHARED: _SHARED_GRANITE}),
    "olmo": Architecture("olmo", _OLMO, interleaved=True, fixed={"attention.layer_norm_epsilon": 1e-5}),
    "olmo2": Architecture("olmo2", {**_RMS, **_SILU, **_ATTENTION_BIAS}, instead={WINDOW: _OLMO3}),
    "olmoe": Architecture("olmoe", {**_RMS, **_OLMO, **_EXPERTS, "norm_topk_prob": False}),
    "starcoder2": Architecture(
        "starcoder2",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": _LAYER_NORM,
            "use_bias": tensor("blk.0.attn_output.bias"),
            "sliding_window": None,
        },
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_RMS,
            **_SILU,
            **_LOCAL_EXPERTS,
            **_ATTENTION_BIAS,
            "sliding_window": _window,
            "intermediate_size": _feed_forward_of_experts,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        windows=2,
        turned_experts=True,
        yarn={"truncate": False},
    ),
    "command-r": Architecture("cohere", {**_COHERE, "use_qk_norm": tensor("blk.0.attn_q_norm.weight")}),
    "cohere2": Architecture("cohere2", {**_COHERE, "sliding_window": _window}, windows=4),
    "stablelm": Architecture(
        "stablelm",
        {
            **_SILU,
            "layer_norm_eps": _LAYER_NORM,
            "use_parallel_residual": flag("use_parallel_residual", False),
            "use_qkv_bias": tensor("blk.0.attn_q.bias"),
            "qk_layernorm": False,
        },
        partial_rotary=True,
    ),
    "exaone4": Architecture("exaone4", {**_RMS, **_SILU, "sliding_window": _window_or_none}, windows=4),
    "glm4": Architecture("glm4", {**_RMS, **_SILU, "attention_bias": tensor("blk.0.attn_q.bias")}, partial_rotary=True),
    "arcee": Architecture("arcee", {**_RMS, **_BIASES, "hidden_act": "relu2"}, interleaved=True),
    "seed_oss": Architecture(
        "seed_oss",
        {
            **_RMS,
            **_SILU,
            "attention_bias": tensor("blk.0.attn_q.bias"),
            "attention_out_bias": tensor("blk.0.attn_output.bias"),
            "mlp_bias": tensor("blk.0.ffn_down.bias"),
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
        },
    ),
    "nemotron": Architecture(
        "nemotron",
        {**_BIASES, "hidden_act": "relu2", "norm_eps": _LAYER_NORM},
        norms_plus_one=True,
        partial_rotary=True,
        ignored=("attention.layer_norm_rms_epsilon",),
    ),
    "ernie4_5": Architecture("ernie4_5", {**_RMS, **_SILU, "use_bias": tensor("blk.0.attn_output.bias")}),
    "lfm2": Architecture(
        "lfm2",
        {
            "norm_eps": number("attention.layer_norm_rms_epsilon"),
            "conv_L_cache": whole("shortconv.l_cache"),
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
        },
        convolutions=True,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {**_RMS, **_SILU, **_ATTENTION_BIAS}),
}


def values_of(settings: Settings, about: Metadata) -> dict[str, Any]:
    """The values of settings."""
    return {name: value(about) if callable(value) else value for name, value in settings.items()}


def architecture_of(gguf: GGUF) -> tuple[Architecture, Metadata]:
    """A file's architecture and metadata; ValueError unless it is a whole model of a supported architecture."""
    name, kind = gguf.metadata.get("general.architecture"), gguf.metadata.get("general.type", "model")
    if not isinstance(name, str):
        raise ValueError("lacks general.architecture; convert the model again with llama.cpp")
    if kind != "model":
        raise ValueError(f"holds no model but general.type {shown(str(kind))}; give the model's own file")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"has the architecture {shown(name)}, {known} are read as GGUF; {OTHER_MODEL}")
    found, about = ARCHITECTURES[name], Metadata(gguf, name)
    chosen = next((other for key, other in found.instead.items() if about.has(key)), found)
    for key in chosen.ignored:
        about.ignore(key)
    for key, value in chosen.fixed.items():
        about.expect(key, value)
    return chosen, about
