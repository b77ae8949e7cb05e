"""A model's fingerprint: a hash that is quick to make at any size and changes when the model is retrained."""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ppd_runtime.models.checkpoint.config import weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.weights_card import card_of

_SAMPLES, _SAMPLE_BYTES = 8, 512
_IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


def model_fingerprint(info: ModelInfo) -> str:
    """SHA-256, in hexadecimal digits, over config.json and every tensor's name, dtype, shape and a sample of its bytes.

    Tensors of up to 4 KiB are read whole. Of larger ones, eight pieces of 512 bytes, spread over the tensor, are read:
    training changes nearly every number. The split of tensors into files does not matter.

    Raises:
        ValueError: for a file that cannot be read or is cut short.
    """
    return folder_fingerprint(info.folder, f"model {info.name!r}")


def folder_fingerprint(folder: Path, called: str) -> str:
    """`model_fingerprint` of any folder with config.json and safetensors; errors name it as it is `called`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    relevant = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    tensors = [tensor for path in weight_files(folder) for tensor in _tensors(called, path)]
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for name, about, sample in sorted(tensors):
        digest.update(f"\0{name}\0{about}\0".encode() + sample)
    return digest.hexdigest()


def fingerprints(info: ModelInfo) -> tuple[str, ...]:
    """The fingerprints of the model and of its quantisation source: parts trained for either fit."""
    card = card_of(info.folder)
    return (model_fingerprint(info), *([card.source_fingerprint] if card else []))


def _tensors(called: str, path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Name, dtype with shape, and a sample of each tensor of a safetensors file."""
    try:
        with path.open("rb") as file:
            header, start = _header(file)
            for name, tensor in header.items():
                first, last = (start + offset for offset in tensor["data_offsets"])
                yield name, f"{tensor['dtype']}{tensor['shape']}", _sample(file, first, last)
    except (OSError, EOFError, ValueError, TypeError, KeyError, struct.error) as error:
        raise ValueError(f"{called}: {path.name} cannot be read: {error}") from error


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The file's header, whose length is in the first 8 bytes, and the offset of the tensors' bytes."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > 2**30:
        raise ValueError("its header is longer than any")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _sample(file: BinaryIO, first: int, last: int) -> bytes:
    if last - first <= _SAMPLES * _SAMPLE_BYTES:
        return _read(file, first, last - first)
    places = np.linspace(first, last - _SAMPLE_BYTES, _SAMPLES).astype(np.int64)
    return b"".join(_read(file, int(place), _SAMPLE_BYTES) for place in places)


def _read(file: BinaryIO, place: int, length: int) -> bytes:
    file.seek(place)
    content = file.read(length)
    if len(content) < length:
        raise EOFError("it is cut short")
    return content
