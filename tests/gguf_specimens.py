"""Small models of each architecture that is read as GGUF, plain and with special settings."""

import copy
from pathlib import Path
from typing import Any

from families.specimens import MOST_POSITIONS, NUM_LAYERS, SPECIAL, Specimen
from models_for_tests import build_tokenizer

_PLAIN = """
    llama mistral mixtral ministral3 qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text phi3 phimoe smollm3
    granite granitemoe granitemoeshared olmo olmo2 olmo3 olmoe starcoder2 gpt_oss cohere cohere2 stablelm exaone4 glm4
    arcee seed_oss nemotron ernie4_5 hunyuan_v1_dense lfm2
"""
PLAIN = tuple(_PLAIN.split())
"""Model types that some architecture's files are."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 48,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
NOT_SAID = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 5},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 5},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 4},
    "gpt_oss": {"sliding_window": 5},
    "olmo3": {"sliding_window": 5},
    "cohere2": {"sliding_window": 5},
    "exaone4": {"sliding_window": 5},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "olmoe": {"num_key_value_heads": 4},
    "ministral3": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}
"""What the files of some families do not say, as all their models have it; and windows shorter than the texts."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied smollm3": ("smollm3", {"tie_word_embeddings": False}),
    "untied starcoder2": ("starcoder2", {"tie_word_embeddings": False}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False}),
    "tied qwen2_moe": ("qwen2_moe", {"tie_word_embeddings": True}),
    "biased qwen3": ("qwen3", {"attention_bias": True}),
    "biased glm4": ("glm4", {"attention_bias": True}),
    "granite multipliers": (
        "granite",
        {k: v for s in SPECIAL if s.name == "granite, multipliers" for k, v in s.settings.items()},
    ),
    "scaled cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere with norms": ("cohere", {"use_qk_norm": True}),
    "gemma3 with scaled full attention": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "gemma3 without windows": (
        "gemma3_text",
        {"sliding_window": MOST_POSITIONS, "layer_types": ["full_attention"] * NUM_LAYERS},
    ),
    "gemma2 soft caps": ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "capped gemma3": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "olmo3 yarn": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}},
    ),
    "olmo3 other layers": ("olmo3", {"layer_types": MIXED}),
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": ["full_attention"] * NUM_LAYERS},
    ),
    "clipped olmo": ("olmo", {"clip_qkv": 0.5}),
    "parallel stablelm": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "rope_parameters": {**LOCAL, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3 longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 48, "sliding_window": 16}),
    "phi-4-mini": (
        "phi3",
        {
            "rope_parameters": {
                **LONG,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [2.0, 3.0, 4.0],
            },
            "original_max_position_embeddings": 48,
            "tie_word_embeddings": True,
        },
    ),
    "partial phi3": ("phi3", {"rope_parameters": {**LOCAL, "partial_rotary_factor": 0.75}}),
    "phimoe longrope": ("phimoe", {"rope_parameters": {**LONG, "short_mscale": 1.2, "long_mscale": 1.2}}),
    "llama longrope": ("llama", {"rope_parameters": LONG}),
    "qwen3 longrope": ("qwen3", {"rope_parameters": LONG}),
    "qwen2 yarn of another factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    "mistral yarn": ("mistral", {"rope_parameters": YARN}),
    "mixtral with wide heads": ("mixtral", {"head_dim": 16}),
    "gpt_oss without scaling": ("gpt_oss", {"rope_parameters": LOCAL}),
}
SPECIMENS = {
    **{family: (family, dict[str, Any]()) for family in PLAIN},
    **OTHERS,
}
"""Families with settings, by names for tests."""


def save_specimen(name: str, folder: Path) -> Path:
    """Save a small model, whose numbers bfloat16 holds, as a folder."""
    family, settings = SPECIMENS[name]
    own = copy.deepcopy({**NOT_SAID.get(family, {}), **settings})  # the library changes what it is given
    model = Specimen(family, name, own).build()
    model.bfloat16().float().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
