"""The drafter: what it reads, that it keeps no guess, its folder, and what it learns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import load_stage
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.embedding import Embedding
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.drafter import (
    Drafter,
    DrafterInfo,
    DrafterNetwork,
    describe_drafter,
    load_drafter,
    rotary_table,
    save_drafter,
)

ModelFolder = Callable[..., Path]
TOKENS = tuple(range(0, 300, 3))
TEXT = [5, 17, 200, 31, 8, 99, 120, 45, 3]


def states(tokens: int) -> Tensor:
    """States after the last layer."""
    return torch.randn(tokens, 1, 32, generator=torch.Generator().manual_seed(0))


def random_network() -> DrafterNetwork:
    """A network whose layer does something."""
    torch.manual_seed(1)
    network = DrafterNetwork(32)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network


@torch.no_grad()
def at_once(network: DrafterNetwork, model: PreTrainedModel, text: list[int], chain: list[int]) -> Tensor:
    """Logits after a chain: each state by a pass over all inputs, with sums written out and without kept entries."""
    embed, before = Embedding(model), states(len(text))[:, 0]
    inputs = network.inputs(embed(text)[0], before)
    for token in (*chain, None):
        rotary = rotary_table(len(inputs), torch.device("cpu"))
        query, key, value = network.attended(inputs, rotary)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        state = network.states(inputs, scores.softmax(-1) @ value)[-1:]
        if token is not None:
            inputs = torch.cat([inputs, network.inputs(embed([token])[0], state)])
    return FinalHead(model)(state[None])[0, 0, list(TOKENS)]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3", "phi3"])
def test_chains_behind_certain_tokens(model_folder: ModelFolder, family: str) -> None:
    model = load_stage(model_folder(family, num_layers=4)).model
    drafter = Drafter(random_network(), model, TOKENS, few_bits=False)
    drafter.begin(20)
    of_text = states(len(TEXT))
    chains = [[], [7], [7, 9], [7, 30], [8, 30, 2], [8]]
    for first, last in ((0, 5), (5, 6), (6, 9)):
        drafter.follow(TEXT[first:last], of_text[first:last])
        found = drafter.draft(chains)
        assert found.shape == (len(chains), len(TOKENS))
        for chain, ours in zip(chains, found, strict=True):
            expected = at_once(random_network(), model, TEXT[:last], chain)
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_native_passes_draft_the_same(model_folder: ModelFolder, family: str) -> None:
    """Up to the rounding of states to 8 bits. Gemma 2 caps its logits, which the native code does not."""
    model, found = load_stage(model_folder(family, num_layers=4)).model, []
    chains = [[], [7], [7, 9, 1], [7, 30], [8, 30, 2], [8]]
    for native in (True, False):
        drafter = Drafter(random_network(), model, TOKENS)
        drafter.begin(40)
        assert drafter._native is not None
        drafter._native = drafter._native if native else None
        of_text = states(len(TEXT))
        for first, last in ((0, 5), (5, 6), (6, 9)):
            drafter.follow(TEXT[first:last], of_text[first:last])
            found.append(drafter.draft(chains))
            found.append(drafter.draft([[5, 4, 3]]))
    size = max(float(logits.abs().max()) for logits in found)
    for ours, expected in zip(found[:6], found[6:], strict=True):
        torch.testing.assert_close(
            ours, expected, rtol=0, atol=0.03 * size, msg="a rounding of states to 8 bits may differ"
        )


@pytest.mark.parametrize("size", [24, 48, 80])
def test_odd_sizes_take_pytorchs_passes(model_folder: ModelFolder, size: int) -> None:
    model = load_stage(model_folder("llama", num_layers=2, hidden_size=size)).model
    drafter = Drafter(DrafterNetwork(size), model, TOKENS)
    assert drafter._native is None
    drafter.begin(10)
    drafter.follow(TEXT[:3], torch.randn(3, 1, size))
    assert drafter.draft([[1, 2], [3]]).isfinite().all()


@pytest.mark.parametrize("native", [True, False])
def test_states_that_are_no_numbers(model_folder: ModelFolder, native: bool) -> None:
    drafter = Drafter(random_network(), load_stage(model_folder("llama", num_layers=2)).model, TOKENS, native)
    drafter.begin(10)
    drafter.follow(TEXT[:2], torch.full((2, 1, 32), torch.nan))
    assert drafter.draft([[1, 2]]).isnan().all()


def test_guesses_that_fill_the_memory_are_forgotten(model_folder: ModelFolder) -> None:
    model = load_stage(model_folder("llama", num_layers=2)).model
    drafter = Drafter(random_network(), model, TOKENS)
    drafter.begin(6)
    drafter.follow(TEXT[:2], states(2))
    first = drafter.draft([[1, 2]])
    drafter.draft([[3, 4]])
    drafter.draft([[5, 6]])
    torch.testing.assert_close(drafter.draft([[1, 2]]), first)


def test_guesses_leave_no_trace(model_folder: ModelFolder) -> None:
    model, found = load_stage(model_folder("llama", num_layers=4)).model, []
    for guesses in ([], [[3, 4, 5], [6]]):
        drafter = Drafter(random_network(), model, TOKENS)
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
        "tokens": TOKENS,
    }
    return save_drafter(folder, random_network(), DrafterInfo(**{**known, **changes}), {})


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_saved_drafter_drafts_the_same(model_folder: ModelFolder, tmp_path: Path, weights: str | None) -> None:
    model = model_folder("llama", num_layers=4, hidden_size=32)
    written = saved(tmp_path / "drafter", model)
    info = describe(str(model), weights)
    found = describe_drafter(tmp_path / "drafter", info)
    assert found == written
    drafters = [Drafter(random_network(), load_stage(model).model, TOKENS, few_bits=False)]
    drafters.append(load_drafter(found, load_layers(info, 4, torch.float32, "cpu")))
    drafts = []
    for drafter in drafters:
        drafter.begin(20)
        drafter.follow(TEXT, states(len(TEXT)))
        drafts.append(drafter.draft([[7, 9]]))
    assert torch.allclose(*drafts, atol=0.1 * float(drafts[0].abs().max())), "up to 8 bits a number"


def test_another_models_drafter_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    saved(tmp_path / "drafter", model_folder("llama", num_layers=4))
    with pytest.raises(ValueError, match=r"drafter='.*' was trained for .*, not for model"):
        describe_drafter(tmp_path / "drafter", describe(str(model_folder("llama", num_layers=4, seed=1))))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", [1, 1], "tokens are no numbers in rising order"),
        ("tokens", [1, 300], "tokens are none of the 300 of the vocabulary"),
        ("tokens", [], "tokens are none of the 300 of the vocabulary"),
        ("tokens", ["x"], "tokens are no numbers in rising order"),
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_bytes_are_what_it_holds(model_folder: ModelFolder, tmp_path: Path, device: str) -> None:
    """On a GPU as on a CPU without few bits."""
    model = model_folder("llama", num_layers=4)
    known = saved(tmp_path / "drafter", model)
    drafter = Drafter(random_network(), load_stage(model).model, TOKENS, few_bits=device == "cpu")
    held = [*drafter._network.parameters(), *drafter._head.module.parameters()]
    assert known.num_bytes(device) == sum(tensor.nbytes for tensor in held)
    drafter.begin(10)
    assert 10 * known.entry_bytes == drafter._entries.nbytes
