"""Packed matrices for tests: any numbers that a format can hold."""

import numpy as np

from ppd_runtime.models.native.formats import GROUP, NumberFormat, Numbers


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
