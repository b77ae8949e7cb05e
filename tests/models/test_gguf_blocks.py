"""Blocks of GGUF's quantised types: the numbers that llama.cpp's own package makes of them, bit for bit."""

import gguf
import numpy as np
import pytest

from ppd_runtime.models.checkpoint.gguf.blocks import QUANTISED_TYPES, numbers_of

ROWS, BLOCKS = 33, 3


def blocks(kind: str, seed: int = 0) -> np.ndarray:
    """Rows of any bytes: all codes, and scales that are infinite or no numbers among them."""
    return np.random.default_rng(seed).integers(0, 256, (ROWS, BLOCKS * QUANTISED_TYPES[kind][1]), dtype=np.uint8)


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_each_type_has_the_packages_numbers(kind: str) -> None:
    type_of = gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[type_of] == QUANTISED_TYPES[kind]
    rows = blocks(kind)
    numbers = numbers_of(rows, kind)
    assert numbers.form.number == type_of
    with np.errstate(invalid="ignore", over="ignore"):
        ours, theirs = numbers.in_floats(), gguf.quants.dequantize(rows, type_of)
    assert ours.shape == (ROWS, BLOCKS * QUANTISED_TYPES[kind][0])
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all()


@pytest.mark.parametrize("kind", QUANTISED_TYPES)
def test_a_scale_that_is_no_number_is_seen(kind: str) -> None:
    rows = np.zeros_like(blocks(kind))
    assert numbers_of(rows, kind).are_finite
    size = QUANTISED_TYPES[kind][1]
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (0,)}.get(kind, (0,))
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        places = (0, 2)
    for place in places:
        damaged = rows.copy()
        damaged[-1, size + place : size + place + 2] = 255 if kind == "MXFP4" else (0, 0x7C)
        assert not numbers_of(damaged, kind).are_finite
