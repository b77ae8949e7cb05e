"""Products with packed matrices: their definition, and the forms of them that this CPU has."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.native.formats import GROUP, Array
from ppd_runtime.models.native.library import load
from ppd_runtime.models.native.packing import unpack

_LEAST = 2.0**-100


def product_in_numpy(states: Tensor, packed: Tensor) -> Tensor:
    """The product of states `[tokens, inputs]` with a packed matrix, step by step: C++ has to give these bits."""
    numbers, of_states = unpack(packed), states.numpy().reshape(len(states), -1, GROUP)
    form, (a, s) = numbers.form, _rounded(of_states)
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


def _rounded(groups: Array) -> tuple[Array, Array]:
    """States as whole numbers, int32 `[tokens, groups, 32]`, and their scales, float32 `[tokens, groups]`."""
    largest = np.abs(groups).max(-1)
    finite, small = np.isfinite(largest), largest < np.float32(_LEAST)
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
    if not choose(form.encode()):
        raise ValueError(f"form={form!r}: this CPU has {', '.join(forms())}")
    try:
        yield
    finally:
        choose(forms()[-1].encode())
