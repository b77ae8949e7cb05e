"""Published heads: chances as plain formulas and the package `speculators` give them, and one line for what is none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import load_stage
from published_heads import (
    BLOCK,
    IDS,
    Tensors,
    card_of,
    dflash_log_chances,
    eagle3_log_chances,
    tensors_of,
    write_head,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.trained.published import describe_published, load_published

ModelFolder = Callable[..., Path]
TEXT = [17, 200, 31, 8, 99, 120, 45, 3, 250, 66, 71, 5]
"""A text from its second token on."""
CHAINS = [[], [7], [7, 9], [7, 30, 4], [8, 30], [8]]
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
EAGLE3 = [
    {},
    {"norm_before_residual": True, "norm_before_fc": True},
    {"fc_norm": True, "norm_output": True, "layers": SLIDING},
    {"layers": {"model_type": "qwen3", "num_hidden_layers": 2}, "norm_output": True},
    {"layers": {"model_type": "qwen3", "num_hidden_layers": 2, **MIXED}, "draft_vocab_size": 300},
]
DFLASH = [
    {},
    {"sample_from_anchor": True, "draft_vocab_size": 300},
    {"layers": MIXED},
    {"layers": MIXED, "sliding_window_non_causal": True},
]


def states() -> Tensor:
    """States of the token before each of the text's, after three layers."""
    return torch.randn(len(TEXT), 3, 32, generator=torch.Generator().manual_seed(0))


