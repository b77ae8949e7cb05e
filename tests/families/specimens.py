"""Small random models of every decoder that transformers has and the loader accepts, with their special settings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from models_for_tests import END_ID, VOCAB_SIZE, quieten, vary
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from ppd_runtime.models.checkpoint.wrappers import WRAPPERS

NUM_LAYERS = 4
MOST_POSITIONS = 128
BORDER = 48
"""Where a long text's rotary embedding begins to differ from a short one's, in specimens that have such a border."""
HEAD_DIM = 8
_MOST_PARAMETERS = 5_000_000

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MOST_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": END_ID,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_EXPERTS |= {"moe_num_experts": 4, "moe_k": 2, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16}
_EXPERTS |= {"shared_intermediate_size": 16}
_RECURRENT = ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2), "conv_L_cache": 3}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_NEMOTRON = {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "mamba_num_heads": 8}
_NEMOTRON |= {"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 16}
_MAMBA_1 = {"state_size": 8, "intermediate_size": 64}
_INDEX = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 2}
_DOTS = _INDEX | {"sliding_window": 5, "shared_experts_intermediate_size": 16, "head_dim": 16, "swa_head_dim": 16}
_DOTS |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 24}
_DOTS |= {"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_GEMMA_4 = {"global_head_dim": 2 * HEAD_DIM, "sliding_window": 5, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA_4 |= {"layer_types": ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)}
_EFFECTIVE = {"hidden_size_per_layer_input": 8}
_E2B = _EFFECTIVE | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_GEMMA_3N = {"layer_types": _GEMMA_4["layer_types"], "sliding_window": 5, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA_3N |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 3}
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_types": _RECURRENT},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dots3_note_text": _DOTS,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    **dict.fromkeys(("falcon_mamba", "mamba"), _MAMBA_1),
    "gemma3n_text": _GEMMA_3N,
    "gemma4_text": _GEMMA_4 | {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": _GEMMA_4,
    "granitemoehybrid": _MAMBA | {"layer_types": _RECURRENT},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _RECURRENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "lfm3": _CONVOLUTIONS,
    "llama4_text": {"attention_chunk_size": 5, "floor_scale": 4, "intermediate_size_mlp": 64, "moe_layers": [1, 3]}
    | {"no_rope_layer_interval": 2, "num_experts_per_tok": 1},
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), _INDEX),
    "longcat_flash": {"num_layers": NUM_LAYERS, "num_hidden_layers": 2 * NUM_LAYERS, "zero_expert_num": 2},
    "mamba2": {"head_dim": 8, "num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron_h": _NEMOTRON,
    "olmo_hybrid": _DELTA | {"layer_types": _RECURRENT},
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _DELTA | {"layer_types": _RECURRENT}),
}
"""What a family needs besides, where the common shape is refused."""

_SUPPORTED = """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet cohere cohere2 cohere2_moe cwm deepseek_v2
    deepseek_v3 deepseek_v32 diffllama doge dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1
    falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe kimi_linear
    kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma youtu
