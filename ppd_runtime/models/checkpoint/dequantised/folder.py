"""Writes a quantised folder as a folder of floats, once, into the cache folder."""

import copy
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.files.checksummed import version_of
from ppd_runtime.models.checkpoint.config import SINGLE, read_json, text_names_in, weight_files
from ppd_runtime.models.checkpoint.dequantised.schemes import scheme_of
from ppd_runtime.models.checkpoint.dequantised.stored import FLOATS, Matrix, Scheme, StoredTensor, stored_tensors
from ppd_runtime.models.checkpoint.kept_folders import begin_writing, find_or_make
from ppd_runtime.models.checkpoint.weight_cache import bytes_of, header_of

_FOLDER, _CARD = "floats", "floats_of.json"
_FORMAT = 1
_SETTINGS = (".json", ".jinja", ".model", ".txt")
_QUANTISED = ("quantization_config", "compression_config")
_OF_ACTIVATIONS = re.compile(r"\.(input|output|[qkv])_(scale|zero_point)$")
"""Scales by which activations or entries of caches would be rounded, which they are not here."""


def check_scheme(model: str, folder: Path) -> Scheme | None:
    """How a folder's weights are quantised; None if they are not.

    Raises:
        ValueError: for a way that is not read; no weights are.
    """
    if (settings := _settings(_config(folder))) is None:
        return None
    try:
        return scheme_of(settings)
    except ValueError as error:
        raise ValueError(f"model {model!r}: {error}; give the model that it was made of") from error


def folder_of_floats(model: str, folder: Path, scheme: Scheme) -> Path:
    """The folder with a quantised folder's weights as floats, written if there is none yet.

    It is in the half precision of config.json if that holds each weight of the matrices that are quantised, else in
    float32. Activations and entries of caches are not quantised.

    Raises:
        ValueError: for tensors that are missing or do not fit, which is found before weights are read; for weights that
            are not finite; or if the folder cannot be written.
    """
    return find_or_make(
        model, cache_folder() / _FOLDER, _CARD, partial(_about, folder), partial(_write, folder, scheme)
    )


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json")


def _settings(config: Mapping[str, Any]) -> Any:
    """What config.json says about quantised weights; a wrapper may say it of its text model."""
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        for name in _QUANTISED:
            if found := fields.get(name):
                return found
    return None


def _about(folder: Path) -> dict[str, Any]:
    files = sorted({folder / "config.json", *weight_files(folder), *_copied(folder)})
    return {"format": _FORMAT, "files": [[str(file.resolve()), *version_of(file)] for file in files]}


def _copied(folder: Path) -> Iterator[Path]:
    """Files that are no weights and hold nothing about them."""
    for path in folder.iterdir():
        of_weights = path.name == "config.json" or path.name.endswith(".index.json")
        if path.suffix in _SETTINGS and not of_weights and path.is_file():
            yield path


@dataclass(frozen=True)
class _Plan:
    """What is written: tensors by name, as they are stored or computed."""

    tensors: Mapping[str, Matrix | StoredTensor]
    dtype: torch.dtype
    """Of matrices that are computed; float32 is every tensor's."""

    def stored_as(self, of: Matrix | StoredTensor) -> torch.dtype:
        return self.dtype if isinstance(of, Matrix) or self.dtype == torch.float32 else FLOATS[of.dtype]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(of.shape) * self.stored_as(of).itemsize for of in self.tensors.values())

    def write(self, path: Path) -> None:
        with path.open("wb") as out:
            out.write(header_of({name: (self.stored_as(of), of.shape) for name, of in self.tensors.items()}, {}))
            for name, of in self.tensors.items():
                for piece in _finite(name, of) if isinstance(of, Matrix) else [of.whole()]:
                    out.write(bytes_of(piece.to(self.stored_as(of))))


def _plan(folder: Path, scheme: Scheme) -> dict[str, Matrix | StoredTensor]:
    """What is written; ValueError for tensors that do not fit together."""
    text_name = text_names_in(folder)
    stored = {name: of for name, of in stored_tensors(weight_files(folder)).items() if text_name(name) is not None}
    matrices = scheme.matrices(stored)
    if not matrices:
        raise ValueError("is quantised as its config.json says, but its files hold no such weights")
    used = {part.name for matrix in matrices.values() for part in matrix.parts.values()}
    tensors: dict[str, Matrix | StoredTensor] = {**matrices}
    for name, of in stored.items():
        if name in used or _OF_ACTIVATIONS.search(name):
            continue
        if of.dtype not in FLOATS or name in matrices or _is_left(name):
            raise ValueError(f"has {name} as {of.dtype} {list(of.shape)}, which is part of no weight that is read")
        tensors[name] = of
    return tensors


def _is_left(name: str) -> bool:
    """Whether a tensor is part of a quantised weight by its name."""
    return name.endswith(("_scale", "_scale_inv", "_scales", ".scales", ".qzeros", ".weight_zero_point"))


def _write(folder: Path, scheme: Scheme, new: Path, _: str) -> None:
    """Write the folder of floats."""
    config = _config(folder)
    tensors = _plan(folder, scheme)
    half = _half(config)
    fits = half is not None and all(
        torch.equal(piece.to(half).float(), piece)
        for name, of in tensors.items()
        if isinstance(of, Matrix)
        for piece in _finite(name, of)
    )
    plan = _Plan(tensors, half if fits and half else torch.float32)
    begin_writing(plan.num_bytes, cache_folder() / _FOLDER, folder)
    for path in _copied(folder):
        shutil.copyfile(path, new / path.name)
    (new / "config.json").write_text(json.dumps(_of_floats(config, plan.dtype), indent=2) + "\n", encoding="utf-8")
    plan.write(new / SINGLE)


def _finite(name: str, matrix: Matrix) -> Iterator[Tensor]:
    for piece in matrix.pieces():
        if not torch.isfinite(piece).all():
            raise ValueError(f"is damaged: {name} has a weight that is not finite")
        yield piece


def _half(config: Mapping[str, Any]) -> torch.dtype | None:
    """The half precision that config.json names."""
    text = config.get("text_config")
    fields = {**(text if isinstance(text, dict) else {}), **config}
    named = str(fields.get("dtype") or fields.get("torch_dtype")).removeprefix("torch.")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(named)


def _of_floats(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the folder of floats."""
    changed = copy.deepcopy(dict(config))
    text = changed.get("text_config")
    for fields in (changed, *([text] if isinstance(text, dict) else [])):
        for name in (*_QUANTISED, "torch_dtype", "transformers_weights"):
            fields.pop(name, None)
        fields["dtype"] = str(dtype).removeprefix("torch.")
    return changed