def made(folder: Path, kind: str, model: Path, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    card = card_of(kind, model, **changes)
    tensors = tensors_of(card)
    write_head(folder, card, tensors)
    return card, tensors


def drafter_of(folder: Path, model: Path, weights: str | None = None) -> Any:
    info = describe(str(model), weights)
    head = describe_published(folder, info)
    assert head.layers == (1, 3, 6)
    return load_published(head, load_layers(info, info.num_layers, torch.float32, "cpu"))


@pytest.fixture
def target(model_folder: ModelFolder) -> Path:
    return model_folder("llama", num_layers=8)


@pytest.mark.parametrize("changes", EAGLE3)
def test_eagle3_by_plain_formulas(target: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    card, tensors = made(tmp_path, "eagle3", target, **changes)
    drafter = drafter_of(tmp_path, target)
    if card["draft_vocab_size"] < 300:
        assert torch.equal(tensors["t2d"].nonzero().flatten(), torch.tensor(drafter.tokens))
    drafter.begin(20)
    for first, last in ((0, 7), (7, 8), (8, 12)):
        drafter.follow(TEXT[first:last], states()[first:last])
        for chains in (CHAINS[:2], CHAINS):  # a guess that ran does not run again
            found = drafter.draft(chains)
        for chain, ours in zip(CHAINS, found, strict=True):
            expected = eagle3_log_chances(card, tensors, TEXT[:last], states()[:last], chain)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_long_text_is_followed_in_pieces(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "eagle3", target, layers=SLIDING)
    found = []
    for at_once in (512, 5):
        monkeypatch.setattr("ppd_runtime.models.trained.eagle3._AT_ONCE", at_once)
        drafter = drafter_of(tmp_path, target)
        drafter.follow(TEXT, states())
        found.append(drafter.draft(CHAINS))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", DFLASH)
def test_dflash_by_plain_formulas(target: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    card, tensors = made(tmp_path, "dflash", target, **changes)
    whole = load_stage(target).model
    tensors["embed_tokens.weight"] = whole.model.embed_tokens.weight  # the model's, whatever the file has
    if card["draft_vocab_size"] == 300:
        tensors["lm_head.weight"] = whole.lm_head.weight
    drafter = drafter_of(tmp_path, target)
    drafter.begin(20)
    for first, last in ((0, 7), (7, 8), (8, 12)):
        drafter.follow(TEXT[first:last], states()[first:last])
        expected = dflash_log_chances(card, tensors, TEXT[last - 1], states()[:last])
        assert len(expected) == (BLOCK if card.get("sample_from_anchor") else BLOCK - 1)
        for length, expects in enumerate(expected):
            torch.testing.assert_close(drafter.draft([[9] * length])[0], expects, rtol=1e-4, atol=1e-4)
        unknown = drafter.draft([[9] * BLOCK])
        torch.testing.assert_close(unknown.exp(), torch.full_like(unknown, 1 / len(drafter.tokens)))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_the_models_embedding_and_head(model_folder: ModelFolder, tmp_path: Path, kind: str, family: str) -> None:
    model = model_folder(family, num_layers=8)
    card, tensors = made(tmp_path, kind, model)
    whole = load_stage(model).model
    tensors["embed_tokens.weight"] = whole.model.embed_tokens.weight.detach()  # as it is stored, without a scale
    tensors["lm_head.weight"] = whole.lm_head.weight.detach()[tensors["t2d"]]
    given = {
        name: part.clone() for name, part in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    save_file(given, tmp_path / "model.safetensors")
    drafter = drafter_of(tmp_path, model)
    drafter.follow(TEXT, states())
    if kind == "eagle3":
        expected = eagle3_log_chances(card, tensors, TEXT, states(), [7])
    else:
        expected = dflash_log_chances(card, tensors, TEXT[-1], states())[1]
    torch.testing.assert_close(drafter.draft([[7]])[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("weights", ["int8", None])
def test_dtypes_of_the_model(model_folder: ModelFolder, tmp_path: Path, kind: str, weights: str | None) -> None:
    model = model_folder("llama", num_layers=8, dtype="float32" if weights else "bfloat16")
    _, tensors = made(tmp_path, kind, model, draft_vocab_size=300)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    info = describe(str(model), weights)
    dtype = torch.float32 if weights else torch.bfloat16
    head = describe_published(tmp_path, info)
    plain = load_published(head, load_layers(replace(info, weights=None), 8, torch.float32, "cpu"))
    drafter = load_published(head, load_layers(info, 8, dtype, "cpu"))
    found = []
    for one in (plain, drafter):
        one.follow(TEXT, states().to(dtype))
        found.append(one.draft([[7]]))
    assert found[1].dtype == torch.float32
    assert (found[0].exp() - found[1].exp()).abs().max() < 0.1


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_guesses_leave_no_trace_behind_the_next_token(target: Path, tmp_path: Path, kind: str) -> None:
    made(tmp_path, kind, target)
    drafter, found = drafter_of(tmp_path, target), []
    for guesses in ([], [[3, 4, 5], [6]]):
        drafter.begin(20)
        for place, token in enumerate(TEXT):
            drafter.follow([token], states()[place : place + 1])
            if guesses and token != TEXT[-1]:
                drafter.draft(guesses)
        found.append(drafter.draft([[1, 2]]))
    assert torch.equal(*found)


@pytest.mark.parametrize("changes", EAGLE3)
def test_eagle3_by_the_package(target: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    pytest.importorskip("speculators", reason="the package speculators is not installed")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    made(tmp_path, "eagle3", target, **changes)
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    reference = Eagle3DraftModel.from_pretrained(tmp_path, config=config).eval()
    steps: list[Tensor] = []
    reference.lm_head.register_forward_hook(lambda *told: steps.append(told[2][0].log_softmax(-1)))
    with torch.no_grad():
        ids = torch.tensor([TEXT])
        reference(states().flatten(1)[None], ids, torch.zeros_like(ids), ttt_steps=4)
    drafter = drafter_of(tmp_path, target)
    for place in range(len(TEXT) - 3):
        drafter.follow([TEXT[place]], states()[place : place + 1])
        found = drafter.draft([TEXT[place + 1 : place + 1 + step] for step in range(4)])
        expected = torch.stack([logits[place] for logits in steps])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", DFLASH)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_dflash_by_the_package(model_folder: ModelFolder, tmp_path: Path, changes: dict[str, Any], family: str) -> None:
    pytest.importorskip("speculators", reason="the package speculators is not installed")
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    model = model_folder(family, num_layers=8)
    card, _ = made(tmp_path, "dflash", model, **changes)
    config = DFlashSpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    reference = DFlashDraftModel.from_pretrained(tmp_path, config=config).eval()
    text, of_text = torch.tensor([[2, *TEXT]]), torch.cat([states(), torch.zeros(1, 3, 32)])
    with torch.no_grad():
        _, logits, _, _, places = reference._backbone_forward(
            of_text.flatten(1)[None], text, torch.ones_like(text), torch.zeros(1, 13, 32), text * 0, max_anchors=8
        )
    blocks = logits[0].log_softmax(-1).unflatten(0, (-1, BLOCK))
    expected = dict(zip(places.view(-1, BLOCK)[:, 0].tolist(), blocks, strict=True))
    drafter = drafter_of(tmp_path, model)
    first = 0 if card.get("sample_from_anchor") else 1
    for place in range(1, len(TEXT) - BLOCK):
        drafter.follow([TEXT[place - 1]], states()[place - 1 : place])
        found = drafter.draft([[9] * length for length in range(BLOCK - first)])
        torch.testing.assert_close(found, expected[place][first:], rtol=1e-4, atol=1e-4)


def test_layers_that_a_card_leaves_to_the_default(target: Path, tmp_path: Path) -> None:
    made(tmp_path, "eagle3", target, **{IDS["eagle3"]: None})
    assert describe_published(tmp_path, describe(str(target))).layers == (2, 4, 5)


CARDS = [
    ({"speculators_model_type": "mtp"}, "speculators_model_type='mtp'; give a head of eagle3 or dflash"),
    ({"tree_width": 3}, "tree_width=3, which is not understood"),
    ({"norm_output": "yes"}, "norm_output='yes', which is not understood"),
    ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
    ({"target_hidden_size": 64}, "has target_hidden_size=64, the model 32; give a head for this model"),
    ({"draft_vocab_size": 301}, "draft_vocab_size=301, not 1 to 300"),
    ({"draft_vocab_size": 99}, "d2t and t2d do not map 99 tokens into 300"),
    ({"draft_vocab_size": 300}, r"lm_head.weight as F32 \[100, 32\], not as floats \[300, 32\]"),
    ({IDS["eagle3"]: [1, 3, 9]}, r"=\[1, 3, 9\], no rising numbers of the model's 8 layers"),
    ({IDS["eagle3"]: [3, 1, 6]}, r"=\[3, 1, 6\], no rising numbers"),
    ({IDS["eagle3"]: [1, 3]}, r"fc.weight as F32 \[32, 96\], not as floats \[32, 64\]"),
    ({IDS["eagle3"]: 3}, "cannot be read .TypeError"),
    ({"norm_before_fc": True}, "its files lack input_norm.weight"),
    ({"speculators_config": None}, "cannot be read .TypeError"),
    ({"layers": {"hidden_size": 64}}, "has hidden_size=64, the model 32"),
    ({"layers": {"vocab_size": 400}}, "a vocabulary of 400 tokens, the model's has 300"),
    ({"layers": {"model_type": "gpt2"}}, "model_type='gpt2'; give a head with layers of llama or qwen3"),
    ({"layers": {"alibi": True}}, "transformer_layer_config has alibi=True, which is not understood"),
    ({"layers": {"hidden_size": "x"}}, "transformer_layer_config cannot be used: "),
    ({"layers": {"num_hidden_layers": 10**9}}, "num_hidden_layers=1000000000, for 16 tensors"),
    ({"layers": {"num_hidden_layers": 2}}, "its files lack layers.1"),
    ({"layers": {"layer_types": ["chunked_attention"]}}, "layer_types=.'chunked_attention'., which is not understood"),
    ({"layers": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "rope_type='dynamic', which is not"),
    ({"layers": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5, which is not understood"),
]


@pytest.mark.parametrize(("changes", "message"), CARDS)
def test_cards_that_are_refused(target: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_head(tmp_path, card_of("eagle3", target, **changes), tensors_of(card_of("eagle3", target)))
    refused(tmp_path, describe(str(target)), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id=None, which is not understood"),
        ({"mask_token_id": 300}, "mask_token_id=300, not 0 to 299"),
        ({"block_size": 1}, "block_size=1, not 2 to 1024"),
        ({"layers": {"model_type": "llama"}}, "model_type='llama'; give a head with layers of qwen3"),
    ],
)
def test_cards_of_dflash_that_are_refused(target: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    made(tmp_path, "dflash", target)
    write_head(tmp_path, card_of("dflash", target, **changes), tensors_of(card_of("dflash", target)))
    refused(tmp_path, describe(str(target)), message)


def test_heads_for_other_models(model_folder: ModelFolder, target: Path, tmp_path: Path) -> None:
    made(tmp_path, "eagle3", target)
    info = describe(str(target))
    refused(
        tmp_path, describe(str(model_folder("qwen3", num_layers=8))), "a LlamaForCausalLM, not for a Qwen3ForCausalLM"
    )
    refused(tmp_path, replace(info, name="some/other@0123"), "was made for '.*', not for 'some/other@0123'")
    assert describe_published(tmp_path, replace(info, name=f"some/{target.name.upper()}@0123"))


def test_files_that_are_refused(target: Path, tmp_path: Path) -> None:
    made(tmp_path, "eagle3", target)
    file, info = tmp_path / "model.safetensors", describe(str(target))
    tensors = load_file(file)
    for changed, message in (
        ({"d2t": tensors["d2t"] + 300}, "d2t and t2d do not map 100 tokens into 300"),
        ({"d2t": tensors["d2t"] * 0}, "d2t and t2d do not map 100 tokens into 300"),
        ({"fc.weight": tensors["fc.weight"].to(torch.int8)}, "fc.weight as I8"),
        ({"midlayer.weight": torch.zeros(1)}, "its files have midlayer.weight, which is not understood"),
    ):
        save_file(tensors | changed, file)
        refused(tmp_path, info, message)
    save_file({name: part for name, part in tensors.items() if name != "d2t"}, file)
    refused(tmp_path, info, "cannot be read .KeyError: 'd2t'")
    file.write_bytes(b"x")
    refused(tmp_path, info, "cannot be read .SafetensorError")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, info, "config.json cannot be read")
    refused(target, info, "speculators_model_type=None; give a head of eagle3 or dflash in the format of speculators")
    with pytest.raises(ValueError, match="no such folder"):
        describe_published(tmp_path / "none", info)


def refused(folder: Path, info: ModelInfo, message: str) -> None:
    with pytest.raises(ValueError, match=f"^drafter='.*{message}") as told:
        describe_published(folder, info)
    assert "; " in str(told.value)
    assert "\n" not in str(told.value)
