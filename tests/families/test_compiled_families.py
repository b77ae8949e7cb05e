"""Compiled layouts of every family give compiled ordinary decoding's tokens and the bits of its probabilities."""

from pathlib import Path

import pytest
from compilers import needs_compiler
from families.attack import prompts
from families.specimens import SPECIAL, SUPPORTED, Specimen
from grids import nightly
from models_for_tests import build_tokenizer

from ppd_runtime import GenerationResult, OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.compiled.export import _kind

EVERY = [*map(Specimen, SUPPORTED), *SPECIAL]


@pytest.mark.parametrize("specimen", [Specimen("qwen3_moe"), Specimen("flint")], ids=lambda specimen: specimen.name)
def test_layers_are_told_apart(specimen: Specimen) -> None:
    """Where the configuration has numbers of layers in a list, too."""
    model = specimen.build()
    kinds = [str(_kind(model, layer, passes=1)) for layer in range(model.config.num_hidden_layers)]
    dense = [layer in model.config.mlp_only_layers for layer in range(len(kinds))]
    assert len(set(kinds)) == len({*zip(kinds, dense, strict=True)}) < len(kinds)


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


def _text(generator: OrdinaryDecoding | PPDRuntime, prompt: list[int], sampling: dict[str, float]) -> object:
    result: GenerationResult = generator.generate(prompt, max_new_tokens=12, ignore_eos=True, logprobs=2, **sampling)
    return result.token_ids, result.logprobs
