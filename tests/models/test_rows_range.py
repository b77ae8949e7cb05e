"""Passes padded to one number of rows: a row has the same bits alone, beside others, and in any place."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from families.specimens import Specimen
from followed_trees import MOST_NODES, followed, followed_together, following
from grids import nightly
from models_for_tests import load_stage
from torch import Tensor

from ppd_runtime.models.stage import row_probe
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.row_attention import ROWS
from ppd_runtime.models.stage.row_probe import product_keeps_rows, why_rows_cannot_share
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.models.stage.tree_range import TreeRange

ModelFolder = Callable[..., Path]
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "mixtral")
CASES = [(family, "bfloat16") for family in FAMILIES]
CASES += [("llama", dtype) for dtype in ("float32", "float16")]
CASES += [pytest.param(family, dtype, marks=nightly) for family in FAMILIES[1:] for dtype in ("float32", "float16")]


def rows_range(family: str, model_folder: ModelFolder, dtype: str, first: int = 0) -> RowsRange:
    return RowsRange(load_stage(model_folder(family, vocab_size=320), dtype).model, None, first)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_rows_bits_are_its_paths(family: str, dtype: str, model_folder: ModelFolder) -> None:
    """Over random trees of one text, and of several at once; windows roll, and blocks of rotary tables are passed."""
    rows = TreeRange(rows_range(family, model_folder, dtype), MOST_NODES)
    assert (rows.most_together, rows.joins_requests, rows.joins_heads) == (ROWS, True, True)
    prompts, sizes = (3, 60, 130, 250), ([8], [1, 2, 3], [2, 7, 1, 8])
    rows.most_together = 1
    alone = [followed(rows, prompt, [1], seed) for seed, prompt in enumerate(prompts)]
    rows.most_together = ROWS
    for some in sizes:
        for seed, prompt in enumerate(prompts[2:], start=2):
            check_alike(followed(rows, prompt, some, seed), alone[seed])
        stages = [rows.another() for _ in prompts]
        passes = [following(stage, prompts[seed], some, seed) for seed, stage in enumerate(stages)]
        for together, of_one in zip(
            followed_together(rows, list(zip(stages, passes, strict=True))), alone, strict=True
        ):
            check_alike(together, of_one)


def check_alike(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[node], expected[node]) for node in expected)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_a_pass_of_many_tokens(family: str, dtype: str, model_folder: ModelFolder) -> None:
    """Chains, candidates and trees of up to 40 tokens have the states, the entries and the logits of single tokens."""
    stage = rows_range(family, model_folder, dtype)
    for position in (1, 63):
        for parents in ([-1, 0, 1], [-1, -1, -1], [-1, *(node * 7 // 10 for node in range(39))]):
            stage.begin(position + len(parents))
            stage.run(0, 4, list(range(40, 40 + position)), 0)
            together = stage.run_tree(range(9, 9 + len(parents)), parents, position)
            logits = stage.token_logits(together)
            assert [stage.length(i) for i in range(4)] == [position + len(parents)] * 4
            stage.truncate(position)
            for node in range(len(parents)):
                path = path_to(node, parents)
                alone = [stage.run(0, 4, [9 + each], position + i) for i, each in enumerate(path)]
                stage.truncate(position)
                assert torch.equal(together[:, node : node + 1], alone[-1])
                assert torch.equal(logits[node], stage.logits(alone[-1]))


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while (parent := parents[path[0]]) >= 0:
        path.insert(0, parent)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_cut_anywhere(dtype: str, model_folder: ModelFolder) -> None:
    """A token that runs some layers after the others has the bits of one call; a chain continues the cut states."""
    whole, cut = (rows_range("llama", model_folder, dtype) for _ in range(2))
    prompt, chain = list(range(40, 60)), [7, 8, 9]
    for stage in (whole, cut):
        stage.begin(40)
        stage.run(0, 4, prompt, 0)
    alone = torch.cat([whole.run(0, 4, [token], 20 + i) for i, token in enumerate(chain)], dim=1)
    half = torch.cat([cut.run(0, 2, [token], 20 + i) for i, token in enumerate(chain)], dim=1)
    assert torch.equal(cut.run(2, 4, half, 20), alone)
    for layers in zip(whole.cache.layers, cut.cache.layers, strict=True):
        one, other = ((layer.keys[:, :, :23], layer.values[:, :, :23]) for layer in layers)
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_it_computes_what_the_library_does(family: str, model_folder: ModelFolder) -> None:
    """Up to rounding: its attention takes the masks' and the windows' entries, and no others."""
    usual = load_stage(model_folder(family, vocab_size=320))
    padded = rows_range(family, model_folder, "float32")
    for stage in (usual, padded):
        stage.begin(40)
        stage.run(0, 4, list(range(40, 70)), 0)
    states = [torch.cat([stage.run(0, 4, [9], 30 + i) for i in range(4)], dim=1) for stage in (usual, padded)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "its layers keep a recurrent state"),
        ("llama4_text", "its layers attend in chunks of the text"),
        ("deepseek_v32", "its layers choose the tokens that they attend to by an index"),
        ("gemma3n_text", "its layers read more of a token than a hidden state"),
        ("jetmoe", "its attention has experts"),
    ],
)
def test_layers_that_cannot_share(family: str, reason: str) -> None:
    assert why_rows_cannot_share(Specimen(family).build(), 1) == reason


def test_widths_that_leave_numbers_over(model_folder: ModelFolder) -> None:
    """Loops over elements compute what is left over behind the last whole vector in another way."""
    model = load_stage(model_folder("gemma2")).model
    assert why_rows_cannot_share(model, 1) == "8 rows of 300 numbers do not divide into vectors on 1 threads"
    assert why_rows_cannot_share(load_stage(model_folder("llama")).model, 1) is None
    assert row_probe._has_whole_vectors(8960, 1) and not row_probe._has_whole_vectors(8960, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_whose_rows_depend_on_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in another order shows for one row among eight, in every dtype; the library's own products keep rows."""

    def try_with(product: Callable[[Tensor, Tensor], Tensor]) -> bool:
        product_keeps_rows.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(row_probe, "linear", product)
            return product_keeps_rows(64, 96, dtype, torch.device("cpu"), 1)

    def of_last(states: Tensor, weight: Tensor) -> Tensor:
        found = exact(states, weight)
        found[:, -1] = exact(states.flip(2), weight.flip(1))[:, -1]
        return found

    def beside(states: Tensor, weight: Tensor) -> Tensor:
        return exact(states, weight) if states[0, 1].abs().sum() > 0 else exact(states.flip(2), weight.flip(1))

    def exact(states: Tensor, weight: Tensor) -> Tensor:
        """One number after the other, in float32."""
        sums = torch.zeros(*states.shape[:2], len(weight))
        for i in range(weight.shape[1]):
            sums += states[:, :, i : i + 1].float() * weight[:, i].float()
        return sums.to(states.dtype)

    assert try_with(exact)
    assert not try_with(of_last)
    assert not try_with(beside)
    product_keeps_rows.cache_clear()


def test_experts_run_row_by_row(model_folder: ModelFolder) -> None:
    """An expert's products have one row each, whatever the other rows have chosen."""
    stage, sizes = rows_range("mixtral", model_folder, "float32"), set[int]()
    for module in stage.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, given: sizes.add(given[0].shape[0]))
    stage.begin(20)
    stage.run(0, 4, [5, 6, 7], 0)
    sizes.clear()
    stage.run(0, 4, [8, 9, 10], 3)
    assert sizes == {1}


def test_other_ranges_of_the_model_run_as_before(model_folder: ModelFolder) -> None:
    """A model whose attention is computed row by row in one range has the library's in others."""
    model, other = (load_stage(model_folder("llama")).model for _ in range(2))
    RowsRange(model)
    states = []
    for stage in (LayerRange(model), LayerRange(other)):
        stage.begin(20)
        stage.run(0, 4, list(range(40, 52)), 0)
        states.append(torch.cat([stage.run(0, 4, [9], 12), stage.run(0, 4, [3, 4, 5], 13)], dim=1))
    assert torch.equal(*states)
