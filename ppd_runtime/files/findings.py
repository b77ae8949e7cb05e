"""Measurements of this machine, kept in the cache folder: who asks first measures, all others read."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.files.cache_folder import cache_folder, ingredients_name
from ppd_runtime.files.checksummed import only_one


def kept_finding(
    kind: str, about: Mapping[str, Any], names: Sequence[str], measure: Callable[[], Sequence[float]]
) -> tuple[float, ...]:
    """The named numbers found for `about` (JSON values), by `measure` if they are not known yet.

    Raises:
        OSError: if they cannot be kept.
        ValueError: if they cannot.
    """
    folder = cache_folder()
    if known := _known(kind, about, names):
        return known
    found = dict(zip(names, measure(), strict=True))
    with only_one(folder, _name(kind, about)):  # another process may have been quicker: then its finding stays
        if not (known := _known(kind, about, names)):
            note_values(kind, about, found)
    return known or tuple(found.values())


def note(kind: str, about: Mapping[str, Any], numbers: Sequence[float]) -> None:
    """Like `note_values`, for numbers, which `noted` gives."""
    note_values(kind, about, {"numbers": list(numbers)})


def noted(kind: str, about: Mapping[str, Any]) -> tuple[float, ...]:
    """The numbers that were noted last for `about`; empty without readable ones."""
    try:
        return tuple(float(number) for number in noted_values(kind, about)["numbers"])
    except (ValueError, TypeError, KeyError):
        return ()


def note_values(kind: str, about: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keep JSON values by name, which `noted_values` gives for `about` (JSON values).

    Raises:
        OSError: if they cannot be kept.
        ValueError: if they cannot.
    """
    with atomic_file(_note_path(kind, about)) as path:
        path.write_text(json.dumps({**about, **found}, indent=2) + "\n")


def noted_values(kind: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were noted last for `about`, beside its own; empty if they cannot be read."""
    try:
        found = json.loads(_note_path(kind, about).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def only_one_measures(kind: str, about: Mapping[str, Any], patience_s: float) -> AbstractContextManager[None]:
    """Keep other processes of this host from the same while one measures for `about` (JSON values).

    Entering it raises TimeoutError if another one takes longer than `patience_s`; without a cache folder that can hold
    locks several enter.
    """
    try:
        return only_one(cache_folder(), _name(kind, about), patience_s)
    except ValueError:
        return nullcontext()


def _known(kind: str, about: Mapping[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    """The kept numbers; empty if one is missing or is none."""
    values = noted_values(kind, about)
    try:
        return tuple(float(values[name]) for name in names)
    except (ValueError, TypeError, KeyError):
        return ()


def _note_path(kind: str, about: Mapping[str, Any]) -> Path:
    return cache_folder() / f"{_name(kind, about)}.json"


def _name(kind: str, about: Mapping[str, Any]) -> str:
    return f"{kind}-{ingredients_name(about)}"
