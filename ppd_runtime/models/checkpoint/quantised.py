"""A model's matrices in a format of few bits: a copy of them that a host's processes share."""

import logging
from functools import partial
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ppd_runtime.files.cache_folder import artifact
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of, weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.quantisable import HEAD, quantised_linears
from ppd_runtime.models.checkpoint.weight_cache import map_tensors, version_of
from ppd_runtime.models.native.formats import pack, quantise

logger = logging.getLogger(__name__)
_RECIPE = 1
"""Of numbers and scales: another one gives other weights."""
_EMBEDDING = "model.embed_tokens.weight"
_OF_HEAD = "int8"
"""The head's format, whatever the layers': with 4 bits it costs most."""


def packed_tensors(info: ModelInfo, first: int, last: int) -> dict[str, Tensor]:
    """The packed matrices of layers `first` to `last` and of the head, by name; all processes of a host share them.

    Those of earlier layers, which stand there without memory, are one number, shown again and again.

    Raises:
        ValueError: where they can be kept nowhere, or a file cannot be read.
    """
    found = {}
    for name, tensor in map_tensors(packed_file(info)):
        layer = first if name == HEAD else int(name.split(".")[2])
        if layer < last:
            found[name] = tensor if layer >= first else tensor.new_zeros(()).expand(tensor.shape)
    return found


def packed_file(info: ModelInfo) -> Path:
    """The file that holds a model's packed matrices, made where there is none."""
    files = weight_files(info.folder)
    ingredients = {
        "weights": info.weights,
        "head": _OF_HEAD,
        "recipe": _RECIPE,
        "of": [(str(path.resolve()), version_of(path)) for path in files],
    }
    return artifact(ingredients, partial(_quantise, info), ".safetensors")


def _quantise(info: ModelInfo, path: Path) -> None:
    assert info.weights
    logger.info("quantising %s to %s", info.name, info.weights)
    names = quantised_linears(skeleton_of(model_config(info.folder), info.num_layers))
    packed: dict[str, Tensor] = {}
    for file in weight_files(info.folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in names:
                    packed[name] = _packed(tensors.get_tensor(name), _OF_HEAD if name == HEAD else info.weights)
                elif name == _EMBEDDING and HEAD not in packed:  # the head may share it
                    packed[HEAD] = _packed(tensors.get_tensor(name), _OF_HEAD)
    order = [name for name in names if name in packed]
    save_file({name: packed[name] for name in order}, path)


def _packed(matrix: Tensor, weights: str) -> Tensor:
    return pack(*quantise(matrix, weights), weights)
