"""Small random draft heads in the format of the package `speculators`, and their logits by plain formulas.

The formulas use no cache, no layer of a library and no tree: for each chain of guesses all is computed anew.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

SIZE, HEADS, SHARED, DIM, THETA, EPS = 32, 4, 2, 8, 10000.0, 1e-6
"""The heads' shape; SIZE is the hidden size of the tests' models."""
VOCAB_SIZE, DRAFT_SIZE, MASK, BLOCK = 300, 100, 7, 5
IDS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}
Tensors = dict[str, Tensor]


def card_of(kind: str, model: Path, layers: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A head's config.json; `layers` are fields of its layers' configuration."""
    decoder = {
        "model_type": "llama" if kind == "eagle3" else "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 1 if kind == "eagle3" else 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SHARED,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        **(layers or {}),
    }
    own = {"block_size": BLOCK, "mask_token_id": MASK} if kind == "dflash" else {}
    return {
        "architectures": ["Speculator"],
        "auto_map": {"": "config.SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": DRAFT_SIZE,
        IDS[kind]: [1, 3, 6],
        "transformer_layer_config": decoder,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": str(model),
                "architectures": AutoConfig.from_pretrained(model).architectures,
            },
        },
        **own,
        **fields,
    }


def tensors_of(card: dict[str, Any], seed: int = 0) -> Tensors:
    """Random tensors for a card."""
    eagle3, decoder = card["speculators_model_type"] == "eagle3", card["transformer_layer_config"]
    states = 3 * SIZE
    shapes: dict[str, Sequence[int]] = {"fc.weight": (SIZE, states), "norm.weight": (SIZE,)}
    shapes |= {"lm_head.weight": (card["draft_vocab_size"], SIZE), "embed_tokens.weight": (VOCAB_SIZE, SIZE)}
    shapes |= {} if eagle3 else {"hidden_norm.weight": (SIZE,)}
    shapes |= {"input_norm.weight": (states,)} if card.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{number}.weight": (SIZE,) for number in range(3) if card.get("fc_norm")}
    for number in range(decoder["num_hidden_layers"]):
        wide = 2 * SIZE if eagle3 and number == 0 else SIZE
        inner = {"q_proj": (HEADS * DIM, wide), "k_proj": (SHARED * DIM, wide), "v_proj": (SHARED * DIM, wide)}
        inner |= {"o_proj": (SIZE, HEADS * DIM)}
        inner |= {"q_norm": (DIM,), "k_norm": (DIM,)} if decoder["model_type"] == "qwen3" else {}
        layer = {f"self_attn.{name}": shape for name, shape in inner.items()}
        layer |= {"mlp.gate_proj": (48, SIZE), "mlp.up_proj": (48, SIZE), "mlp.down_proj": (SIZE, 48)}
        layer |= {"input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,)}
        layer |= {"hidden_norm": (SIZE,)} if eagle3 and number == 0 else {}
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    made = torch.Generator().manual_seed(seed)
    numbers = {name: torch.randn(*shape, generator=made) for name, shape in shapes.items()}
    tensors = {name: 1 + part / 4 if part.ndim == 1 else part / part.shape[1] ** 0.5 for name, part in numbers.items()}
    tensors["embed_tokens.weight"] *= 4
    if (size := card["draft_vocab_size"]) != VOCAB_SIZE:
        chosen = torch.randperm(VOCAB_SIZE, generator=made)[:size].sort().values
        tensors["d2t"] = chosen - torch.arange(size)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def write_head(folder: Path, card: dict[str, Any], tensors: Tensors) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(card))
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle3_log_chances(
    card: dict[str, Any], tensors: Tensors, text: list[int], states: Tensor, chain: list[int]
) -> Tensor:
    """Log-probabilities after a chain behind a text's tokens; `states` `[tokens, 3, SIZE]` are of those before them."""
    before = states.flatten(1)
    if card.get("norm_before_fc"):
        before = _normed(before, tensors["input_norm.weight"])
    if card.get("fc_norm"):
        parts = [_normed(states[:, number], tensors[f"fc_norm.{number}.weight"]) for number in range(3)]
        before = torch.cat(parts, dim=-1)
    before = before @ tensors["fc.weight"].T
    for end in range(len(chain) + 1):
        tokens = text + chain[:end]
        hidden = before
        for layer, window in _layers(card, tensors):
            beside = hidden
            if "hidden_norm" in layer:
                normed = _normed(hidden, layer["hidden_norm"])
                hidden = normed if card.get("norm_before_residual") else hidden
                embedded = tensors["embed_tokens.weight"][tokens]
                beside = torch.cat([_normed(embedded, layer["input_layernorm"]), normed], dim=-1)
            else:
                beside = _normed(hidden, layer["input_layernorm"])
            rows = torch.arange(len(tokens))
            roots = rows.clamp(max=len(text) - 1)
            sees = (rows <= rows[:, None]) & (rows > roots[:, None] - window)
            hidden = hidden + _attention(layer, beside, rows, beside, rows, sees)
            hidden = hidden + _mlp(layer, hidden)
        normed = _normed(hidden[-1:], tensors["norm.weight"])
        before = torch.cat([before, normed if card.get("norm_output") else hidden[-1:]])
    return (normed[0] @ tensors["lm_head.weight"].T).log_softmax(-1)


