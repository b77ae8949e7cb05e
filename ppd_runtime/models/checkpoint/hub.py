"""Finds a model's files: the demo's, a local folder, or the hub's at one revision, of which no code is fetched."""

import contextlib
import logging
import os
import re
from importlib import resources
from pathlib import Path

logger = logging.getLogger(__name__)
DEMO = "demo"
_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""What is fetched: no other format of weights, and no code."""
_SETTINGS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
"""A model without these writes other texts."""


def find_model(model: str) -> tuple[str, Path]:
    """A model's name and folder; a hub model's name has its pinned commit.

    Args:
        model: a local folder, a hub name, one with a revision (`name@branch`, `name@commit`), or "demo".

    Raises:
        ValueError: no such model.
    """
    if model == DEMO:
        return model, Path(str(resources.files("ppd_runtime.models") / "demo"))
    if not model:
        raise ValueError(f"model {model!r}: give a folder, a hub name or 'demo'")
    if os.path.isdir(model):  # noqa: PTH112 (a Path raises where a name is too long)
        _check_format(model, Path(model))
        return model, Path(model)
    name, _, revision = model.partition("@")
    if os.path.exists(model) or model.startswith((".", "/", "~")) or name.count("/") > 1:  # noqa: PTH110
        raise ValueError(f"model {model!r}: no such folder; give a folder, a hub name or 'demo'")
    if "@" in model and not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", revision):
        raise ValueError(f"model {model!r}: {revision!r} is no revision; give a branch, a tag or a commit behind the @")
    folder = _download(model, name, revision or None)
    return f"{name}@{folder.name}", folder


def _check_format(model: str, folder: Path) -> None:
    """Raise ValueError for a folder with a model only for other programs."""
    with contextlib.suppress(OSError):  # whoever reads the folder reports errors
        suffixes = {path.suffix.lower() for path in folder.iterdir()}
        if ".gguf" in suffixes and not suffixes & {".safetensors", ".json"}:
            raise ValueError(f"model {model!r}: a folder of GGUF files; give one of them, such as {model}/NAME.gguf")


def _download(model: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # only hub names need the network

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub client raises many kinds, network errors of three libraries among them
        if here := _without_the_hub(name, revision, error):
            return here
        raise ValueError(
            f"model {model!r} is neither a folder here nor a model that the hub gave: {one_line(error)}; "
            "check the name or give a local folder"
        ) from error


def _without_the_hub(name: str, revision: str | None, error: Exception) -> Path | None:
    """The cached files of a model, if `error` says that the hub cannot be reached.

    Other programs fetch only the files that they read, which are enough. Whoever reads the weights reports if they are
    missing.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    if not isinstance(error, LocalEntryNotFoundError):
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except IncompleteSnapshotError as incomplete:
        folder = Path(incomplete.snapshot_path)
    except LocalEntryNotFoundError:
        return None
    listed = {file.path for file in get_cached_repo_tree(name, revision=folder.name)}
    if lacking := [file for file in _SETTINGS if file in listed and not (folder / file).is_file()]:
        files = ", ".join(lacking)
        logger.warning("%s lacks %s, and the hub cannot be reached; %s", folder, files, fetched_with(name, folder.name))
    return folder


def fetched_with(name: str, revision: str = "") -> str:
    """Advice if files of a hub's model, perhaps `name@commit`, are missing."""
    name, _, commit = name.partition("@")
    return f"fetch it where the hub can be reached, with `hf download {name} --revision {revision or commit}`"


def one_line(error: BaseException) -> str:
    """A library's error on one line, to end our message with."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
