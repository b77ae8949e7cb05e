"""Quantises floats to 8 and 4 bits, in the formats Q8_0 and Q4_0, and roughly to any format."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.native.formats import GROUP, NUMBER_FORMATS, NumberFormat, Numbers

FORMAT_OF = {"int8": NUMBER_FORMATS["Q8_0"], "int4": NUMBER_FORMATS["Q4_0"]}
"""By values of the setting `weights`."""
_SCALES_TRIED = 16
_ROWS_AT_ONCE = 4096
_PART, _LEAST = 8, 2.0**-100


def quantise(weight: Tensor, weights: str) -> Numbers:
    """Quantise a float matrix to int8 or int4.

    int8: the scale is a group's largest number over 127. int4: it is the one with the least squared error among some
    near the largest number over -8. A group of zeros has the scale 0.

    Raises:
        ValueError: if the inputs are no multiple of 32, or a number is not finite or too large for a scale.
    """
    inputs, form = weight.shape[1], FORMAT_OF[weights]
    if inputs % GROUP:
        raise ValueError(f"weights={weights!r}: {inputs} inputs are no multiple of {GROUP}")
    parts = [_quantised(some.float(), weights) for some in weight.detach().split(_ROWS_AT_ONCE)]
    codes = torch.cat([q for q, _ in parts]).numpy().view(np.uint8) + np.uint8(-form.values[0])
    return Numbers(form, codes, torch.cat([d for _, d in parts]).numpy())


def _quantised(weight: Tensor, weights: str) -> tuple[Tensor, Tensor]:
    """Whole numbers, int8 `[outputs, groups, 32]`, and scales, float16 `[outputs, groups]`."""
    groups = weight.reshape(len(weight), -1, GROUP)
    if not torch.isfinite(groups).all() or groups.abs().max() > 127 * torch.finfo(torch.float16).max / 16:
        raise ValueError(f"weights={weights!r}: a weight is not finite, or too large for a scale in float16")
    place = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, place)[..., 0]
    if weights == "int8":
        scales = (extreme.abs() / 127).half()
        return _rounded(groups, scales, -127, 127), scales
    best, least = torch.zeros_like(extreme).half(), torch.full_like(extreme, torch.inf)
    for step in range(_SCALES_TRIED):
        scales = (extreme / (-8 + step / (_SCALES_TRIED - 1))).half()  # -8 to -7
        error = (groups - _rounded(groups, scales, -8, 7) * scales.float()[..., None]).square().sum(-1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return _rounded(groups, best, -8, 7), best


def _rounded(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scales == 0, torch.zeros(()), 1 / scales.float())
    return (groups * inverse[..., None]).round_().clamp_(low, high).to(torch.int8)


def quantise_roughly(weight: Tensor, form: NumberFormat) -> Numbers:
    """Quantise a float matrix to any format, alike on every machine: for samples, not models.

    A row has one scale and one minimum.
    """
    matrix, table = weight.float().numpy(), form.table.astype(np.float32)
    rows, groups = len(matrix), matrix.shape[1] // GROUP
    part = _PART if form.halves else 1
    largest = np.maximum(np.abs(matrix).max(1, keepdims=True), np.float32(_LEAST))
    scales = largest / np.float32((table.max() / 2 if form.has_minimum else table.max()) * part)
    kept = np.frexp(scales)[1] + 128 if form.exponents else scales
    blocks, halves = groups // form.groups, (rows, groups, form.halves)
    some = Numbers(
        form,
        np.zeros((rows, groups, GROUP), np.uint8),
        kept.astype(np.uint8 if form.exponents else np.float16).repeat(blocks, 1),
        np.full(halves, part, np.int8) if form.halves else None,
        (largest / np.float32(part)).astype(np.float16).repeat(blocks, 1) if form.has_minimum else None,
        np.full(halves, part, np.uint8) if form.halves and form.has_minimum else None,
    )
    whole = (matrix + largest * form.has_minimum) / (some.scales_in_floats[:, :1] * np.float32(part))
    order = np.argsort(table, kind="stable")
    between = (table[order][1:] + table[order][:-1]) / 2
    codes = order[np.searchsorted(between, whole)].astype(np.uint8)
    return replace(some, codes=codes.reshape(some.codes.shape))
