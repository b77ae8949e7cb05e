"""A model's matrices in a format of few bits, in a file that a host's processes share."""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppd_runtime.files.cache_folder import artifact
from ppd_runtime.files.checksummed import checksum
from ppd_runtime.files.large_pages import read_in_large_pages
from ppd_runtime.models.checkpoint.config import (
    AGAIN,
    QUANTISED,
    QUANTISED_CARD,
    layer_number,
    model_config,
    skeleton_of,
    weight_files,
)
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.gguf.kept import is_kept
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.checkpoint.names import names_in_model
from ppd_runtime.models.checkpoint.quantisable import EMBEDDING, HEAD, embedding_weight, quantised_linears
from ppd_runtime.models.checkpoint.weight_cache import DTYPES, bytes_of, header_of, map_tensors, version_of
from ppd_runtime.models.checkpoint.weights_card import card_of
from ppd_runtime.models.native.packing import LAYOUT, pack, packed_bytes
from ppd_runtime.models.native.quantising import FORMAT_OF, quantise

logger = logging.getLogger(__name__)
RECIPE = 1
"""The version of quantising: another gives other weights."""
FORMAT_OF_HEAD = "int8"
"""The head's format beside any other: 4 bits harm the head most."""


def packed_tensors(info: ModelInfo, last: int) -> dict[str, Tensor]:
    """The packed matrices of the first layers, the head and the embedding, by name; all processes of a host share them.

    Raises:
        ValueError: if they can be kept nowhere, or a file cannot be read.
    """
    path = packed_file(info)
    try:
        tensors = dict(map_tensors(path))
    except OSError as error:
        raise ValueError(f"model {info.name!r}: {path.name} cannot be read: {one_line(error)}") from error
    found = {name: t for name, t in tensors.items() if t.dtype == torch.uint8 and layer_number(name) < last}
    if EMBEDDING in found and model_config(info.folder).tie_word_embeddings:
        found.setdefault(HEAD, found[EMBEDDING])
    return found


def check_packed(info: ModelInfo) -> None:
    """Read the file of packed matrices into memory; raise ValueError if a quantised folder's is damaged."""
    path = packed_file(info)
    if not (card := card_of(info.folder)):
        return  # a kept file is checked whenever it is looked for
    try:
        read_in_large_pages(path)
        if is_kept(info.folder):
            return  # it was checked when it was looked for
        found = checksum(path)
    except OSError as error:
        raise ValueError(f"model {info.name!r}: {path.name} cannot be read: {one_line(error)}") from error
    if found != card.checksum:
        way_out = "quantise the model again with `ppd quantize`"
        raise ValueError(f"model {info.name!r}: {path.name} is not what {QUANTISED_CARD} describes; {way_out}")


def packed_file(info: ModelInfo) -> Path:
    """The file with a model's packed matrices: a quantised folder's own, else a kept one, made if there is none."""
    if card_of(info.folder):
        return info.folder / QUANTISED
    files = weight_files(info.folder)
    ingredients = {
        "weights": info.weights,
        "head": FORMAT_OF_HEAD,
        "recipe": [RECIPE, LAYOUT],
        "of": [(str(path.resolve()), version_of(path)) for path in files],
    }
    return artifact(ingredients, partial(_keep, info), ".safetensors")


def _keep(info: ModelInfo, path: Path) -> None:
    with PackedModel(info, matrices_alone=True) as packed:
        packed.write(path)


class _Place(NamedTuple):
    """A tensor of an open file."""

    file: Any
    name: str
    """In that file."""

    def about(self) -> Any:
        """Its dtype and shape, without its numbers."""
        return self.file.get_slice(self.name)


@dataclass(frozen=True)
class _Source:
    """Where a tensor comes from, and what it becomes."""

    place: _Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    weights: str | None
    """The format it is packed in."""


class PackedModel(contextlib.ExitStack):
    """A model's matrices packed in `info.weights`, and its other tensors as they are stored, to be written one by one.

    Its files are open until the `with` block ends.

    Args:
        info: the model, with the format.
        matrices_alone: leave the other tensors out.

    Raises:
        ValueError: for files that cannot be read, lack a matrix, or have one of another shape.
    """

    def __init__(self, info: ModelInfo, matrices_alone: bool = False) -> None:
        super().__init__()
        self._info = info
        with contextlib.ExitStack() as opened:
            places = self._places(opened)
            skeleton = skeleton_of(model_config(info.folder), info.num_layers)
            matrices, tied = quantised_linears(skeleton), skeleton.config.tie_word_embeddings
            self._sources = dict[str, _Source]()
            for name, tensor in skeleton.state_dict().items():  # in the order in which a pass reads them
                at = embedding_weight(skeleton) if name == HEAD and tied and name not in places else name
                if name in matrices:
                    self._sources[name] = self._matrix(places, name, at, tensor.shape)
                elif name in places and not matrices_alone:
                    self._sources[name] = self._other(places[name], name)
            self.push(opened.pop_all())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, once written."""
        return sum(torch.Size(of.shape).numel() * of.dtype.itemsize for of in self._sources.values())

    def write(self, path: Path) -> None:
        """Write them as a safetensors file that `map_tensors` reads.

        Raises:
            ValueError: for a number that the format cannot have, or a file that cannot be read.
            OSError: if it cannot be written.
        """
        logger.info("quantising %s to %s", self._info.name, self._info.weights)
        with path.open("wb") as out:
            out.write(header_of({name: (of.dtype, of.shape) for name, of in self._sources.items()}, {}))
            for name, of in self._sources.items():
                out.write(bytes_of(self._tensor(name, of)))

    def _tensor(self, name: str, of: _Source) -> Tensor:
        try:
            tensor: Tensor = of.place.file.get_tensor(of.place.name)
        except SafetensorError as error:
            raise self._unusable(f"{name} cannot be read: {one_line(error)}") from error
        return pack(quantise(tensor, of.weights)) if of.weights else tensor

    def _places(self, opened: contextlib.ExitStack) -> dict[str, _Place]:
        """The place of each tensor, by its name in the model."""
        places, name_in_model = dict[str, _Place](), names_in_model(self._info.folder, self._info.num_layers)
        for path in weight_files(self._info.folder):
            try:
                file = opened.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise self._unusable(f"{path.name} cannot be read: {one_line(error)}") from error
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if found := name_in_model(name):
                    places[found] = _Place(file, name)
        return places

    def _matrix(self, places: dict[str, _Place], name: str, at: str, shape: Iterable[int]) -> _Source:
        if (place := places.get(at)) is None:
            raise self._unusable(f"its files lack {name}")
        if (found := place.about().get_shape()) != list(shape):
            raise self._unusable(f"{name} has another shape than config.json says: {found}")
        weights = FORMAT_OF_HEAD if name == HEAD else self._info.weights
        assert weights
        outputs, inputs = shape
        size = packed_bytes(FORMAT_OF[weights], outputs, inputs)
        return _Source(place, torch.uint8, (size,), weights)

    def _unusable(self, reason: str) -> ValueError:
        return ValueError(f"model {self._info.name!r}: {reason}; {AGAIN}")

    def _other(self, place: _Place, name: str) -> _Source:
        about = place.about()
        dtype = DTYPES.get(about.get_dtype())
        if dtype is None or dtype == torch.uint8:
            raise ValueError(f"model {self._info.name!r}: {name} is stored in {about.get_dtype()}, not in floats")
        return _Source(place, dtype, tuple(about.get_shape()), None)
