"""Models of each architecture that is read, written as llama.cpp's converter does: the library's numbers and texts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families.attack import prompts
from families.specimens import MOST_POSITIONS
from gguf_files import Stored, model_parts, stored, write_gguf, write_model
from gguf_specimens import PLAIN, SPECIMENS, save_specimen
from safetensors.torch import load_file, save_file

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.gguf.architectures import ARCHITECTURES
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.native.packing import as_floats

pytestmark = pytest.mark.usefixtures("own_gguf_cache")
NEW_TOKENS = 8


def state_of(info: ModelInfo) -> dict[str, torch.Tensor]:
    return load_layers(info, info.num_layers, torch.float32, "cpu").state_dict()


def settings_of(info: ModelInfo) -> dict[str, Any]:
    """What a configuration says of the model."""
    apart = (
        "_name_or_path transformers_version dtype initializer_range bos_token_id eos_token_id pad_token_id use_cache"
    )
    return {name: value for name, value in model_config(info.folder).to_dict().items() if name not in apart.split()}


def texts(model: Path) -> list[tuple[int, ...]]:
    return generated(OrdinaryDecoding(str(model)))


def generated(decoding: Any) -> list[tuple[int, ...]]:
    asked = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [tuple(decoding.generate(prompt, **asked).token_ids) for prompt in prompts([MOST_POSITIONS - 50])]


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_file_is_the_folder_it_was_made_of(tmp_path: Path, name: str) -> None:
    """In numbers and settings; and in texts, where these two do not say all."""
    folder = save_specimen(name, tmp_path / "folder")
    file = write_model(tmp_path / "model.gguf", folder, "F32")
    ours, theirs = describe(str(file)), describe(str(folder))
    is_llama = SPECIMENS[name][0] == "mistral"  # in the file
    if not is_llama:
        assert settings_of(ours) == settings_of(theirs)
    found, expected = state_of(ours), state_of(theirs)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    if is_llama:
        assert texts(file) == texts(folder)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_halves_stay_halves(tmp_path: Path, name: str) -> None:
    """Where all that is in float32 in the file, such as routers and norms, is held by bfloat16 too."""
    folder = save_specimen(name, tmp_path / "folder")
    file = write_model(tmp_path / "model.gguf", folder, "BF16")
    info = describe(str(file))
    assert model_config(info.folder).dtype == torch.bfloat16
    found, expected = state_of(info), state_of(describe(str(folder)))
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    shutil.rmtree(folder)
    odd = save_specimen(name, folder)
    state = load_file(odd / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    state[norm] += 2**-12
    save_file(state, odd / "model.safetensors", {"format": "pt"})
    assert model_config(describe(str(write_model(file, odd, "BF16"))).folder).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, {"k": 1}) for name in ("mixtral", "gemma2")),
        *((name, {"stages": 2}) for name in ("gpt_oss", "smollm3")),
        ("granitemoe", {"stages": 1, "rows": 4}),
        ("olmoe", {"stages": 2, "rows": 4}),
    ],
)
def test_packed_files_have_their_numbers(tmp_path: Path, name: str, layout: dict[str, int]) -> None:
    """Those of experts too; a layout gives ordinary decoding's text."""
    folder = save_specimen(name, tmp_path / "folder")
    metadata, tensors = model_parts(folder, "Q8_0")
    file = write_gguf(tmp_path / "packed.gguf", metadata, tensors)
    unpacked = write_gguf(tmp_path / "floats.gguf", metadata, {key: in_floats(each) for key, each in tensors.items()})
    info = describe(str(file))
    assert info.weights == "gguf"
    found, expected = state_of(info), state_of(describe(str(unpacked)))
    for key, tensor in expected.items():
        assert torch.equal(numbers_of(found[key], name == "gpt_oss", "gate_up" in key), tensor), key
        assert (found[key].dtype == torch.uint8) == (key.endswith(PACKED)), key
    with PPDRuntime(str(file), transport="local", **layout) as runtime:
        assert generated(runtime) == texts(file)


