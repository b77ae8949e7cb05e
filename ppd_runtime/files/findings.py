"""Measurements of this machine, kept in the cache folder: who asks first measures, all others read."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.files.cache_folder import cache_folder, ingredients_name
from ppd_runtime.files.checksummed import find, keep


def kept_finding(
    kind: str, about: Mapping[str, Any], names: Sequence[str], measure: Callable[[], Sequence[float]]
) -> tuple[float, ...]:
    """The named numbers found for `about` (JSON values), by `measure` if they are not known yet.

    Raises:
        OSError: if they cannot be kept.
        ValueError: if they cannot, or are damaged.
    """
    folder, name = cache_folder(), f"{kind}-{ingredients_name(about)}"
    path = find(folder, name, ".json") or _keep(folder, name, {**about, **dict(zip(names, measure(), strict=True))})
    try:
        finding = json.loads(path.read_text())
        return tuple(float(finding[name]) for name in names)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged, remove it to have it made again: {error}") from error


def note(kind: str, about: Mapping[str, Any], numbers: Sequence[float]) -> None:
    """Keep these numbers, which `noted` gives for `about` (JSON values).

    Raises:
        OSError: if they cannot be kept.
        ValueError: if they cannot.
    """
    note_values(kind, about, {"numbers": list(numbers)})


def noted(kind: str, about: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers that were noted last for `about`; empty without readable ones."""
    try:
        return tuple(float(number) for number in noted_values(kind, about)["numbers"])
    except (ValueError, TypeError, KeyError):
        return ()


def note_values(kind: str, about: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Like `note`, for JSON values by name, which `noted_values` gives."""
    with atomic_file(_note_path(kind, about)) as path:
        path.write_text(json.dumps({**about, **found}, indent=2) + "\n")


def noted_values(kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were noted last for `about`, beside its own; empty if they cannot be read."""
    try:
        found = json.loads(_note_path(kind, about).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _note_path(kind: str, about: Mapping[str, Any]) -> Path:
    return cache_folder() / f"{kind}-{ingredients_name(about)}.json"


def _keep(folder: Path, name: str, finding: dict[str, object]) -> Path:
    """Write what was found, unless another process was quicker: then its finding stays."""
    with tempfile.TemporaryDirectory(prefix="ppd-finding-") as making:
        made = Path(making, "finding.json")
        made.write_text(json.dumps(finding, indent=2) + "\n")
        return keep(made, folder, name, ".json")
