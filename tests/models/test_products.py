"""Products of a few tokens' states: the numbers that the plain product gives, in bits that depend on nothing beside."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from torch import Tensor

from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.native import library
from ppd_runtime.models.native.packing import pack
from ppd_runtime.models.native.products import (
    MOST_ROWS,
    PRODUCTS,
    TILE,
    LargePages,
    few_rows_linear,
    in_half_the_memory,
    in_tiles,
    product,
    same_numbers,
)
from ppd_runtime.models.native.quantising import quantise

pytestmark = needs_compiler
CPU = torch.device("cpu")
FLOAT, HALF = "float32", "bfloat16"
SHAPES = [(1, 1), (7, 16), (24, 19), (5, 3), (9, 20), (6, 31), (4, 100), (96, 256), (2048, 130)]
"""Outputs and inputs."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (1, 2, 16), (1, 7, 16), (3, 2, 16), (16,), (5, 16), (1, MOST_ROWS + 1, 16)]
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("multiply", ["at once", "in a graph"])
def test_as_linear(shape: tuple[int, ...], biased: bool, multiply: str) -> None:
    states, weight, bias = numbers(*shape), numbers(24, 16), numbers(24) if biased else None
    found = few_rows_linear(states, weight, bias, product.in_graphs() if multiply == "in a graph" else None)
    expected = torch.nn.functional.linear(states, weight, bias)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokens_bits_depend_on_nothing_beside_it(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    states, weight = numbers(13, inputs), numbers(outputs, inputs)
    expected = torch.cat([product(state[None], weight) for state in states])
    exactly = states.double() @ weight.double().t()
    assert torch.allclose(expected.double(), exactly, atol=1e-4)
    for tokens in range(1, 14):
        assert torch.equal(product(states[:tokens], weight), expected[:tokens])
    for rows in range(1, min(outputs, 9)):
        assert torch.equal(product(states, weight[:rows].contiguous()), expected[:, :rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int, dtype: torch.dtype) -> None:
    states, weight = numbers(3, 512), numbers(1031, 512).to(dtype)
    expected = product(states, weight)
    with cpu_threads(threads):
        assert torch.equal(product(states, weight), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_half_the_memory_gives_the_same_numbers(shape: tuple[int, int]) -> None:
    weight = numbers(*shape).bfloat16().float()
    half = in_half_the_memory(weight)
    assert half is not None
    assert half.dtype == torch.bfloat16
    states = numbers(4, shape[1])
    together = product(states, half)
    assert torch.allclose(together, product(states, weight), atol=1e-4)
    assert torch.equal(torch.cat([product(state[None], half) for state in states]), together)


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5, 6, 7, 8, 31, 130, 512, 513, 1030])
def test_products_in_vectors_give_the_bits_of_the_plain_form(inputs: int) -> None:
    """The last tile, of fewer rows, is computed number by number."""
    states, weight = numbers(25, inputs), numbers(3 * TILE - 1, inputs).bfloat16()
    expected = torch.cat([in_plain_words(state, weight)[None] for state in states])
    for rows in (1, TILE - 1, TILE, 2 * TILE + 5, len(weight)):
        for tokens in (*range(1, 14), 25):
            found = product(states[:tokens], in_tiles(weight[:rows]))
            assert torch.equal(found, expected[:tokens, :rows]), (rows, tokens)


def in_plain_words(state: Tensor, weight: Tensor) -> Tensor:
    """What `bfloat16.cpp` says, one number after the other, by the product of a matrix of one row."""
    return torch.cat([product(state[None], in_tiles(row[None]))[0] for row in weight])


def test_sums_run_over_every_fourth_column() -> None:
    """Numbers so large that any other order gives another sum."""
    states, weight = torch.tensor([[2.0**25, 1, 3, 1, -(2.0**25), 1, -3, 1]]), torch.ones(TILE, 8).bfloat16()
    assert product(states, in_tiles(weight)).tolist() == [[4.0] * TILE]
    moved = states[:, [0, 4, 1, 2, 3, 5, 6, 7]]
    assert product(moved, in_tiles(weight)).tolist() != [[4.0] * TILE]


def test_a_matrix_in_tiles_has_the_same_numbers() -> None:
    for shape in (*SHAPES, (0, 4), (40, 6)):
        weight = numbers(*shape).bfloat16()
        tiled = in_tiles(weight)
        assert tiled.shape == weight.shape
        assert torch.equal(tiled.flatten().sort().values, weight.flatten().sort().values)
        assert same_numbers(tiled, weight.float())
        if weight.numel() > 1:
            other = weight.float()
            other[-1, -1] += 1
            assert not same_numbers(tiled, other)
            assert not same_numbers(weight.flip(0, 1), weight.float())
    assert in_tiles(torch.arange(64.0).view(32, 2).bfloat16()).tolist() == torch.arange(64.0).view(32, 2).tolist()
    assert in_tiles(torch.arange(8.0).view(2, 4).bfloat16()).flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(
    "formats", [(FLOAT, FLOAT), (HALF, HALF, HALF), ("int8",) * 3, ("int4", "int8"), (HALF, FLOAT, HALF)]
)
def test_several_weights_at_once_give_the_bits_of_each(formats: tuple[object, ...]) -> None:
    outputs, inputs = (32, 40, 7), 64
    weights = [as_format(numbers(rows, inputs), form) for rows, form in zip(outputs, formats, strict=False)]
    for tokens in (1, 3, 9):
        states = numbers(tokens, inputs)
        together = PRODUCTS[len(weights) - 1](states, *weights)
        assert torch.equal(together, torch.cat([product(states, weight) for weight in weights], dim=1))


def as_format(weight: Tensor, form: object) -> Tensor:
    if form == FLOAT:
        return weight
    return in_tiles(weight.bfloat16()) if form == HALF else pack(quantise(weight, form))


def test_a_weight_of_another_shape_among_several_is_refused() -> None:
    with pytest.raises(ValueError, match=r"few_rows_linear_2: not made for .* second \[4, 15\]"):
        PRODUCTS[1](numbers(2, 16), numbers(4, 16), numbers(4, 15))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell")
def test_results_are_given_back() -> None:
    states, weight = numbers(8, 16), numbers(2**15, 16)
    product(states, weight)
    before, each = _resident_bytes(), 8 * 2**15 * 4
    for _ in range(100):
        product(states, weight)
    assert _resident_bytes() - before < 30 * each


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_strides_do_not_matter() -> None:
    states, weight = numbers(3, 40)[:, ::2], numbers(20, 24).t()
    found = few_rows_linear(states, weight)
    assert torch.allclose(found, torch.nn.functional.linear(states, weight), atol=1e-5)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"few_rows_linear: not made for states \[2, 16\] torch.bfloat16, weight"):
        product(numbers(2, 16).bfloat16(), numbers(4, 16))
    with pytest.raises(ValueError, match=r"weight \[4, 16\] torch.float16"):
        product(numbers(2, 16), numbers(4, 16).half())


