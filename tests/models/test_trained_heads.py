"""Trained heads as networks and folders: they begin as the shared head, and go with one model and layer only."""

import json
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grids import pairs_first
from heads_for_tests import make_head, shake
from models_for_tests import load_stage
from safetensors.torch import load_file, save_file

from ppd_runtime import PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.trained.exit_heads import ModelHead, TrainedHead
from ppd_runtime.models.trained.heads import AFFINE, GATED, KINDS, LM_HEAD, HeadInfo, describe_head, load_head, new_head
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.workers.worker import Worker

ModelFolder = Callable[..., Path]
HISTORY = [40, 7, 291, 12]


def states(dtype: str = "float32", tokens: int = 5) -> torch.Tensor:
    """Hidden states of some tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, tokens, 32, generator=generator).to(getattr(torch, dtype))


@pytest.mark.parametrize(
    ("kind", "family", "dtype"), pairs_first(KINDS, ["llama", "gemma2", "qwen3"], ["float32", "bfloat16"])
)
def test_a_new_head_is_the_shared_head(model_folder: ModelFolder, kind: str, family: str, dtype: str) -> None:
    stage = load_stage(model_folder(family), dtype)
    head = new_head(kind, stage.model).to(stage.model.dtype)
    if kind == GATED:  # it scales states before the final norm does
        torch.testing.assert_close(head(states(dtype)), stage.head(states(dtype)), rtol=0.02, atol=0.02)
        return
    assert torch.equal(head(states(dtype)), stage.head(states(dtype)))
    assert torch.equal(head(states(dtype)[:, -1:])[0, -1].float(), stage.logits(states(dtype)))


@pytest.mark.parametrize("tied", [True, False])
def test_the_models_own_head_stays_as_it_is(model_folder: ModelFolder, tied: bool) -> None:
    stage = load_stage(model_folder("llama", tied=tied))
    before = {name: tensor.clone() for name, tensor in stage.model.state_dict().items()}
    shared = stage.logits(states())
    for kind in KINDS:
        head = new_head(kind, stage.model)
        shake(head)
        assert not torch.equal(head(states())[0, -1], shared)
    assert torch.equal(stage.logits(states()), shared)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stage.model.state_dict().items())


def test_what_is_trained_is_the_head_alone(model_folder: ModelFolder) -> None:
    model = load_stage(model_folder("llama")).model
    sizes = {kind: {name: p.numel() for name, p in new_head(kind, model).named_parameters()} for kind in KINDS}
    step = {"step.weight": 32 * 32, "step.bias": 32}
    gated = {"gate_up.weight": 2 * 24 * 32, "down.weight": 32 * 24}
    assert sizes == {LM_HEAD: {"lm_head.weight": 300 * 32}, AFFINE: step, GATED: step | gated}


def test_formulas(model_folder: ModelFolder) -> None:
    model = load_stage(model_folder("llama")).model
    lm_head, affine, gated = (new_head(kind, model) for kind in KINDS)
    for head in (lm_head, affine, gated):
        shake(head)
    hidden = states()
    assert torch.equal(lm_head(hidden), model.model.norm(hidden) @ lm_head.lm_head.weight.T)
    moved = hidden + hidden @ affine.step.weight.T + affine.step.bias
    assert torch.allclose(affine(hidden), model.lm_head(model.model.norm(moved)), atol=1e-5)
    unit = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    mapped = unit + unit @ gated.step.weight.T + gated.step.bias
    gate, up = (mapped / mapped.square().mean(-1, keepdim=True).sqrt() @ gated.gate_up.weight.T).split(24, dim=-1)
    moved = mapped + (gate * gate.sigmoid() * up) @ gated.down.weight.T
    assert torch.allclose(gated(hidden), model.lm_head(model.model.norm(moved)), atol=1e-4)


def test_soft_caps_hold_for_trained_heads_too(model_folder: ModelFolder) -> None:
    model = load_stage(model_folder("gemma2")).model
    head = new_head(LM_HEAD, model)
    with torch.no_grad():
        head.lm_head.weight.mul_(1000)
    cap = model.config.final_logit_softcapping
    assert head(states()).abs().max() <= cap
    assert head(states()).abs().max() > 0.99 * cap


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded(model_folder: ModelFolder, tmp_path: Path, kind: str, dtype: str) -> None:
    folder = model_folder("gemma2")
    saved = make_head(tmp_path / "head", folder, kind, 3)
    known = describe_head(str(tmp_path / "head"), describe(str(folder)))
    assert known == saved
    assert (known.kind, known.exit_layer, known.hidden_size, known.vocab_size) == (kind, 3, 32, 300)
    card = json.loads((tmp_path / "head" / "exit_head.json").read_text())
    assert (card["model"], card["model_fingerprint"]) == (str(folder), model_fingerprint(describe(str(folder))))
    whole, sub = load_stage(folder), load_stage(folder, dtype, last=1)
    expected = new_head(kind, whole.model)
    shake(expected)
    HeadInfo.round_as_stored(expected)
    loaded = load_head(known, sub.model)
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(loaded.state_dict()[name], parameter.to(sub.model.dtype))
    assert torch.allclose(loaded(states(dtype)).float(), expected(states()), atol=0 if dtype == "float32" else 0.5)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.7, top_p=0.8, seed=4)],
    ids=["greedy", "sampled", "top-p"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_ranked_as_the_shared_heads(
    model_folder: ModelFolder, kind: str, sampling: SamplingParams
) -> None:
    stage, sampler = load_stage(model_folder("llama")), Sampler(sampling)
    head = new_head(kind, stage.model)
    trained, shared = TrainedHead(head, sampler), ModelHead(stage, sampler)
    assert trained.candidates(states(), HISTORY, 5) == shared.candidates(states(), HISTORY, 5)
    shake(head)
    with torch.inference_mode():
        logits = head(states())[0, -1]
    assert trained.candidates(states(), HISTORY, 5) == sampler.rank(logits, HISTORY, 5)
    assert trained.candidates(states(), HISTORY, 9) != shared.candidates(states(), HISTORY, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_sub_processes_ask_the_trained_head(model_folder: ModelFolder, tmp_path: Path, kind: str) -> None:
    folder, sampler = model_folder("llama"), Sampler(SamplingParams(temperature=1.0, seed=3))
    head = make_head(tmp_path / "head", folder, kind, 3)
    runtime = PPDRuntime(str(folder), k=2, exit_head=head.folder, transport="local")
    assert runtime.exit_layer == 3
    main, sub, _ = map(Worker, runtime._specs)
    expected = TrainedHead(load_head(head, load_stage(folder).model), sampler)
    named = sub._exit_head(sampler).candidates(states(), HISTORY, 9)
    assert named == expected.candidates(states(), HISTORY, 9)
    assert named != ModelHead(sub.stage, sampler).candidates(states(), HISTORY, 9)
    assert main._trained_head is None


def test_a_head_for_another_model_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    made = make_head(tmp_path / "head", model_folder("llama"), AFFINE, 2)
    other = str(model_folder("llama", seed=1))
    with pytest.raises(
        ValueError, match=r"was trained for layer 2 of model .*, not for model .*train exit-head"
    ) as caught:
        describe_head(made.folder, describe(other))
    assert str(made.folder) in str(caught.value)
    assert other in str(caught.value)
    retrained = replace(describe(other), name=made.model)
    with pytest.raises(ValueError, match=r"not for these weights"):
        describe_head(made.folder, retrained)


def test_a_head_for_another_layer_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    made = make_head(tmp_path / "head", model_folder("llama"), AFFINE, 2)
    made.check_layers([2])
    with pytest.raises(ValueError, match=r"was trained for layer 2 .*, not for layers 1, 3: choose layer 2 alone"):
        made.check_layers([1, 2, 3])


def damage_card(folder: Path, **changes: object) -> None:
    card = folder / "exit_head.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | changes))


def swap_weights(folder: Path) -> None:
    tensors = load_file(folder / "exit_head.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "exit_head.safetensors")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shutil.rmtree, "holds no exit_head.json; give 'shared' or a folder"),
        (lambda folder: (folder / "exit_head.json").write_text("{"), "cannot be read .*train it again"),
        (lambda folder: (folder / "exit_head.json").write_text("[]"), "cannot be read .*train it again"),
        (lambda folder: (folder / "exit_head.json").write_text("[" * 100_000), "cannot be read .*train it again"),
        (lambda folder: (folder / "exit_head.json").write_text('{"format": 1}'), "cannot be read .*'model'"),
        (lambda folder: damage_card(folder, format=9), "format 9 .*unknown to this version"),
        (lambda folder: damage_card(folder, kind="odd"), "kind 'odd'"),
        (lambda folder: (folder / "exit_head.safetensors").unlink(), "cannot be read .*train it again"),
        (swap_weights, "exit_head.safetensors is not what exit_head.json describes"),
    ],
)
def test_broken_folders_are_refused(
    model_folder: ModelFolder, tmp_path: Path, damage: Callable[[Path], object], named: str
) -> None:
    made = make_head(tmp_path / "head", model_folder("llama"), AFFINE, 2)
    damage(made.folder)
    with pytest.raises(ValueError, match=f"exit_head='{made.folder}'.*{named}"):
        describe_head(made.folder, describe(str(model_folder("llama"))))


def test_the_fingerprint_changes_with_every_tensor(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama", hidden_size=128), tmp_path / "model")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    assert max(tensor.nbytes for tensor in tensors.values()) > 30 * 4096  # so some are sampled
    found = {model_fingerprint(describe(str(folder)))}
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor * 1.001}, weights, metadata={"format": "pt"})
        found.add(model_fingerprint(describe(str(folder))))
    assert len(found) == len(tensors) + 1


def test_the_fingerprint_is_the_same_however_the_model_is_stored(model_folder: ModelFolder, tmp_path: Path) -> None:
    single, sharded = model_folder("llama"), model_folder("llama", max_shard_size="40KB")
    copied = shutil.copytree(single, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    prints = {model_fingerprint(describe(str(folder))) for folder in (single, sharded, copied)}
    assert len(prints) == 1
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert model_fingerprint(describe(str(copied))) not in prints


def test_a_cut_file_has_no_fingerprint(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for length in (4, 100, len(content) - 1):
        weights.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
            model_fingerprint(describe(str(folder)))


def test_the_fingerprint_of_26_gigabytes_is_quick(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A file with holes instead of numbers, in the shape of Llama-2-13B in bfloat16."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    info, size = describe(str(folder)), 70 * 2**20
    header = {
        f"tensor{i}": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(363)
    }
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + 363 * size)
    assert (folder / "model.safetensors").stat().st_size > 26e9
    began = time.process_time()
    model_fingerprint(info)
    assert time.process_time() - began < 2
