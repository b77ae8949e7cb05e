"""Model folders quantised as other programs store them, and the floats that their numbers stand for.

Each matrix is computed here number by number, from the format's description.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
ROUTER = ".mlp.gate.weight"
"""Stays as it is, as in published models."""
Parts = dict[str, Tensor]
"""What is stored instead of a matrix, by the name behind its module's."""
Quantise = Callable[[np.random.Generator, int, int], tuple[Parts, Tensor]]
"""Draws a matrix of outputs and inputs: what is stored, and its weights in float32."""


def write_folders(
    of: Path, place: Path, settings: Mapping[str, Any], quantise: Quantise, dtype: str = "float32", seed: int = 0
) -> tuple[Path, Path]:
    """A quantised folder, and one of floats, with the same drawn matrices in the layers of the model `of`."""
    drawn, tensors = np.random.default_rng(seed), load_file(of / WEIGHTS)
    stored, floats = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2 and not name.endswith(ROUTER):
            parts, weights = quantise(drawn, *tensor.shape)
            stored |= {name.removesuffix("weight") + part: found.contiguous() for part, found in parts.items()}
            floats[name] = weights.contiguous()
        else:
            stored[name] = tensor.to(getattr(torch, dtype))
            floats[name] = stored[name].float()
    config = json.loads((of / "config.json").read_text())
    config = {**config, "dtype": dtype}
    for name, content, more in (
        ("quantised", stored, {"quantization_config": dict(settings)}),
        ("floats", floats, {"dtype": "float32"}),
    ):
        shutil.copytree(of, place / name)
        save_file(content, place / name / WEIGHTS, {"format": "pt"})
        (place / name / "config.json").write_text(json.dumps({**config, **more}))
    return place / "quantised", place / "floats"


def eight_bit_float(byte: int) -> float:
    """What a byte of e4m3 stands for: a sign, four digits of an exponent, three of a fraction."""
    sign, exponent, fraction = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def _bytes(drawn: np.random.Generator, outputs: int, inputs: int) -> np.ndarray[Any, Any]:
    """Bytes of e4m3 that are numbers, of either sign, up to 1.75 in size."""
    return (drawn.integers(0, 0x3F, (outputs, inputs)) | drawn.integers(0, 2, (outputs, inputs)) << 7).astype(np.uint8)


def scaled(block: tuple[int, int], shape: Callable[[int, int], tuple[int, ...]], suffix: str, kind: str) -> Quantise:
    """Numbers of eight bits times the scale of their block; scales have this shape, and bfloat16's digits in `kind`."""

    def quantise(drawn: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, Tensor]:
        numbers = _bytes(drawn, outputs, inputs)
        down, across = -(-outputs // block[0]), -(-inputs // block[1])
        scales = torch.from_numpy(drawn.uniform(0.02, 0.3, (down, across))).to(torch.bfloat16)
        weights = np.zeros((outputs, inputs), np.float32)
        for row in range(outputs):
            for column in range(inputs):
                scale = scales[row // block[0], column // block[1]].item()
                weights[row, column] = eight_bit_float(int(numbers[row, column])) * scale
        parts = {
            "weight": torch.from_numpy(numbers).view(torch.float8_e4m3fn),
            f"weight{suffix}": scales.to(getattr(torch, kind)).reshape(shape(down, across)),
        }
        return parts, torch.from_numpy(weights)

    return quantise


def integers(drawn: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, Tensor]:
    """Integers of eight bits times the scale of their row."""
    numbers = drawn.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    scales = torch.from_numpy(drawn.uniform(0.001, 0.003, (outputs, 1))).to(torch.bfloat16)
    weights = np.zeros((outputs, inputs), np.float32)
    for row in range(outputs):
        for column in range(inputs):
            weights[row, column] = int(numbers[row, column]) * scales[row, 0].item()
    return {"weight": torch.from_numpy(numbers), "weight_scale": scales}, torch.from_numpy(weights)


def _words(numbers: np.ndarray[Any, Any], bits: int, columns: Sequence[int] | None = None) -> Tensor:
    """Each row's numbers in words of 32 bits, from the lowest bits on, in the order of these columns of a word."""
    rows, count = numbers.shape
    in_a_word = 32 // bits
    words = np.zeros((rows, count // in_a_word), np.uint32)
    for row in range(rows):
        for word in range(count // in_a_word):
            for place in range(in_a_word):
                column = columns[place] if columns else place
                words[row, word] |= np.uint32(int(numbers[row, word * in_a_word + column]) << place * bits)
    return torch.from_numpy(words.view(np.int32))


def grouped(
    form: str,
    bits: int = 4,
    group: int = 16,
    *,
    symmetric: bool = False,
    reordered: bool = False,
    kind: str = "float16",
) -> Quantise:
    """Numbers of few bits with a scale and a zero point for each group of inputs, stored by `form`.

    It is gptq, gptq_v2, awq or pack-quantized.
    """

    def quantise(drawn: np.random.Generator, outputs: int, inputs: int) -> tuple[Parts, Tensor]:
        of_group = group if group > 0 else inputs
        groups = np.arange(inputs) // of_group
        if reordered:
            groups = drawn.permutation(groups)
        numbers = drawn.integers(0, 2**bits, (outputs, inputs))
        count = inputs // of_group
        middle = np.full((outputs, count), 2 ** (bits - 1))
        zeros = middle if symmetric else drawn.integers(1, 2**bits, (outputs, count))
        scales = torch.from_numpy(drawn.uniform(0.3, 0.6, (outputs, count)) / 2**bits).to(getattr(torch, kind))
        weights = np.zeros((outputs, inputs), np.float32)
        for row in range(outputs):
            for column in range(inputs):
                place = groups[column]
                weights[row, column] = scales[row, place].item() * int(numbers[row, column] - zeros[row, place])
        order = torch.from_numpy(groups.astype(np.int32))
        return _as_stored(form, bits, numbers, zeros, scales, order, reordered, symmetric), torch.from_numpy(weights)

    return quantise


def _as_stored(
    form: str,
    bits: int,
    numbers: np.ndarray[Any, Any],
    zeros: np.ndarray[Any, Any],
    scales: Tensor,
    order: Tensor,
    reordered: bool,
    symmetric: bool,
) -> Parts:
    if form == "awq":
        columns = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": _words(numbers.T, bits, columns),
            "qzeros": _words(zeros.T, bits, columns),
            "scales": scales.T,
        }
    if form == "pack-quantized":
        packed = {
            "weight_packed": _words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(numbers.shape),
        }
        of_zeros = {} if symmetric else {"weight_zero_point": _words(zeros.T, bits).T}
        return packed | of_zeros | ({"weight_g_idx": order} if reordered else {})
    less = 1 if form == "gptq" else 0
    return {
        "qweight": _words(numbers, bits).T,
        "qzeros": _words(zeros.T - less, bits),
        "scales": scales.T,
        "g_idx": order,
    }
