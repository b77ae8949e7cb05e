"""Where a model's files are: the demo's, a local folder, or a hub's at one revision; code among them is not fetched."""

import contextlib
import os
import re
from importlib import resources
from pathlib import Path

DEMO = "demo"
_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
"""What is fetched: no other format of weights, and no code."""


def find_model(model: str) -> tuple[str, Path]:
    """A model's name, of a hub's with the commit it is pinned to, and its folder.

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
    """Raise ValueError for a folder that holds a model for other programs alone."""
    with contextlib.suppress(OSError):  # what cannot be read is told by who reads it
        suffixes = {path.suffix.lower() for path in folder.iterdir()}
        if ".gguf" in suffixes and not suffixes & {".safetensors", ".json"}:
            raise ValueError(f"model {model!r}: a folder of GGUF files; give one of them, such as {model}/NAME.gguf")


def _download(model: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # only hub names need the network

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub client raises many kinds, network errors of three libraries among them
        raise ValueError(
            f"model {model!r} is neither a folder here nor a model that the hub gave: {one_line(error)}; "
            "check the name or give a local folder"
        ) from error


def one_line(error: BaseException) -> str:
    """What went wrong in a library, for the end of a line of ours."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