"""
SUPPORTED = tuple(_SUPPORTED.split())
"""Families that run in every layout, if not in every method."""


_HEADS: Mapping[str, Mapping[str, Any]] = {"plain": {}, "tied head": {"tie_word_embeddings": True}}


@dataclass(frozen=True)
class Specimen:
    """A model to be made: a model type with settings over the common small shape."""

    _AUTO: ClassVar[type] = AutoModelForCausalLM

    family: str
    kind: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """As the tables have it."""
        return self.family if self.kind == "plain" else f"{self.family}, {self.kind}"

    @property
    def border(self) -> int | None:
        """The length of text for which its rotary embedding was first trained, where the configuration names one."""
        rotary = self.settings.get("rope_parameters", {})
        ends = MOST_POSITIONS if rotary.get("rope_type") == "dynamic" else None
        return rotary.get("original_max_position_embeddings", ends)

    def config(self) -> PretrainedConfig:
        """Its configuration; whatever the library's own checks raise, where they refuse it."""
        config_class = CONFIG_MAPPING[self.family]
        latent = _LATENT if _has(config_class, "kv_lora_rank") else {}
        experts = {name: value for name, value in _EXPERTS.items() if _has(config_class, name)}
        config = config_class(**{**_SHAPE, **latent, **experts, **_NEEDED.get(self.family, {}), **self.settings})
        config.eos_token_id = None
        return config

    def build(self, seed: int = 0) -> PreTrainedModel:
        """The model, its later layers quiet enough for earlier ones to predict many of its tokens."""
        config = self.config()
        with torch.device("meta"):
            size = self._AUTO.from_config(config).num_parameters()
        if size > _MOST_PARAMETERS:
            raise ValueError(f"{self.family}: the common shape does not make it small, it has {size} parameters")
        torch.manual_seed(seed)
        model = self._AUTO.from_config(config, dtype=torch.float32).eval()
        vary(model)
        text = config.get_text_config(decoder=True)
        quieten(model, getattr(text, "num_layers", text.num_hidden_layers) // 2)
        model.generation_config = GenerationConfig(pad_token_id=END_ID)
        return model


class Wrapper(Specimen):
    """A model that also reads pictures, around a small text model."""

    _AUTO = AutoModelForImageTextToText

    def config(self) -> PretrainedConfig:
        """See `Specimen.config`; the settings are the text model's, but whether its head is tied."""
        usual = CONFIG_MAPPING[self.family]()
        text, fields = usual.get_text_config(decoder=True), usual.to_dict()
        (name,) = (name for name, value in vars(usual).items() if value is text)
        known = {name: value for name, value in {**_SHAPE, **_EXPERTS}.items() if _has(type(text), name)}
        tied = self.settings.get("tie_word_embeddings", False)
        fields["tie_word_embeddings"] = fields[name]["tie_word_embeddings"] = tied
        fields[name] |= known | _NEEDED.get(text.model_type, {}) | self.settings
        fields[name].pop("per_layer_config", None)  # it names layers that there are not, and follows from the others
        if kinds := fields[name].get("layer_types"):
            fields[name]["layer_types"] = kinds[:NUM_LAYERS]
        if self.family.startswith("qwen"):
            fields[name]["rope_parameters"] |= {"mrope_section": [1, 1, 2]}
        parts = (value for other, value in fields.items() if other != name and other.endswith("config") and value)
        for part in parts:
            part |= {size: number for size, number in _SMALL_TOWER.items() if size in part}
            part.pop("layer_types", None)
        of_pictures = VOCAB_SIZE if self.family.startswith("gemma4") else VOCAB_SIZE - 1  # they embed it as padding
        fields |= {name: of_pictures for name in fields if name.endswith(("_token_id", "_token_index"))}
        fields |= {"alignment_intermediate_size": 64} if "alignment_intermediate_size" in fields else {}
        fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": END_ID}
        fields.pop("transformers_version")
        return type(usual)(**fields)


_SMALL_TOWER = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "embed_dim": 32}
_SMALL_TOWER |= {"deepstack_visual_indexes": [0], "vision_output_dim": 32}
_SMALL_TOWER |= {"projector_input_dim": 32, "projector_output_dim": 32}
_SMALL_TOWER |= dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "num_heads", "num_attention_heads"), 2)
"""Of what reads pictures."""
_UNBUILT = {"gemma3n"}
"""Wrappers whose part for pictures needs another package (timm)."""
WRAPPED = (
    *(
        Wrapper(family, kind, settings)
        for family in WRAPPERS
        if family not in _UNBUILT
        for kind, settings in _HEADS.items()
    ),
    Wrapper("gemma4", "as E2B has them", _E2B),
)
"""Models that also read pictures, of which the text model runs."""


def every_family() -> Iterator[str]:
    """Model types of causal language models, as transformers names them."""
    for family, config_class in CONFIG_MAPPING.items():
        if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
            yield family


def _has(config_class: type, name: str) -> bool:
    return hasattr(config_class, name) or name in getattr(config_class, "attribute_map", {})


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