def dflash_log_chances(card: dict[str, Any], tensors: Tensors, newest: int, states: Tensor) -> Tensor:
    """Log-probabilities of each place of the block behind `newest`; `states` are of all tokens before it."""
    context = _normed(states.flatten(1) @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    before, size = len(states), card["block_size"]
    hidden = tensors["embed_tokens.weight"][[newest, *[card["mask_token_id"]] * (size - 1)]]
    places, rows = torch.arange(before + size), before + torch.arange(size)
    for layer, window in _layers(card, tensors):
        inputs = _normed(hidden, layer["input_layernorm"])
        sees = (places >= before - window).expand(size, -1)
        if window < math.inf and not card.get("sliding_window_non_causal"):
            sees = sees & (places <= rows[:, None])
        hidden = hidden + _attention(layer, inputs, rows, torch.cat([context, inputs]), places, sees)
        hidden = hidden + _mlp(layer, hidden)
    first = 0 if card.get("sample_from_anchor") else 1
    return (_normed(hidden[first:], tensors["norm.weight"]) @ tensors["lm_head.weight"].T).log_softmax(-1)


def _layers(card: dict[str, Any], tensors: Tensors) -> list[tuple[Tensors, float]]:
    """Each layer's tensors and its window."""
    decoder = card["transformer_layer_config"]
    kinds = decoder.get("layer_types") or ["full_attention"] * decoder["num_hidden_layers"]
    windows = [decoder["sliding_window"] if kind == "sliding_attention" else math.inf for kind in kinds]
    parts = [
        {_short(name): part for name, part in tensors.items() if name.startswith(f"layers.{number}.")}
        for number in range(len(kinds))
    ]
    return list(zip(parts, windows, strict=True))


def _short(name: str) -> str:
    """A tensor's name within its layer."""
    return name.split(".", 2)[2].removesuffix(".weight")


def _normed(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _mlp(layer: Tensors, hidden: Tensor) -> Tensor:
    inputs = _normed(hidden, layer["post_attention_layernorm"])
    gate, up = inputs @ layer["mlp.gate_proj"].T, inputs @ layer["mlp.up_proj"].T
    return (gate * gate.sigmoid() * up) @ layer["mlp.down_proj"].T


def _attention(layer: Tensors, asks: Tensor, rows: Tensor, told: Tensor, places: Tensor, sees: Tensor) -> Tensor:
    """What rows at positions `rows` get of entries at `places`, of which each sees some."""
    found = []
    for head in range(HEADS):
        shared = head // (HEADS // SHARED)
        query = _turned(layer, "q", asks @ _of_head(layer, "q", head).T, rows)
        keys = _turned(layer, "k", told @ _of_head(layer, "k", shared).T, places)
        scores = (query @ keys.T / DIM**0.5).masked_fill(~sees, -math.inf)
        found.append(scores.softmax(-1) @ (told @ _of_head(layer, "v", shared).T))
    return torch.cat(found, dim=-1) @ layer["self_attn.o_proj"].T


def _of_head(layer: Tensors, part: str, head: int) -> Tensor:
    return layer[f"self_attn.{part}_proj"][head * DIM : (head + 1) * DIM]


def _turned(layer: Tensors, part: str, vectors: Tensor, places: Tensor) -> Tensor:
    """Vectors `[tokens, DIM]`, normed if the layer has a norm for them, as complex numbers turned by their places."""
    if f"self_attn.{part}_norm" in layer:
        vectors = _normed(vectors, layer[f"self_attn.{part}_norm"])
    half = DIM // 2
    speeds = THETA ** (-torch.arange(half) / half)
    angles = places[:, None] * speeds
    turned = torch.complex(vectors[:, :half], vectors[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)
