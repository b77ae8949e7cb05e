"""Model folders quantised as other programs store them, and the floats that their numbers stand for.

Each matrix is computed here number by number, from the format's description.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
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
        if ".layers." in name and tensor.dim() == 2:
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
