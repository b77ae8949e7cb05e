"""A GGUF file as a model folder: written into the cache folder when the file is first opened, and used from then on."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.files.checksummed import checksum, version_of
from ppd_runtime.models.checkpoint.config import QUANTISED, SINGLE
from ppd_runtime.models.checkpoint.gguf.architectures import architecture_of
from ppd_runtime.models.checkpoint.gguf.config import config_of
from ppd_runtime.models.checkpoint.gguf.naming import Naming
from ppd_runtime.models.checkpoint.gguf.reader import parts_of, read_gguf
from ppd_runtime.models.checkpoint.gguf.tensors import check_kinds, plan_tensors, rope_factors_of
from ppd_runtime.models.checkpoint.gguf.tokenizer import BESIDE, write_tokenizer
from ppd_runtime.models.checkpoint.kept_folders import begin_writing, find_or_make
from ppd_runtime.models.checkpoint.weights_card import WeightsCard
from ppd_runtime.models.native.library import is_available
from ppd_runtime.models.native.packing import LAYOUT
from ppd_runtime.settings.config import GGUF

_FOLDER, _ABOUT = "gguf", "made_of.json"
_FORMAT = 2
_RECIPE = 0  # its numbers and scales were chosen by another program


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file, which may not exist."""
    return model.lower().endswith(".gguf") and not os.path.isdir(model)  # noqa: PTH112 (a Path raises for long names)


def is_kept(folder: Path) -> bool:
    """Whether a model folder was made from a GGUF file."""
    return (folder / _ABOUT).exists()


def kept_folder(model: str) -> Path:
    """The folder of a GGUF file's model, written if there is none yet.

    Its weights have the file's numbers. Each matrix of few bits keeps its format, stacked experts' too; tensors that
    have few bits only in the file, such as gates and ups in two formats, become float32.

    Args:
        model: the file's path, as it was given.

    Raises:
        ValueError: for a file that is missing, damaged or not supported; or if the folder cannot be written.
    """
    path = Path(model)
    if not path.is_file():
        raise ValueError(f"model {model!r}: no such GGUF file here; give one, a folder, a hub name or 'demo'")
    try:
        _about(path)
    except ValueError as error:
        raise ValueError(f"model {model!r} {error}") from error
    except OSError as error:
        raise ValueError(f"model {model!r} cannot be read: {error.strerror or error}") from error
    return find_or_make(model, cache_folder() / _FOLDER, _ABOUT, partial(_about, path), partial(_write, path))


def _about(path: Path) -> dict[str, Any]:
    """A folder's ingredients, which give its name."""
    beside = path.parent / BESIDE
    files = [*parts_of(path), *([beside] if beside.exists() else [])]
    return {"format": [_FORMAT, LAYOUT], "files": [[str(file.resolve()), *version_of(file)] for file in files]}


def _write(path: Path, folder: Path, name: str) -> None:
    """Write the folder of this name."""
    gguf = read_gguf(path)
    architecture, metadata = architecture_of(gguf)
    check_kinds(gguf)
    config = config_of(metadata, architecture, rope_factors_of(gguf))
    plan = plan_tensors(gguf, Naming(metadata, architecture, config), config)
    if plan.is_packed and not is_available(torch.device("cpu"), torch.float32):
        raise ValueError("has weights of few bits, which need Linux and PyTorch 2.8 or newer; give a file in F16")
    begin_writing(plan.num_bytes, cache_folder() / _FOLDER, path)
    ends = write_tokenizer(gguf, config.vocab_size, folder)
    config.dtype = plan.dtype
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends or None}) + "\n")
    weights = folder / (QUANTISED if plan.is_packed else SINGLE)
    plan.write(weights, {"made_of": str(path)})
    if plan.is_packed:
        WeightsCard(GGUF, plan.head, _RECIPE, str(path), name, checksum(weights)).write(folder)
