"""Weights of few bits: each form of their product has the bits of the definition, whatever runs beside a row."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.native.formats import GROUP, NUMBER_FORMATS, NumberFormat, Numbers
from ppd_runtime.models.native.library import load
from ppd_runtime.models.native.packing import as_floats, pack, packed_as, packed_bytes, rows_in_floats, unpack
from ppd_runtime.models.native.products import PRODUCTS, product
from ppd_runtime.models.native.quantising import FORMAT_OF, quantise, quantise_roughly

SHAPES = [(16, 1), (33, 3), (5, 2), (160, 5)]
"""Outputs, and blocks of a row."""
of_formats = pytest.mark.parametrize("form", NUMBER_FORMATS.values(), ids=list(NUMBER_FORMATS))


def drawn(form: NumberFormat, outputs: int, groups: int, seed: int = 0) -> Numbers:
    """Numbers over all that a file may hold: the lowest codes, and scales below normal ones too."""
    drawing = np.random.default_rng(seed)
    halves, blocks = (outputs, groups, form.halves), (outputs, groups // form.groups)
    most = 16 if form.shares_bytes else 128
    codes = drawing.integers(0, len(form.values), (outputs, groups, GROUP), dtype=np.uint8)
    codes[0, 0] = 0
    if form.exponents:
        scales = drawing.integers(116, 128, blocks, dtype=np.uint8)
        scales[-1, -1], scales[0, -1] = 0, 1
    else:
        scales = (drawing.standard_normal(blocks) / 100).astype(np.float16)
        scales[-1, -1], scales[0, -1] = 3e-7, 0
    return Numbers(
        form,
        codes,
        scales,
        drawing.integers(0 if form.has_minimum else -128, most, halves).astype(np.int8) if form.halves else None,
        (drawing.standard_normal(blocks) / 10).astype(np.float16) if form.has_minimum else None,
        drawing.integers(0, most, halves).astype(np.uint8) if form.halves and form.has_minimum else None,
    )


def product_in_numpy(states: Tensor, packed: Tensor) -> Tensor:
    """The product of states `[tokens, inputs]` with a packed matrix, step by step: C++ has to give these bits."""
    numbers, of_states = unpack(packed), states.numpy().reshape(len(states), -1, GROUP)
    form, (a, s) = numbers.form, rounded(of_states)
    halves, scales, minimums = max(1, form.halves), numbers.scales_in_floats, numbers.minimums_of_halves
    whole = numbers.whole.astype(np.int32).reshape(*numbers.codes.shape[:2], halves, -1)
    a = a.reshape(*a.shape[:2], halves, -1)
    result = np.zeros((len(states), len(whole)), np.float32)
    for group in range(of_states.shape[1]):
        sums = np.einsum("thi,rhi->trh", a[:, group], whole[:, group])
        if numbers.parts is not None:
            sums = sums * numbers.parts[:, group].astype(np.int32)
        scale = scales[None, :, group // form.groups] * s[:, group, None]
        result = result + sums.sum(-1).astype(np.float32) * scale
        if minimums is not None:
            for half in range(halves):
                weighted = s[:, group] * a[:, group, half].sum(-1).astype(np.float32)
                result = result - minimums[None, :, group, half] * weighted[:, None]
    return torch.from_numpy(result)


def rounded(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States as whole numbers, int32 `[tokens, groups, 32]`, and their scales, float32 `[tokens, groups]`."""
    largest = np.abs(groups).max(-1)
    finite, small = np.isfinite(largest), largest < np.float32(2.0**-100)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(finite & ~small, np.float32(127) / largest, np.float32(0))
        whole = np.where((finite & ~small)[..., None], np.rint(groups * inverse[..., None]), np.float32(0))
        scales = np.where(small, np.float32(0), np.where(finite, largest / np.float32(127), np.float32(np.nan)))
    return whole.astype(np.int32), scales


def forms() -> list[str]:
    """The forms of the product that this CPU has, by instruction set; the last is the one that is used."""
    names = load().ppd_quantised_forms
    names.restype = ctypes.c_char_p
    return names().decode().split(",")


@contextmanager
def product_in_form(form: str) -> Iterator[None]:
    """Compute products in one of `forms` inside the block."""
    choose = load().ppd_choose_quantised_form
    assert choose(form.encode())
    try:
        yield
    finally:
        choose(forms()[-1].encode())


def states(tokens: int, inputs: int, seed: int = 1) -> Tensor:
    """Normal numbers, groups of zeros and of tiny numbers, and a far larger one among small ones."""
    made = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(seed))
    made[0, :32], made[-1, -1] = 0, 1e4
    if tokens > 1:
        made[1, :32] *= 1e-32
    return made


def same(one: Numbers, other: Numbers) -> bool:
    pairs = zip(one._arrays, other._arrays, strict=True)
    return one.form == other.form and all(a is b or (a.dtype == b.dtype and np.array_equal(a, b)) for a, b in pairs)


