"""A model folder as llama.cpp's converter writes it: metadata and tensors of a GGUF file, out of the hub's names.

Written by what the converter does to each family, and by the `gguf` package's names; nothing of the reader's is used.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "granitemoeshared": "granitemoe",
    "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
}
"""What GGUF calls model types, where it has another name."""
INTERLEAVED = {"llama", "mistral3", "smollm3", "granite", "granitemoe", "olmo", "arcee"}
"""Architectures whose queries and keys are permuted."""
PLUS_ONE = {"gemma", "gemma2", "gemma3", "nemotron"}
PARTIAL = {"phi3", "stablelm", "glm4", "nemotron"}
WITHOUT_WIDTHS = {"granite", "granitemoe", "phi3", "phimoe", "stablelm"}
"""Architectures that do not say how wide a head is."""
ONE_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(w1|w2|w3|gate_proj|down_proj|up_proj)\.weight")


def converted(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Metadata of the model alone, and its tensors by GGUF's names."""
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = dict(_rotary_factors(config))
    for name, tensor in _changed(architecture, config, load_file(folder / "model.safetensors")):
        found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found, name
        tensors[found] = tensor
    about = {**_common(config), **_own(architecture, config), **_rope(architecture, config)}
    metadata = {f"{architecture}.{key}": value for key, value in about.items() if value is not None}
    return {"general.architecture": architecture, **metadata}, tensors


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys: the two numbers that rotary turns together side by side."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _changed(
    architecture: str, config: PretrainedConfig, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The hub's tensors as they are written, by the hub's names or by GGUF's."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    experts = dict[str, list[Tensor]]()
    for name, tensor in sorted(tensors.items(), key=lambda pair: _in_order(pair[0])):
        part = name.split(".")[-2]
        if found := ONE_EXPERT.fullmatch(name):
            experts.setdefault(f"{found[1]}.experts.{found[2]}.weight", []).append(tensor)
        elif architecture == "gpt-oss" and ".experts." in name:
            yield from _of_gpt_oss(name, tensor)
        elif "conv.conv" in name:
            yield name, tensor.squeeze(1)
        elif name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif "input_linear" in name:
            yield from _of_granite(name, tensor)
        elif architecture in INTERLEAVED and part in heads:
            yield name, interleaved(tensor, heads[part])
        else:
            yield name, tensor + 1 if architecture in PLUS_ONE and name.endswith("norm.weight") else tensor
    for name, each in experts.items():
        yield name, torch.stack(each)


