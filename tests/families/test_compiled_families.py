"""Compiled layouts of every family give compiled ordinary decoding's tokens and the bits of its probabilities."""

from itertools import product
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from families.attack import prompts
from families.specimens import SPECIAL, SUPPORTED, Specimen
from grids import nightly
from models_for_tests import build_tokenizer
from seeds import SEED

from ppd_runtime import GenerationResult, OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.config import without_weights
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.compiled.export import _kind, compile_layers
from ppd_runtime.models.compiled.passes import CompiledLayers

EVERY = [*map(Specimen, SUPPORTED), *SPECIAL]
KEEP_FLOATS = {"deepseek_v3", "flint", "gpt_oss", "nemotron_h"}
"""Some of the families of which the library keeps weights in float32, in bfloat16 or in float16 alone."""
BY_DAY_OR_NIGHT = [one if one.family in KEEP_FLOATS else pytest.param(one, marks=nightly) for one in EVERY]


@pytest.mark.parametrize("specimen", [Specimen("qwen3_moe"), Specimen("flint")], ids=lambda specimen: specimen.name)
def test_layers_are_told_apart(specimen: Specimen) -> None:
    """Where the configuration has numbers of layers in a list, too."""
    model = specimen.build()
    kinds = [str(_kind(model, layer, passes=1)) for layer in range(model.config.num_hidden_layers)]
    dense = [layer in model.config.mlp_only_layers for layer in range(len(kinds))]
    assert len(set(kinds)) == len({*zip(kinds, dense, strict=True)}) < len(kinds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("specimen", BY_DAY_OR_NIGHT, ids=lambda specimen: specimen.name)
def test_code_is_made_for_the_dtypes_that_are_loaded(specimen: Specimen, dtype: torch.dtype, tmp_path: Path) -> None:
    """The library keeps some weights in float32. Code that was made for 16 bits would read other numbers there."""
    specimen.build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    info = describe(str(tmp_path))
    loaded = load_layers(info, info.num_layers, dtype, "cpu")
    with torch.device("meta"):
        expected = without_weights(loaded.config, dtype)
    of_loaded, of_expected = ({n: t.dtype for n, t in m.state_dict().items()} for m in (loaded, expected))
    assert of_loaded == of_expected
    if specimen.family in KEEP_FLOATS and dtype == torch.float16:
        assert torch.float32 in of_loaded.values()


@needs_compiler
def test_code_refuses_weights_of_other_dtypes() -> None:
    model = Specimen("llama").build()
    code = compile_layers(model.config, torch.bfloat16, model.device)
    with pytest.raises(ValueError, match=r"_proj.weight is torch.float32, and the code reads it as torch.bfloat16"):
        CompiledLayers(model, {1: code})


@nightly
@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("specimen", EVERY, ids=lambda specimen: specimen.name)
def test_layouts(specimen: Specimen, dtype: str, tmp_path: Path) -> None:
    """Stages of a layer each, of several and of all, and the paper's; or one line says why none is."""
    specimen.build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    settings = {"model": str(tmp_path), "dtype": dtype, "compile": True}
    try:
        ordinary = OrdinaryDecoding(**settings)
    except ValueError as error:
        assert str(error).startswith("compile: ")
        pytest.skip(str(error))
    depth = ordinary.info.num_layers
    asked = [(prompt, sampling) for prompt in prompts((3, 30)) for sampling in ({}, {"temperature": 0.9, "seed": 4})]
    expected = [_text(ordinary, *one) for one in asked]
    stages = ({"stages": depth, "k": 2}, {"stages": 3, "k": 2, "rows": 4}, {"stages": 1, "rows": 4})
    for layout in (*stages, {"k": 1, "exit_layer": depth - 1}):
        with PPDRuntime(transport="local", **layout, **settings) as runtime:
            assert [_text(runtime, *one) for one in asked] == expected, layout


@nightly
@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("specimen", EVERY, ids=lambda specimen: specimen.name)
def test_layers_give_the_librarys_numbers(specimen: Specimen, dtype: str, tmp_path: Path) -> None:
    """Up to rounding, whatever stands in weights that are new as zeros or ones."""
    model, noise = specimen.build(), torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape, generator=noise), alpha=0.1)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    try:
        ours = OrdinaryDecoding(str(tmp_path), dtype=dtype, compile=True).stage
    except ValueError as error:
        assert str(error).startswith("compile: ")
        pytest.skip(str(error))
    stages, errors = (ours, OrdinaryDecoding(str(tmp_path), dtype=dtype, compile=False).stage), []
    for stage in stages:
        stage.begin(64)
        stage.run(0, stage.num_layers, [3, 4, 5], 0)
    for position, layer in product(range(3, 23), range(ours.num_layers)):
        hidden = torch.randn(1, 1, ours.state_size, generator=noise).to(stages[0].states_dtype)
        found, expected = (
            stage.run(layer, layer + 1, hidden if layer else [position], position).float() for stage in stages
        )
        errors.append(float((found - expected).norm() / (expected - hidden.float()).norm()))
    most = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert sorted(errors)[int(0.9 * len(errors))] < most, "another expert may be chosen by rounding, but seldom"


def _text(generator: OrdinaryDecoding | PPDRuntime, prompt: list[int], sampling: dict[str, float]) -> object:
    result: GenerationResult = generator.generate(prompt, max_new_tokens=12, ignore_eos=True, logprobs=2, **sampling)
    return result.token_ids, result.logprobs
