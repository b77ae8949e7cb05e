"""A folder of a model whose weights are packed once and for all: what `ppd quantize` writes."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.files.checksummed import checksum
from ppd_runtime.models.checkpoint.config import QUANTISED
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.quantised import FORMAT_OF_HEAD, RECIPE, PackedModel
from ppd_runtime.models.checkpoint.weights_card import WeightsCard, card_of

_COPIED = (".json", ".jinja", ".model", ".txt")
"""Endings of a folder's files that are no weights: its configuration and tokenizer."""


def quantise_model(model: str, out: Path, weights: str) -> WeightsCard:
    """Write a folder that holds the model with weights of few bits; it appears when it is whole.

    Its numbers are those that the `weights` setting gives the model itself.

    Args:
        model: see `describe`.
        out: the folder; there is none yet.
        weights: int8 or int4.

    Raises:
        ValueError: for a model that cannot have the format or is quantised already, a folder that exists or cannot be
            written, or too little room.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists; give a folder that is not there yet")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: give a folder in one that exists")
    info = describe(model, weights)
    if card := card_of(info.folder):
        raise ValueError(f"model {model!r} has {card.weights} weights already, made of {card.source!r}; give that")
    source = model_fingerprint(info)
    with PackedModel(info) as packed, atomic_file(out) as folder:
        _check_room(out, packed.num_bytes)
        folder.mkdir()
        for file in _other_files(info):
            copy = folder / file.relative_to(info.folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        packed.write(folder / QUANTISED)
        found = checksum(folder / QUANTISED)
        card = WeightsCard(weights, FORMAT_OF_HEAD, RECIPE, info.name, source, found)
        card.write(folder)
    return card


def _other_files(info: ModelInfo) -> Iterator[Path]:
    """The model's files that are no weights, and those of its trained parts."""
    for path in sorted(info.folder.iterdir()):
        if path.suffix in _COPIED and not path.name.endswith(".index.json") and path.is_file():
            yield path
        elif (path / f"{path.name}.json").is_file():
            yield from (file for file in sorted(path.iterdir()) if file.is_file())


def _check_room(out: Path, num_bytes: int) -> None:
    with contextlib.suppress(OSError):  # writing fails too
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            found = f"needs {num_bytes / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free there"
            raise ValueError(f"{out}: {found}; make room, or give a folder elsewhere")
