"""Writes a quantised folder once into the cache folder: as floats, or with its numbers of few bits."""

import copy
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.files.checksummed import checksum, version_of
from ppd_runtime.models.checkpoint.config import (
    QUANTISED,
    SINGLE,
    model_config,
    read_json,
    skeleton_of,
    text_names_in,
    weight_files,
)
from ppd_runtime.models.checkpoint.dequantised.schemes import scheme_of
from ppd_runtime.models.checkpoint.dequantised.stored import FLOATS, Matrix, Scheme, StoredTensor, stored_tensors
from ppd_runtime.models.checkpoint.kept_folders import begin_writing, find_or_make
from ppd_runtime.models.checkpoint.names import names_in_model
from ppd_runtime.models.checkpoint.quantisable import HEAD, quantised_linears
from ppd_runtime.models.checkpoint.weight_cache import bytes_of, header_of
from ppd_runtime.models.checkpoint.weights_card import WeightsCard
from ppd_runtime.models.native.formats import NumberFormat
from ppd_runtime.models.native.packing import LAYOUT, pack, packed_bytes
from ppd_runtime.settings.config import FLOATS as UNPACKED
from ppd_runtime.settings.config import STORED

_FOLDER, _CARD = "floats", "floats_of.json"
_FORMAT = 1
_RECIPE = 0  # another program has chosen the numbers
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


def folder_as_stored(model: str, folder: Path, scheme: Scheme) -> Path:
    """The folder with a quantised folder's matrices in formats of few bits, written if there is none yet.

    Each weight has the value that it has in `folder_of_floats`. Matrices that no format holds are in float32, as are
    all other tensors.

    Raises:
        ValueError: as for `folder_of_floats`; or if no format holds any of the matrices.
    """
    about = partial(_about, folder, STORED)
    return find_or_make(model, cache_folder() / _FOLDER, _CARD, about, partial(_write_packed, model, folder, scheme))


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


def _about(folder: Path, weights: str = UNPACKED) -> dict[str, Any]:
    files = sorted({folder / "config.json", *weight_files(folder), *_copied(folder)})
    formats = {"format": _FORMAT} if weights == UNPACKED else {"format": [_FORMAT, LAYOUT], "weights": weights}
    return {**formats, "files": [[str(file.resolve()), *version_of(file)] for file in files]}


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
    """Of matrices that are computed as floats; float32 is every tensor's."""
    forms: Mapping[str, NumberFormat] = field(default_factory=dict)
    """Of matrices that are packed."""

    def stored_as(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """A tensor's dtype and shape in the file."""
        of = self.tensors[name]
        if form := self.forms.get(name):
            outputs, inputs = of.shape
            return torch.uint8, (packed_bytes(form, outputs, inputs),)
        if isinstance(of, Matrix) or self.dtype == torch.float32:
            return self.dtype, of.shape
        return FLOATS[of.dtype], of.shape

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in map(self.stored_as, self.tensors))

    def write(self, path: Path) -> None:
        with path.open("wb") as out:
            out.write(header_of({name: self.stored_as(name) for name in self.tensors}, {}))
            for name, of in self.tensors.items():
                for piece in self._pieces(name, of):
                    out.write(bytes_of(piece))

    def _pieces(self, name: str, of: Matrix | StoredTensor) -> Iterator[Tensor]:
        if name in self.forms and isinstance(of, Matrix) and (numbers := of.packed()):
            if not numbers.are_finite:
                raise _not_finite(name)
            yield pack(numbers)
        else:
            dtype, _ = self.stored_as(name)
            yield from (piece.to(dtype) for piece in (_finite(name, of) if isinstance(of, Matrix) else [of.whole()]))


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
    numbers = any(isinstance(of, Matrix) and of.numbers for of in tensors.values())
    _write_plan(plan, folder, new / SINGLE, f"; weights={STORED!r} may keep its few bits" if numbers else "")


def _write_packed(model: str, folder: Path, scheme: Scheme, new: Path, name: str) -> None:
    """Write the folder with packed matrices, which have their names in the model."""
    tensors, forms = dict[str, Matrix | StoredTensor](), dict[str, NumberFormat]()
    found = _plan(folder, scheme)
    in_model = _packable(folder, found)
    for own, of in found.items():
        numbers = of.packed() if isinstance(of, Matrix) and own in in_model else None
        if numbers:
            forms[in_model[own]] = numbers.form
        tensors[in_model[own] if numbers else own] = of
    if not forms:
        raise ValueError(
            f"has no matrix of a layer that weights={STORED!r} can keep: of whole numbers from -128 to 127, each 32 "
            "neighbouring inputs with one scale that float16 holds; leave weights out"
        )
    _write_plan(_Plan(tensors, torch.float32, forms), folder, new / QUANTISED)
    head = STORED if HEAD in forms else UNPACKED
    WeightsCard(STORED, head, _RECIPE, model, name, checksum(new / QUANTISED)).write(new)


def _packable(folder: Path, tensors: Mapping[str, Matrix | StoredTensor]) -> dict[str, str]:
    """The names in the model of matrices that may be packed: those that are a linear layer's whole weight."""
    config = model_config(folder)
    linears = quantised_linears(skeleton_of(config, config.num_hidden_layers))
    name_in_model = names_in_model(folder, config.num_hidden_layers)
    found = {name: name_in_model(name) or "" for name in tensors}
    times = Counter(found.values())
    return {
        name: inner
        for name, inner in found.items()
        if times[inner] == 1 and inner in linears and tensors[name].shape == tuple(linears[inner].weight.shape)
    }


def _write_plan(plan: _Plan, folder: Path, weights: Path, advice: str = "") -> None:
    """Write the plan's tensors, and the other files of a folder beside them."""
    begin_writing(plan.num_bytes, cache_folder() / _FOLDER, folder, advice)
    for path in _copied(folder):
        shutil.copyfile(path, weights.parent / path.name)
    text = json.dumps(_of_floats(_config(folder), plan.dtype), indent=2)
    (weights.parent / "config.json").write_text(text + "\n", encoding="utf-8")
    plan.write(weights)


def _not_finite(name: str) -> ValueError:
    return ValueError(f"is damaged: {name} has a weight that is not finite")


def _finite(name: str, matrix: Matrix) -> Iterator[Tensor]:
    for piece in matrix.pieces():
        if not torch.isfinite(piece).all():
            raise _not_finite(name)
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
