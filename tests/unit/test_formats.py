"""Weights of 8 and 4 bits: each form of their product has the bits of the definition, whatever runs beside a row."""

import pytest
import torch
from torch import Tensor

from ppd_runtime.models.native.formats import (
    BITS,
    as_floats,
    format_of,
    forms,
    pack,
    packed_rows,
    product_in_form,
    product_in_numpy,
    quantise,
    row_bytes,
    unpack,
)
from ppd_runtime.models.native.products import product

SHAPES = [(16, 32), (33, 96), (5, 64), (160, 768)]
LOWEST = {"int8": -128, "int4": -8}


def drawn(outputs: int, inputs: int, weights: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers and scales over all that a file may hold, the lowest number and scales below normal ones too."""
    generator = torch.Generator().manual_seed(seed)
    low = LOWEST[weights]
    numbers = torch.randint(low, -low, (outputs, inputs // 32, 32), generator=generator).to(torch.int8)
    numbers[0, 0] = low
    scales = (torch.randn(outputs, inputs // 32, generator=generator) / 100).half()
    scales[-1, -1], scales[0, -1] = 3e-7, 0
    return numbers, scales


def states(tokens: int, inputs: int, seed: int = 1) -> Tensor:
    """Normal numbers, groups of zeros and of tiny numbers, and a far larger one among small ones."""
    made = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(seed))
    made[0, :32], made[-1, -1] = 0, 1e4
    if tokens > 1:
        made[1, :32] *= 1e-32
    return made


@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_and_scales_come_out_as_they_went_in(weights: str, shape: tuple[int, int]) -> None:
    numbers, scales = drawn(*shape, weights)
    packed = pack(numbers, scales, weights)
    assert packed.shape == (shape[0], row_bytes(shape[1], weights))
    assert format_of(shape[1], packed.shape[1]) == weights
    assert all(map(torch.equal, unpack(packed, shape[1]), (numbers, scales)))
    chosen = [shape[0] - 1, 0]
    assert torch.equal(as_floats(packed_rows(packed, shape[1], chosen), shape[1]), as_floats(packed, shape[1])[chosen])


@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_form_has_the_bits_of_the_definition(weights: str, shape: tuple[int, int]) -> None:
    packed = pack(*drawn(*shape, weights), weights)
    for form in forms():
        for tokens in (1, 2, 3, 4, 5, 9):
            given = states(tokens, shape[1])
            with product_in_form(form):
                assert torch.equal(product(given, packed), product_in_numpy(given, packed)), (form, tokens)


@pytest.mark.parametrize("weights", BITS)
def test_a_rows_bits_are_its_own(weights: str) -> None:
    packed, given = pack(*drawn(160, 96, weights), weights), states(9, 96)
    whole = product(given, packed)
    for row in range(9):
        assert torch.equal(product(given[row : row + 1], packed)[0], whole[row])
    assert torch.equal(product(given.flip(0).contiguous(), packed).flip(0), whole)


@pytest.mark.parametrize("weights", BITS)
def test_threads_change_no_bit(weights: str) -> None:
    packed, given = pack(*drawn(4096, 96, weights), weights), states(3, 96)
    alone = product(given, packed)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(product(given, packed), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("weights", BITS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_row_alone(weights: str, number: float) -> None:
    packed, given = pack(*drawn(33, 96, weights), weights), states(3, 96)
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
    found = as_floats(pack(*quantise(matrix, weights), weights), 320)
    assert (found - matrix).square().mean().sqrt() < most * matrix.square().mean().sqrt() * 2
    assert not found[3, :32].any()
    again = as_floats(pack(*quantise(found, weights), weights), 320)
    assert torch.allclose(again, found, atol=1e-3)


@pytest.mark.parametrize("weights", BITS)
def test_what_cannot_be_quantised_is_refused(weights: str) -> None:
    with pytest.raises(ValueError, match="33 inputs are no multiple of 32"):
        quantise(torch.zeros(4, 33), weights)
    with pytest.raises(ValueError, match="not finite"):
        quantise(torch.full((4, 32), torch.inf), weights)
    packed = pack(*drawn(16, 64, weights), weights)
    with pytest.raises(ValueError, match="few_rows_linear: not made for"):
        product(torch.zeros(1, 96), packed)
    with pytest.raises(ValueError, match="no format has rows of 35 bytes"):
        format_of(32, 35)


def test_a_form_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="this CPU has plain"), product_in_form("abacus"):
        pass
    assert forms()[0] == "plain"