def _in_order(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _of_gpt_oss(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gates and ups stand side by side in the hub's, and matrices are turned."""
    stem, kind = (name[:-5], "bias") if name.endswith("_bias") else (name, "weight")
    turned = tensor if kind == "bias" else tensor.transpose(1, 2)
    if "gate_up" not in stem:
        yield f"{stem}.{kind}", turned
    else:
        for first, part in enumerate(("gate_proj", "up_proj")):
            yield f"{stem.replace('gate_up_proj', part)}.{kind}", turned[:, first::2]


def _of_granite(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gates and ups are one matrix in the hub's."""
    kind = "shexp" if "shared_mlp" in name else "exps"
    for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
        yield f"blk.{name.split('.')[2]}.ffn_{part}_{kind}.weight", half


def _common(config: PretrainedConfig) -> dict[str, object]:
    head_dim, kv_heads = getattr(config, "head_dim", None), config.num_key_value_heads
    if "conv" in (kinds := getattr(config, "layer_types", None) or []):
        kv_heads = [0 if kind == "conv" else kv_heads for kind in kinds]
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
    }


def _own(architecture: str, config: PretrainedConfig) -> dict[str, object]:
    """What only some architectures have."""
    found = _windows(architecture, config)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        found |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        found["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", None)
    if architecture in INTERLEAVED - {"olmo"}:
        found["vocab_size"] = config.vocab_size
    if architecture.startswith("granite"):
        found |= {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
        }
    if architecture in WITHOUT_WIDTHS:
        found |= dict.fromkeys(("attention.key_length", "attention.value_length"))
    return (
        found
        | {
            "qwen2moe": lambda: {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size},
            "gemma2": lambda: {"attn_logit_softcapping": config.attn_logit_softcapping, **_final_cap(config)},
            "gemma3": lambda: _final_cap(config),
            "lfm2": lambda: {
                "attention.layer_norm_rms_epsilon": config.norm_eps,
                "shortconv.l_cache": config.conv_L_cache,
                "vocab_size": config.vocab_size,
            },
            "gpt-oss": lambda: {"expert_feed_forward_length": config.intermediate_size},
            "olmo": lambda: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config.clip_qkv},
            "starcoder2": lambda: {"attention.layer_norm_epsilon": config.norm_epsilon},
            "command-r": lambda: {
                "attention.layer_norm_epsilon": config.layer_norm_eps,
                "logit_scale": config.logit_scale,
            },
            "cohere2": lambda: {
                "attention.layer_norm_epsilon": config.layer_norm_eps,
                "logit_scale": config.logit_scale,
            },
            "stablelm": lambda: {
                "attention.layer_norm_epsilon": config.layer_norm_eps,
                "use_parallel_residual": config.use_parallel_residual,
            },
            "nemotron": lambda: {
                "attention.layer_norm_epsilon": config.norm_eps,
                "attention.layer_norm_rms_epsilon": config.norm_eps,
            },
            "mistral3": lambda: {"attention.temperature_scale": config.rope_parameters.get("llama_4_scaling_beta")},
        }.get(architecture, dict)()
    )


def _final_cap(config: PretrainedConfig) -> dict[str, object]:
    return {"final_logit_softcapping": config.final_logit_softcapping}


def _windows(architecture: str, config: PretrainedConfig) -> dict[str, object]:
    if architecture not in ("gemma2", "gemma3", "phi3", "phimoe", "olmo2", "gpt-oss", "cohere2", "exaone4"):
        return {}
    window = getattr(config, "sliding_window", None)
    if architecture in ("phi3", "phimoe"):
        return {"attention.sliding_window": window or 0}
    if architecture == "gemma3" and "sliding_attention" not in config.layer_types:
        window = None
    found: dict[str, object] = {"attention.sliding_window": window}
    if window and architecture in ("olmo2", "exaone4"):
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    return found


def _rope(architecture: str, config: PretrainedConfig) -> dict[str, object]:
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    theta = None if architecture in ("gemma", "gemma2", "stablelm") else float(full["rope_theta"])
    found: dict[str, object] = {"rope.freq_base": theta}
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture in INTERLEAVED | PARTIAL | {"cohere2", "phimoe"} and architecture != "olmo":
        found["rope.dimension_count"] = int(head_dim * full.get("partial_rotary_factor", 1.0))
    if architecture in ("phi3", "phimoe"):
        found["rope.scaling.original_context_length"] = getattr(config, "original_max_position_embeddings", None)
    if full["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    elif full["rope_type"] == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"]}
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            found[f"rope.scaling.yarn_{key}"] = full.get(key)
        found["rope.scaling.yarn_attn_factor"] = full.get("attention_factor")
        found["rope.scaling.yarn_log_multiplier"] = full.get("mscale_all_dim")
    elif full["rope_type"] == "longrope":
        original = full["original_max_position_embeddings"]
        ratio = config.max_position_embeddings / original
        usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = full.get("short_mscale", usual)
        found["rope.scaling.type"] = None if architecture in ("phi3", "phimoe") else "longrope"
    return found


def _rotary_factors(config: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors by which frequencies are divided."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
    if rope["rope_type"] == "llama3":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((rope["original_max_position_embeddings"] / waves - low) / (high - low)).clamp(0, 1)
        yield "rope_freqs.weight", 1 / ((1 - smooth) / rope["factor"] + smooth)
