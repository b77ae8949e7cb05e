"""The drafter: what it reads, that it keeps no guess, its folder, and what it learns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import load_stage
from torch import Tensor

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.models.trained.drafter import (
    Drafter,
    DrafterInfo,
    DrafterNetwork,
    describe_drafter,
    load_drafter,
    save_drafter,
)

ModelFolder = Callable[..., Path]
LAYERS, TOKENS = (1, 3), tuple(range(0, 300, 3))
TEXT = [5, 17, 200, 31, 8, 99, 120, 45, 3]


def states(tokens: int) -> Tensor:
    """States after two layers and the last one."""
    return torch.randn(tokens, 3, 32, generator=torch.Generator().manual_seed(0))


def network_of(folder: Path) -> DrafterNetwork:
    torch.manual_seed(1)
    return DrafterNetwork(load_stage(folder).model, LAYERS, TOKENS)


@torch.no_grad()
def by_the_library(network: DrafterNetwork, text: list[int], of_text: Tensor, chain: list[int]) -> Tensor:
    """Log-probabilities after a chain, each state by a pass of the library over all inputs, without a cache."""
    inputs = network.certain(network.embedded(text), of_text)[None]
    decoder = layer_range(network.behind, 0, 1)
    for token in (*chain, None):
        hidden = decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, -1:]
        if token is not None:
            inputs = torch.cat([inputs, network.guessed(network.embedded([token])[None], hidden)], dim=1)
    return FinalHead(network.behind)(hidden)[0, 0].log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3", "phi3"])
def test_chains_behind_certain_tokens(model_folder: ModelFolder, family: str) -> None:
    network = network_of(model_folder(family, num_layers=4))
    drafter = Drafter(network.requires_grad_(False), TOKENS)
    drafter.begin(20)
    of_text = states(len(TEXT))
    chains = [[], [7], [7, 9], [7, 30], [8, 30, 2], [8]]
    for first, last in ((0, 5), (5, 6), (6, 9)):
        drafter.follow(TEXT[first:last], of_text[first:last])
        found = drafter.draft(chains)
        assert found.shape == (len(chains), len(TOKENS))
        for chain, ours in zip(chains, found, strict=True):
            expected = by_the_library(network, TEXT[:last], of_text[:last], chain)
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_guesses_leave_no_trace(model_folder: ModelFolder) -> None:
    network = network_of(model_folder("llama", num_layers=4)).requires_grad_(False)
    found = []
    for guesses in ([], [[3, 4, 5], [6]]):
        drafter = Drafter(network, TOKENS)
        drafter.begin(20)
        for place, token in enumerate(TEXT):
            drafter.follow([token], states(len(TEXT))[place : place + 1])
            if guesses:
                drafter.draft(guesses)
        found.append(drafter.draft([[1, 2]]))
    assert torch.equal(*found)


def saved(folder: Path, model: Path, **changes: Any) -> DrafterInfo:
    info = describe(str(model))
    known = {
        "folder": folder,
        "model": info.name,
        "model_fingerprint": model_fingerprint(info),
        "exit_layer": 0,
        "hidden_size": 32,
        "vocab_size": info.vocab_size,
        "weights_sha256": "",
        "layers": LAYERS,
        "tokens": TOKENS,
    }
    return save_drafter(folder, network_of(model), DrafterInfo(**{**known, **changes}), {})


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_saved_drafter_drafts_the_same(model_folder: ModelFolder, tmp_path: Path, weights: str | None) -> None:
    model = model_folder("llama", num_layers=4, hidden_size=32)
    written = saved(tmp_path / "drafter", model)
    info = describe(str(model), weights)
    found = describe_drafter(tmp_path / "drafter", info)
    assert found == written
    drafters = [Drafter(network_of(model).requires_grad_(False), TOKENS)]
    drafters.append(load_drafter(found, load_layers(info, 4, torch.float32, "cpu")))
    drafts = []
    for drafter in drafters:
        drafter.begin(20)
        drafter.follow(TEXT, states(len(TEXT)))
        drafts.append(drafter.draft([[7, 9]]))
    assert torch.allclose(*drafts, atol=0.5 if weights else 1e-5)


def test_another_models_drafter_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    saved(tmp_path / "drafter", model_folder("llama", num_layers=4))
    with pytest.raises(ValueError, match=r"drafter='.*' was trained for .*, not for model"):
        describe_drafter(tmp_path / "drafter", describe(str(model_folder("llama", num_layers=4, seed=1))))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers", [3, 1], "layers are no numbers in rising order"),
        ("tokens", [1, 1], "tokens are no numbers in rising order"),
        ("tokens", [1, 300], "tokens are none of the 300 of the vocabulary"),
        ("tokens", [], "tokens are none of the 300 of the vocabulary"),
        ("layers", ["x"], "layers are no numbers in rising order"),
    ],
)
def test_cards_that_cannot_be(
    model_folder: ModelFolder, tmp_path: Path, name: str, value: list[Any], message: str
) -> None:
    model = model_folder("llama", num_layers=4)
    saved(tmp_path / "drafter", model)
    card = tmp_path / "drafter" / "drafter.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=message):
        describe_drafter(tmp_path / "drafter", describe(str(model)))