def test_other_shapes_are_refused() -> None:
    for states, weight in (
        (numbers(2, 16), numbers(4, 15)),
        (numbers(2, 32)[:, ::2], numbers(4, 16)),
        (numbers(16),) * 2,
    ):
        with pytest.raises(ValueError, match="few_rows_linear: not made for"):
            product(states, weight)


def test_threads_that_ask_at_once_get_the_same_operator() -> None:
    product._library = None
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: product.in_graphs(), range(4)))) == 1


def test_a_weight_that_would_change_stays() -> None:
    weight = torch.ones(4, 4)
    weight[2, 3] += 2**-10
    assert in_half_the_memory(weight) is None


def test_not_where_it_does_not_belong() -> None:
    assert not library.is_available(torch.device("cuda"), torch.float32)
    assert not library.is_available(CPU, torch.bfloat16)


@pytest.mark.parametrize("damage", ["no such source", "no code"])
def test_what_cannot_be_made_or_loaded_is_one_line(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._loaded.cache_clear()
    if damage == "no such source":
        monkeypatch.setattr(library, "_FOLDER", tmp_path)
        (tmp_path / "broken.cpp").write_text("int main( {")
        words = "compile: our C.. code cannot be: .*error"
    else:
        monkeypatch.setattr(subprocess, "run", lambda command, **_: _spoiled(Path(command[-1])))
        words = "compile: .*cannot be loaded .*; remove it to have it made again"
    with pytest.raises(ValueError, match=words):
        library.load()
    library._loaded.cache_clear()


def _spoiled(path: Path) -> "subprocess.CompletedProcess[str]":
    path.write_bytes(b"no code")
    return subprocess.CompletedProcess([], 0, "", "")


def test_large_pages_hold_what_they_are_given() -> None:
    pages = LargePages(3 * 64 * 65 * 2)
    tensors = [numbers(64, 65).bfloat16() * factor for factor in (1, 2, 3)]
    copies = [pages.copy(tensor) for tensor in tensors]
    assert all(torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(copies, tensors, strict=True))
    assert copies[0].data_ptr() % 2**21 == 0
    assert all(copy.data_ptr() % 64 == 0 and copy is not tensor for copy, tensor in zip(copies, tensors, strict=True))
    strided = pages.copy(tensors[0].t())
    assert torch.equal(strided, tensors[0].t())
    assert strided.is_contiguous()
    large = numbers(2**11, 2**11)
    assert pages.copy(large) is large, "there is no room for it"
