"""A GGUF file as a model folder: written into the cache folder when the file is first opened, and used from then on."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ppd_runtime.files.cache_folder import cache_folder, ingredients_name, with_way_out
from ppd_runtime.files.checksummed import checksum, count_as_used, has_checksum, only_one, version_of
from ppd_runtime.models.checkpoint.config import QUANTISED, SINGLE, read_json
from ppd_runtime.models.checkpoint.gguf.architectures import architecture_of
from ppd_runtime.models.checkpoint.gguf.config import config_of
from ppd_runtime.models.checkpoint.gguf.naming import Naming
from ppd_runtime.models.checkpoint.gguf.reader import parts_of, read_gguf
from ppd_runtime.models.checkpoint.gguf.tensors import TensorPlan, check_kinds, plan_tensors, rope_factors_of
from ppd_runtime.models.checkpoint.gguf.tokenizer import BESIDE, write_tokenizer
from ppd_runtime.models.checkpoint.weights_card import WeightsCard
from ppd_runtime.models.native.library import is_available
from ppd_runtime.models.native.packing import LAYOUT
from ppd_runtime.settings.config import GGUF

logger = logging.getLogger(__name__)
_FOLDER, _ABOUT = "gguf", "made_of.json"
_FORMAT = 1
_RECIPE = 0  # its numbers and scales were chosen by another program
_PATIENCE_S = 1800.0  # for another process that writes the same model
_TAKES_LONG = 2**28
"""From this many bytes of weights, a start logs why it takes long."""
_UNUSED_S, _ORPHANED_S = 14 * 24 * 3600.0, 24 * 3600.0
"""As with other kept copies, making one removes those unopened for `_UNUSED_S`, or for `_ORPHANED_S` if the file has
gone or changed."""


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file, which may not exist."""
    return model.lower().endswith(".gguf") and not os.path.isdir(model)  # noqa: PTH112 (a Path raises for long names)


def is_kept(folder: Path) -> bool:
    """Whether a model folder was made from a GGUF file."""
    return (folder / _ABOUT).exists()


def kept_folder(model: str) -> Path:
    """The folder of a GGUF file's model, written if there is none yet.

    Its weights have the file's numbers. Each matrix of few bits keeps its format; tensors that have few bits only in
    the file, such as stacked experts, become float32.

    Args:
        model: the file's path, as it was given.

    Raises:
        ValueError: for a file that is missing, damaged or not supported; or if the folder cannot be written.
    """
    path = Path(model)
    if not path.is_file():
        raise ValueError(f"model {model!r}: no such GGUF file here; give one, a folder, a hub name or 'demo'")
    try:
        about = _about(path)
    except ValueError as error:
        raise ValueError(f"model {model!r} {error}") from error
    except OSError as error:
        raise ValueError(f"model {model!r} cannot be read: {error.strerror or error}") from error
    place = cache_folder() / _FOLDER
    folder = place / ingredients_name(about)
    if _is_whole(folder):
        count_as_used(folder / _ABOUT)
        return folder
    try:
        place.mkdir(exist_ok=True)
        with only_one(place, folder.name, _PATIENCE_S):
            if not _is_whole(folder):
                _remove_unused(place)
                if folder.exists():
                    logger.warning("%s is damaged, so it is removed and made again", folder)
                    shutil.rmtree(folder)
                _write(path, about, folder)
    except ValueError as error:
        raise ValueError(f"model {model!r} {error}") from error
    except OSError as error:
        raise ValueError(f"model {model!r} cannot be kept: {with_way_out(error)}") from error
    return folder


def _about(path: Path) -> dict[str, Any]:
    """A folder's ingredients, which give its name."""
    beside = path.parent / BESIDE
    files = [*parts_of(path), *([beside] if beside.exists() else [])]
    return {"format": [_FORMAT, LAYOUT], "files": [[str(file.resolve()), *version_of(file)] for file in files]}


def _write(path: Path, about: dict[str, Any], folder: Path) -> None:
    """Write the folder; it appears when it is whole, and not at all for a file that is refused."""
    gguf = read_gguf(path)
    architecture, metadata = architecture_of(gguf)
    check_kinds(gguf)
    config = config_of(metadata, architecture, rope_factors_of(gguf))
    plan = plan_tensors(gguf, Naming(metadata, architecture, config), config)
    if plan.is_packed and not is_available(torch.device("cpu"), torch.float32):
        raise ValueError("has weights of few bits, which need Linux and PyTorch 2.8 or newer; give a file in F16")
    _check_room(plan.num_bytes, folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as making:
        unfinished = Path(making, "model")
        unfinished.mkdir()
        ends = write_tokenizer(gguf, config.vocab_size, unfinished)
        config.dtype = plan.dtype
        config.save_pretrained(unfinished)
        (unfinished / "generation_config.json").write_text(json.dumps({"eos_token_id": ends or None}) + "\n")
        level = logging.WARNING if plan.num_bytes > _TAKES_LONG else logging.INFO
        logger.log(level, "%s is written as a model folder, once, to %s", path, folder)
        weights = unfinished / (QUANTISED if plan.is_packed else SINGLE)
        plan.write(weights, {"made_of": str(path)})
        if plan.is_packed:
            _card(plan, path, folder.name, weights).write(unfinished)
        if about != _about(path):
            raise ValueError("has changed meanwhile; open it again")
        checksums = {file.name: checksum(file) for file in sorted(unfinished.iterdir())}
        (unfinished / _ABOUT).write_text(json.dumps({**about, "checksums": checksums}, indent=2) + "\n")
        unfinished.replace(folder)


def _card(plan: TensorPlan, path: Path, name: str, weights: Path) -> WeightsCard:
    return WeightsCard(GGUF, plan.head, _RECIPE, str(path), name, checksum(weights))


def _check_room(num_bytes: int, place: Path) -> None:
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        needs = f"needs {num_bytes / 1e9:.3g} GB in {place}, and {free / 1e9:.3g} GB are free"
        raise ValueError(f"{needs}; free some, or set XDG_CACHE_HOME to another folder")


def _is_whole(folder: Path) -> bool:
    """Whether the folder exists, with the files that were written."""
    try:
        checksums = read_json(folder / _ABOUT)["checksums"]
        return all(has_checksum(folder / name, value) for name, value in checksums.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _remove_unused(place: Path) -> None:
    """Remove folders that nobody opens any more, and what a killed process left."""
    for old in place.iterdir():
        with contextlib.suppress(OSError, ValueError):  # another removes it
            about = old / _ABOUT
            used = (about if about.exists() else old).stat().st_mtime
            if old.is_dir() and time.time() - used > (_UNUSED_S if _is_of_use(about) else _ORPHANED_S):
                shutil.rmtree(old)  # a process that has mapped its weights keeps them


def _is_of_use(about: Path) -> bool:
    """Whether what a folder was made of is still the same."""
    try:
        files = read_json(about)["files"]
        return all(version_of(Path(file)) == version for file, *version in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False
