"""Layers that attend in chunks of the text, or by an index: the tokens of a tree run path by path."""

from pathlib import Path

import pytest
import torch
from families.specimens import Specimen
from models_for_tests import build_tokenizer, load_stage
from torch import Tensor

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.models.stage.decoder_parts import decoder_in
from ppd_runtime.models.stage.path_range import PathRange

TEXT = [7 * i % 290 + 1 for i in range(40)]
TREE = {11: -1, 22: -1, 33: 0, 44: 0, 55: 3}
"""Token ids with their parents' places; the paths cross a border of chunks, which are 5 tokens long."""
PATHS = ([11], [22], [11, 33], [11, 44], [11, 44, 55])
POSITION = 13


@pytest.fixture(scope="module", params=["llama4_text", "deepseek_v32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    Specimen(request.param).build().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def stage_of(folder: Path, dtype: str = "float32") -> PathRange:
    stage = load_stage(folder, dtype)
    assert isinstance(stage, PathRange)
    stage.begin(len(TEXT))
    stage.run(0, stage.num_layers, TEXT[:POSITION], 0)
    return stage


def along(stage: PathRange, tokens: list[int], position: int = POSITION) -> list[Tensor]:
    """States of tokens one by one, as in ordinary decoding."""
    return [stage.run(0, stage.num_layers, [token], at)[:, -1] for at, token in enumerate(tokens, position)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_a_tree_have_the_bits_that_they_have_alone(folder: Path, dtype: str) -> None:
    states = stage_of(folder, dtype).run_tree(list(TREE), list(TREE.values()), POSITION)
    for place, path in enumerate(PATHS):
        assert torch.equal(states[:, place], along(stage_of(folder, dtype), path)[-1])


@pytest.mark.parametrize("kept", [[0], [1], [0, 3, 4]], ids=str)
def test_the_text_goes_on_after_a_kept_path(folder: Path, kept: list[int]) -> None:
    stage, tokens = stage_of(folder), [list(TREE)[node] for node in kept]
    stage.run_tree(list(TREE), list(TREE.values()), POSITION)
    stage.keep_path(POSITION, kept)
    found = along(stage, TEXT[20:26], POSITION + len(kept))
    expected = along(stage_of(folder), tokens + TEXT[20:26])[len(kept) :]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("folder", ["llama4_text"], indirect=True)
def test_what_a_token_sees_begins_at_its_own_chunk(folder: Path) -> None:
    """A layer with chunks gives the first token of a chunk the same, whatever stood before."""
    stage, others = stage_of(folder), [3] * POSITION
    other = load_stage(folder)
    other.begin(len(TEXT))
    other.run(0, other.num_layers, others, 0)
    states = torch.linspace(-1, 1, 32).view(1, 1, -1)
    for at in (13, 14, 15, 16):
        same = torch.equal(stage.run(0, 1, states, at), other.run(0, 1, states, at))
        assert same == (at >= 15)


def test_entries_travel_with_the_keys_of_an_index(folder: Path) -> None:
    """Another process goes on with the bits of this one; an index chooses six tokens of the thirteen and more."""
    stage, twin = stage_of(folder), stage_of(folder)
    twin.truncate(0)
    twin.run(0, twin.num_layers, [3] * POSITION, 0)
    twin.truncate(0)
    twin.import_entries(list(stage.export_entries(0, POSITION, stage.num_layers)))
    assert all(map(torch.equal, along(stage, TEXT[20:30]), along(twin, TEXT[20:30])))


@pytest.mark.parametrize("folder", ["deepseek_v32"], indirect=True)
def test_a_token_of_a_chain_chooses_as_if_it_ran_alone(folder: Path) -> None:
    """Among many equal scores: an index of zeros gives all tokens the same one."""
    stages = [stage_of(folder) for _ in range(2)]
    for stage in stages:
        for layer in decoder_in(stage.model).layers:
            projection = layer.self_attn.indexer.weights_proj
            projection.weight = torch.nn.Parameter(torch.zeros_like(projection.weight))
    chain = stages[0].run(0, stages[0].num_layers, TEXT[20:26], POSITION)
    torch.testing.assert_close(chain, torch.stack(along(stages[1], TEXT[20:26]), dim=1))


def test_compile_is_refused_in_a_line(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"compile: layers of .* (in chunks|by an index) .*; leave compile out"):
        OrdinaryDecoding(str(folder), compile=True)