def _long_rope(**settings: Any) -> dict[str, Any]:
    """One rotary table up to `BORDER` positions, another one for texts beyond."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    border = {"original_max_position_embeddings": BORDER}
    return _rope("longrope", **factors | border | settings) | border


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_MIXED = ["sliding_attention" if i % 2 else "full_attention" for i in range(NUM_LAYERS)]
_MULTIPLIERS = {"residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0}
_MULTIPLIERS |= {"embedding_multiplier": 12.0}

_KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS_BESIDE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
_PHI_4_MINI = _long_rope(short_factor=[1.0, 1.1, 1.2], long_factor=[2.0, 3.0, 4.0])
_PHI_4_MINI |= {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}

_KEPT_LAST = ["mlp", "moe", "linear_attention", "mlp", "full_attention"]

SPECIAL: tuple[Specimen, ...] = (
    *(Specimen(family, "linear rotary", _rope("linear", factor=2.0)) for family in ("llama", "olmo2")),
    *(Specimen(family, "dynamic rotary", _rope("dynamic", factor=2.0)) for family in ("llama", "qwen3")),
    *(
        Specimen(family, "yarn", _rope("yarn", factor=2.0, original_max_position_embeddings=64))
        for family in ("llama", "qwen2")
    ),
    Specimen("llama", "llama3 rotary", _rope("llama3", **_LLAMA3)),
    Specimen("phi3", "longrope", _long_rope()),
    Specimen("phimoe", "longrope", _long_rope(short_mscale=1.1, long_mscale=1.3)),
    Specimen("llama", "longrope", _long_rope()),
    Specimen("qwen3", "longrope", _long_rope()),
    Specimen("phi3", "longrope, as Phi-4-mini has it", _PHI_4_MINI),
    Specimen("phi3", "longrope and a window", _long_rope() | {"sliding_window": 16}),
    Specimen("phi3", "partial rotary", {"partial_rotary_factor": 0.5}),
    *(Specimen("mistral", f"window of {size}", {"sliding_window": size}) for size in (1, 2, 5, 16)),
    *(
        Specimen(family, "window of 5", {"sliding_window": 5})
        for family in ("phi3", "starcoder2", "gpt_oss", "gemma3_text", "cohere2", "olmo3", "exaone4")
    ),
    Specimen(
        "qwen2", "windows in later layers", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    ),
    Specimen("qwen2", "a window that is off", {"use_sliding_window": False, "sliding_window": 5}),
    Specimen("llama", "overlooked layer kinds", {"sliding_window": 5, "layer_types": _MIXED}),
    Specimen("llama", "overlooked chunks", {"attention_chunk_size": 5}),
    Specimen("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    *(Specimen(family, "tied head", {"tie_word_embeddings": True}) for family in ("llama", "qwen2", "gemma2")),
    *(Specimen(family, "multipliers", _MULTIPLIERS) for family in ("granite", "granitemoe", "granitemoeshared")),
    Specimen(
        "gemma2", "soft caps", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "sliding_window": 5}
    ),
    Specimen("cohere", "scaled logits", {"logit_scale": 0.5}),
    Specimen("gemma4_text", "keys as values, experts", _KEYS_AS_VALUES | _EXPERTS_BESIDE),
    Specimen("gemma4_text", "keys as values, a window of 16", _KEYS_AS_VALUES | {"sliding_window": 16}),
    Specimen("gemma3n_text", "sparse activations", {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}),
    Specimen("gemma3n_text", "no shared keys", {"num_kv_shared_layers": 0, "altup_correct_scale": False}),
    Specimen("gemma4_text", "per-layer inputs", _EFFECTIVE),
    Specimen("gemma4_text", "per-layer inputs, a shared layer", _EFFECTIVE | {"num_kv_shared_layers": 1}),
    Specimen("gemma4_text", "as E2B has them", _E2B),
    Specimen("gemma4_unified_text", "shared keys", {"num_kv_shared_layers": 2}),
    Specimen("llama4_text", "chunks of 16", {"attention_chunk_size": 16}),
    Specimen("llama4_text", "no experts, no norms of queries", {"moe_layers": [], "use_qk_norm": False}),
    Specimen("deepseek_v32", "an index that takes 16 tokens", {"index_topk": 16}),
    Specimen("glm_moe_dsa", "an index that takes one token", {"index_topk": 1}),
    Specimen("dots3_note_text", "an index in each layer", {"layer_types": ["indexed_attention"] * NUM_LAYERS}),
    Specimen("nemotron_h", "an expert's latent size", {"moe_latent_size": 16}),
    Specimen("mamba2", "states that are added in their own dtype", {"residual_in_fp32": False}),
    Specimen("nemotron_h", "a layer first that keeps nothing", {"layers_block_type": _KEPT_LAST}),
    *(Specimen("llama", f"{depth} layers", {"num_hidden_layers": depth}) for depth in (2, 3, 13)),
    *(Specimen("qwen3", f"{heads} key/value heads", {"num_key_value_heads": heads}) for heads in (1, 4)),
)
"""Special configurations of families that have them."""
_UNUSUAL = """
    axk2 deepseek_v32 dots3_note_text falcon_h1 falcon_mamba gemma3n_text glm_moe_dsa llama4_text longcat_flash mamba
    mamba2 nemotron_h qwen3_next
"""
UNUSUAL = (*map(Specimen, _UNUSUAL.split()), *(one for one in SPECIAL if one.kind == "as E2B has them"))
"""Families whose layers keep, or read, something else than a token's keys, values and hidden state, or attend twice."""


def overlooked_windows(families: Iterable[str]) -> Iterator[Specimen]:
    """Families whose configuration has no window, with one in it that their code never reads but the cache does."""
    for family in families:
        if not _has(CONFIG_MAPPING[family], "sliding_window") and not _has(CONFIG_MAPPING[family], "layer_types"):
            yield Specimen(family, "overlooked window", {"sliding_window": 5})
