"""The user's cache folder: files of compiled code and of findings, named by a hash of all that went into them."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ppd_runtime.cost_model.tradeoff import whole_file


def cache_folder() -> Path:
    """The user's own cache folder, made if need be: `$XDG_CACHE_HOME/ppd_runtime`, or in `~/.cache`.

    Raises:
        ValueError: where it cannot be made, or others may put code there that would be run here.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "ppd_runtime"
    way_out = "make it your own alone (chmod 700), or set XDG_CACHE_HOME to another folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise ValueError(f"cache folder {folder}: {error.strerror}; {way_out}") from error
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise ValueError(f"cache folder {folder} holds code to run and others may write there; {way_out}")
    return folder


def ingredients_name(ingredients: Mapping[str, Any]) -> str:
    """The name that stands for `ingredients` (JSON values): 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:32]


def capabilities(device: torch.device) -> list[str]:
    """What a device can do that decides which code is possible, and fast, on it."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    return sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)


def artifact(ingredients: Mapping[str, Any], make: Callable[[Path], None], suffix: str = ".pt2") -> Path:
    """The file made from `ingredients` (JSON values), by `make(path)` where nobody has made it yet.

    Two processes that make the same file at once both succeed, and readers only ever see a whole one.
    """
    path = cache_folder() / f"{ingredients_name(ingredients)}{suffix}"
    if not path.exists():
        with whole_file(path) as unfinished:
            make(unfinished)
    return path