def test_experts_alone_may_have_few_bits(tmp_path: Path) -> None:
    """As in gpt-oss' files: what is beside them is computed in float32, which holds it."""
    folder = save_specimen("gpt_oss", tmp_path / "folder")
    names = model_parts(folder, "F16")[1]
    file = write_model(
        tmp_path / "model.gguf", folder, "F16", {name: "Q4_0" for name in names if "exps.weight" in name}
    )
    info = describe(str(file))
    dtypes = {key.rpartition(".")[2]: tensor.dtype for key, tensor in state_of(info).items() if "experts" in key}
    assert {name for name, dtype in dtypes.items() if dtype == torch.uint8} == {"gate_up_proj", "down_proj"}
    with PPDRuntime(str(file), transport="local", stages=2) as runtime:
        assert generated(runtime) == texts(file)


def numbers_of(tensor: torch.Tensor, turned: bool, in_halves: bool) -> torch.Tensor:
    """A tensor's numbers in the library's order, which `turned` experts' matrices do not have."""
    if tensor.dtype != torch.uint8:
        return tensor
    if tensor.dim() == 1:
        return as_floats(tensor)
    experts = torch.stack([as_floats(each) for each in tensor])
    if not turned:
        return experts
    if in_halves:
        experts = experts.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return experts.transpose(1, 2)


PACKED = (
    "experts.gate_up_proj",
    "experts.down_proj",
    "_proj.weight",
    "lm_head.weight",
    "embed_tokens.weight",
    "input_linear.weight",
    "output_linear.weight",
)
"""Ends of names of what is packed."""


def in_floats(one: Stored) -> Stored:
    """A stored tensor's numbers in float32."""
    kind, shape, content = one
    if kind == "F32":
        return one
    rows = np.frombuffer(content, np.uint8).reshape(-1, len(content) // math.prod(shape[:-1]))
    return "F32", shape, gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).tobytes()


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "granitemoe"])
def test_joined_tensors_are_parted(tmp_path: Path, name: str) -> None:
    """Queries, keys and values in one tensor, and experts' gates and ups."""
    folder = save_specimen(name, tmp_path / "folder")
    metadata, tensors = model_parts(folder, "F32")
    joined: dict[str, Stored] = {}
    for key, one in tensors.items():
        layer, _, part = key.rpartition(".attn_")
        if part.startswith("q."):
            joined[f"{layer}.attn_qkv.{part[2:]}"] = along_rows([tensors[f"{layer}.attn_{p}{part[1:]}"] for p in "qkv"])
        elif key.endswith("ffn_gate_exps.weight"):
            up = tensors[key.replace("gate", "up")]
            joined[key.replace("gate", "gate_up")] = along_rows([one, up])
        elif part[:2] not in ("k.", "v.") and "ffn_up_exps" not in key:
            joined[key] = one
    file = write_gguf(tmp_path / "model.gguf", metadata, joined)
    found, expected = state_of(describe(str(file))), state_of(describe(str(folder)))
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def along_rows(parts: list[Stored]) -> Stored:
    found = [np.frombuffer(content, np.float32).reshape(shape) for _, shape, content in parts]
    whole = np.concatenate(found, axis=-2 if found[0].ndim > 1 else 0)
    return "F32", whole.shape, whole.tobytes()


def test_any_rotary_factors_are_read(tmp_path: Path) -> None:
    """Others than Llama 3's divide frequencies at every position, as llama.cpp has it."""
    factors = [1.0, 1.5, 3.0, 8.0]
    own = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": MOST_POSITIONS, **own}
    folder = save_specimen("llama", tmp_path / "folder")
    metadata, tensors = model_parts(folder, "F32")
    tensors["rope_freqs.weight"] = stored(torch.tensor(factors), "F32")
    file = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    assert texts(file) == texts(folder)


def test_each_architecture_is_tried() -> None:
    assert {ARCHITECTURES[name].model_type for name in ARCHITECTURES} <= set(PLAIN)
    others = {other.model_type for each in ARCHITECTURES.values() for other in each.instead.values()}
    assert others <= set(PLAIN)