@of_formats
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_comes_out_as_it_went_in(form: NumberFormat, shape: tuple[int, int]) -> None:
    outputs, groups = shape[0], shape[1] * form.groups
    numbers = drawn(form, outputs, groups)
    packed = pack(numbers)
    assert packed_as(packed) == (form, outputs, groups * 32)
    assert len(packed) == packed_bytes(form, outputs, groups * 32)
    assert same(unpack(packed), numbers)
    for chosen in ([outputs - 1, 0, outputs - 1], range(outputs // 2)):
        assert same(unpack(packed, chosen), numbers.some(np.array(chosen)))
    floats = torch.from_numpy(numbers.in_floats())
    assert torch.equal(as_floats(packed), floats)
    assert torch.equal(rows_in_floats(packed, torch.tensor([outputs - 1, 0])), floats[[outputs - 1, 0]])
    with pytest.raises(IndexError, match="no such row"):
        rows_in_floats(packed, torch.tensor([0, outputs]))


@of_formats
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_has_the_bits_of_the_definition(form: NumberFormat, shape: tuple[int, int]) -> None:
    assert forms()[0] == "plain"
    packed = pack(drawn(form, shape[0], shape[1] * form.groups))
    for tokens in (1, 2, 3, 4, 5, 9):
        given = states(tokens, packed_as(packed).inputs)
        expected = product_in_numpy(given, packed)
        for name in forms():
            with product_in_form(name):
                assert torch.equal(product(given, packed), expected), (name, tokens)


@of_formats
def test_the_definition_is_the_product_with_the_weights_up_to_rounded_states(form: NumberFormat) -> None:
    packed = pack(quantise_roughly(torch.randn(48, 512, generator=torch.Generator().manual_seed(3)) / 10, form))
    given = torch.randn(4, 512, generator=torch.Generator().manual_seed(4))
    expected = given.double() @ as_floats(packed).double().T
    assert (product_in_numpy(given, packed) - expected).norm() < 0.01 * expected.norm()


@of_formats
def test_numbers_of_largest_size_do_not_overflow(form: NumberFormat) -> None:
    numbers = drawn(form, 16, form.groups)
    for code in (form.table.argmin(), form.table.argmax()):
        numbers.codes[:] = code
        if numbers.parts is not None:
            numbers.parts[:] = 15 if form.shares_bytes else -128 if not form.has_minimum else 63
        packed, given = pack(numbers), torch.ones(3, packed_as(pack(numbers)).inputs)
        given[1] = -1
        expected = product_in_numpy(given, packed)
        for name in forms():
            with product_in_form(name):
                assert torch.equal(product(given, packed), expected), name


@of_formats
def test_a_rows_bits_are_its_own(form: NumberFormat) -> None:
    packed = pack(drawn(form, 160, 3 * form.groups))
    given = states(9, packed_as(packed).inputs)
    whole = product(given, packed)
    for row in range(9):
        assert torch.equal(product(given[row : row + 1], packed)[0], whole[row])
    assert torch.equal(product(given.flip(0).contiguous(), packed).flip(0), whole)


def test_matrices_in_different_formats_have_the_bits_of_each_in_one_call() -> None:
    """Also with several threads, which share the rows of all of them."""
    matrices = [
        pack(drawn(NUMBER_FORMATS[name], rows, 8)) for name, rows in (("Q4_K", 2048), ("Q8_0", 33), ("Q6_K", 512))
    ]
    given = states(3, 256)
    alone = [product(given, matrix) for matrix in matrices]
    for threads in (1, 2, 3):
        with cpu_threads(threads):
            assert torch.equal(PRODUCTS[2](given, *matrices), torch.cat(alone, dim=1))
            assert torch.equal(PRODUCTS[1](given, *matrices[:2]), torch.cat(alone[:2], dim=1))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_row_alone(name: str, number: float) -> None:
    packed, given = pack(drawn(NUMBER_FORMATS[name], 33, 8)), states(3, 256)
    expected = product(given, packed)
    given[1, 40] = number
    found = product(given, packed)
    assert torch.isnan(found[1]).all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(torch.isnan(product_in_numpy(given, packed)), torch.isnan(found))


@pytest.mark.parametrize(("weights", "most"), [("int8", 0.004), ("int4", 0.08)])
def test_quantising_keeps_a_matrix(weights: str, most: float) -> None:
    matrix = torch.randn(48, 320, generator=torch.Generator().manual_seed(2))
    matrix[3, :32] = 0
    found = as_floats(pack(quantise(matrix, weights)))
    assert (found - matrix).square().mean().sqrt() < most * matrix.square().mean().sqrt() * 2
    assert not found[3, :32].any()
    again = as_floats(pack(quantise(found, weights)))
    assert torch.allclose(again, found, atol=1e-3)


@pytest.mark.parametrize("weights", FORMAT_OF)
def test_what_cannot_be_quantised_is_refused(weights: str) -> None:
    with pytest.raises(ValueError, match="33 inputs are no multiple of 32"):
        quantise(torch.zeros(4, 33), weights)
    with pytest.raises(ValueError, match="not finite"):
        quantise(torch.full((4, 32), torch.inf), weights)


def test_bytes_that_are_no_packed_matrix_are_refused() -> None:
    packed = pack(drawn(NUMBER_FORMATS["Q4_K"], 16, 8))
    with pytest.raises(ValueError, match="few_rows_linear: not made for"):
        product(torch.zeros(1, 512), packed)
    for place in (0, 4, 8, 16, 24):  # magic, layout, format, outputs and inputs
        damaged = packed.clone()
        damaged[place] += 1
        for refuses in (packed_as, lambda bytes_: product(torch.zeros(1, 256), bytes_)):
            with pytest.raises(ValueError, match=r"no packed matrix of this version|not made for"):
                refuses(damaged)
    for wrong in (packed[:-1], packed[:40], packed[None], packed.to(torch.int8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="no packed matrix of this version"):
            packed_as(wrong.contiguous())
        with pytest.raises(ValueError, match="not made for"):
            product(torch.zeros(1, 256), wrong.contiguous())
