"""A model's own layer for multi-token prediction: read from its files, checked against plain formulas, and run."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import build_tokenizer, load_stage, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.trained.mtp import MtpDrafter, describe_mtp, load_mtp
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts

LAYERS, SIZE = 3, 32
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"n_group": 1, "topk_group": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "deepseek_v3": {**EXPERTS, **LATENT, "first_k_dense_replace": 1},
    "glm4_moe": {**EXPERTS, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**EXPERTS, **LATENT},
}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
KINDS = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
EXPERTS_OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS_OF_QWEN |= {"shared_expert_intermediate_size": 16}
HYBRIDS = {"qwen3_5_text": DELTA, **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), DELTA | EXPERTS_OF_QWEN)}
"""Their files have the layer apart from the others, and their norms multiply by one more than their weights."""
APART = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
TEXT = [17, 200, 31, 8, 99, 120, 45, 3, 250, 66, 71, 5]
"""A text from its second token on."""
CHAINS = [[], [7], [7, 9], [7, 30, 4], [8, 30], [8]]
Made = tuple[Path, Any, dict[str, Tensor]]


@pytest.fixture(scope="module", params=[*FAMILIES, *HYBRIDS])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model's folder, the library's model with a layer more, the MTP layer's block, and the layer's own tensors."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    behind, is_apart = f"model.layers.{LAYERS}.", family in HYBRIDS
    for name, depth in (("longer", LAYERS + 1), ("model", LAYERS)):
        settings = HYBRIDS[family] | {"layer_types": KINDS[:depth]} if is_apart else FAMILIES[family]
        save_model(folder / name, family, num_layers=depth, **settings)
    longer = load_file(folder / "longer" / "model.safetensors")
    block = {name: tensor for name, tensor in longer.items() if name.startswith(behind)}
    rng = torch.Generator().manual_seed(0)
    own = {
        f"{name}.weight": 1 + torch.randn(SIZE, generator=rng) / 4 for name in ("enorm", "hnorm", "shared_head.norm")
    }
    own["eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE, generator=rng) / 8
    tensors = load_file(folder / "model" / "model.safetensors")
    if is_apart:
        tensors |= {f"mtp.layers.0.{name.removeprefix(behind)}": tensor for name, tensor in block.items()}
        tensors |= {f"mtp.{APART[name.removesuffix('.weight')]}.weight": tensor for name, tensor in own.items()}
    else:
        tensors |= block | {f"{behind}{name}": tensor for name, tensor in own.items()}
        tensors[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    return folder / "model", AutoModelForCausalLM.from_pretrained(folder / "longer").eval(), own


@torch.inference_mode()
def expected_logits(made: Made, tokens: list[int], states: Tensor, chain: list[int]) -> Tensor:
    """Logits behind a chain behind a text's tokens, all computed anew; `states` are of the token before each."""
    folder, longer, own = made
    model, eps = load_stage(folder).model, longer.config.rms_norm_eps
    more = 1 if longer.config.model_type in HYBRIDS else 0

    def normed(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden * (hidden.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (more + weight)

    before = normed(states, model.model.norm.weight)
    for end in range(len(chain) + 1):
        text = tokens + chain[:end]
        embedded = normed(model.model.embed_tokens.weight[text], own["enorm.weight"])
        hidden = torch.cat([embedded, normed(before, own["hnorm.weight"])], dim=-1) @ own["eh_proj.weight"].T
        size, places = len(text), 1 + torch.arange(len(text))[None]
        found = longer.model.layers[LAYERS](
            hidden[None],
            attention_mask=torch.full((size, size), -1e30).triu(1)[None, None],
            position_ids=places,
            position_embeddings=longer.model.rotary_emb(hidden[None], places),
        )
        last = normed(found[0], own["shared_head.norm.weight"])[-1:]
        before = torch.cat([before, last])
    return (last @ model.lm_head.weight.T)[0]


def test_logits_by_plain_formulas(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    info = describe(str(made[0]))
    states = torch.randn(len(TEXT), 1, SIZE, generator=torch.Generator().manual_seed(0))
    for at_once in (512, 3):
        monkeypatch.setattr("ppd_runtime.models.trained.mtp._AT_ONCE", at_once)
        model = load_layers(info, 1, torch.float32, "cpu")  # a first stage's
        drafter = load_mtp(describe_mtp(info), model, info).another()
        assert drafter.tokens == tuple(range(300))
        drafter.begin(20)
        for first, last in ((0, 7), (7, 8), (8, 12)):
            drafter.follow(TEXT[first:last], states[first:last])
            for ours, chain in zip(drafter.draft(CHAINS), CHAINS, strict=True):
                expected = expected_logits(made, TEXT[:last], states[:last, 0], chain)
                torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("settings", [{"stages": 1}, {"stages": 2}], ids=str)
def test_stages_ask_it(made: Made, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    heard: list[int] = []
    follow = MtpDrafter.follow

    def follows(drafter: MtpDrafter, tokens: Any, states: Tensor) -> None:
        heard.extend(tokens)
        follow(drafter, tokens, states)

    monkeypatch.setattr(MtpDrafter, "follow", follows)
    monkeypatch.setattr(NetworkDrafts, "is_worth", lambda self, chance: True)
    folder, place = made[0], {"dtype": "float32", "weights": settings.get("weights")}
    ordinary = OrdinaryDecoding(folder, **place)
    with PPDRuntime(folder, drafter="mtp", speculation="always", transport="local", **{**settings, **place}) as runtime:
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            heard.clear()
            asked = {"max_new_tokens": 16, "ignore_eos": True, **sampling}
            result = runtime.generate("the quick brown fox", **asked)
            assert result.token_ids == ordinary.generate("the quick brown fox", **asked).token_ids
            text = [*build_tokenizer().encode("the quick brown fox"), *result.token_ids]
            assert heard == text[1 : 1 + len(heard)]
            assert len(heard) > len(text) - 16
            prompts = ("the", "a", "I am")
            with ThreadPoolExecutor(3) as pool:
                results = list(pool.map(partial(runtime.generate, **asked), prompts))
            expected = [ordinary.generate(prompt, **asked).token_ids for prompt in prompts]
            assert [result.token_ids for result in results] == expected


def test_a_model_without_one_is_refused_in_a_line(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"^drafter='mtp': model .* has no such layer \(no model.layers.4.enorm"):
        PPDRuntime(model_folder("llama"), stages=1, drafter="mtp")


def test_a_layer_in_another_form_is_named(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.zeros(SIZE, 2 * SIZE), "mtp.layers.0.input_layernorm.weight": torch.ones(SIZE)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = r"^drafter='mtp': model .* has such a layer as mtp.fc.weight, a form that is not understood .*drafter$"
    with pytest.raises(ValueError, match=line):
        PPDRuntime(folder, stages=1, drafter="mtp")
    tensors |= {f"mtp.{name}.weight": torch.ones(SIZE) for name in APART.values() if name != "fc"}
    tensors["mtp.embed_tokens.weight"] = torch.zeros(300, SIZE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = r"^drafter='mtp': model .* has mtp.embed_tokens.weight beside such a layer, which is not understood; .*$"
    with pytest.raises(ValueError, match=line):
        PPDRuntime(folder, stages=1, drafter="mtp")
