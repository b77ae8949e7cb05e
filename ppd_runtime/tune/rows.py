"""The rows of a comparison: methods with settings, out of a text such as "all" or "layerskip:exit_layer=6,ppd:k=3"."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppd_runtime.methods.choices import METHODS
from ppd_runtime.methods.registry import SELF_SPECULATIVE, method_settings, open_method
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.fields import UnknownSettingError
from ppd_runtime.tune.transformers_methods import TRANSFORMERS_METHODS, generate_arguments

BASELINE = "autoregressive"
ALL = "all"
_PRESETS: Mapping[str, Sequence[str]] = {
    "ppd": ("ppd:k=1",),
    "adaspeed": ("adaspeed:stopping=confidence", "adaspeed:stopping=product", "adaspeed:stopping=probe"),
}
"""What "all" makes of a method, unless that is the method with its defaults. LayerSkip's own rule is constant length:
with it, AdaSPEED's three rules make the comparison of that paper's Table I."""
NAMES = (*METHODS, *TRANSFORMERS_METHODS)
"""The methods that a row can be of."""
PRESETS = tuple(label for name in NAMES for label in _PRESETS.get(name, (name,)))
"""The labels that "all" stands for."""
_LAYOUT = {"launcher": "auto"}
"""How pipelined decoding runs unless a row says otherwise: as processes of this host, or on a Ray to be joined."""
_FOR_ALL = (
    *("model", "dtype", "weights", "device", "threads", "threads_per_worker", "compile", "generation_config"),
    "rows_share_weights",
)
_NO_TEXT = ("trace", "stage", "emulate", "progress", "adaptation")


@dataclass(frozen=True)
class MethodRow:
    """A method with settings."""

    label: str
    """The text that asks for it: a method's name, a colon, and settings separated by semicolons."""
    method: str
    settings: Mapping[str, Any]
    required: bool = True
    """Whether it was asked for by name, not by "all"."""


def parse_rows(text: str) -> list[MethodRow]:
    """The rows of a text, each once, with ordinary decoding first in any case.

    Raises:
        ValueError: for an unknown method, or malformed settings.
    """
    labels = [part.strip() for part in text.split(",")]
    rows = [_row(label) for label in labels if label != ALL]
    if ALL in labels:
        rows += [replace(_row(label), required=False) for label in PRESETS]
    found: dict[str, MethodRow] = {BASELINE: _row(BASELINE)}
    for row in rows:
        found.setdefault(row.label, row)
    return list(found.values())


def check_rows(
    rows: Sequence[MethodRow], info: ModelInfo, sampling: SamplingParams
) -> tuple[list[MethodRow], dict[str, str]]:
    """The rows that the model can be decoded with, and why it cannot with others of "all"; nothing is started.

    Raises:
        ValueError: for a row asked for by name that the model lacks something for, or whose settings cannot work.
    """
    kept, left_out = [], {}
    for row in rows:
        try:
            _check(row, info, sampling)
            kept.append(row)
        except (ValueError, TypeError) as error:
            if row.required:
                raise ValueError(f"{row.label}: {error}") from error
            left_out[row.label] = str(error)
    return kept, left_out


def full_settings(row: MethodRow) -> dict[str, Any]:
    """The row's settings, with those for every comparison."""
    return {**(_LAYOUT if row.method == "ppd" else {}), **row.settings}


def _row(label: str) -> MethodRow:
    method, colon, settings = label.partition(":")
    if method not in NAMES:
        raise ValueError(f"method {method!r}: choose among {', '.join((ALL, *NAMES))}")
    return MethodRow(label, method, dict(_setting(label, part) for part in settings.split(";")) if colon else {})


def _setting(label: str, part: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not name or not equals or not value:
        raise ValueError(f"{label!r}: give settings as METHOD:NAME=VALUE;NAME=VALUE")
    if name in _FOR_ALL:
        raise ValueError(f"{label!r}: {name} is the same for all methods, so give it as an option of its own")
    if name in _NO_TEXT:
        raise ValueError(f"{label!r}: {name} cannot be chosen in a comparison")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _check(row: MethodRow, info: ModelInfo, sampling: SamplingParams) -> None:
    if row.method in TRANSFORMERS_METHODS:
        if info.weights:
            raise ValueError(f"transformers has no products with {info.weights} weights as they are here: leave it out")
        if not sampling.greedy:
            raise ValueError("transformers draws its samples otherwise, so it is compared greedily: leave it out")
        generate_arguments(row.method, row.settings, info)
    elif row.method in SELF_SPECULATIVE:
        with _known_in_rows():
            chosen, _ = method_settings(row.method, row.settings)
        chosen.prepare(info)
    elif row.method == BASELINE:
        if row.settings:
            raise ValueError("ordinary decoding is what the others are compared with, and has no settings here")
    else:
        with _known_in_rows():
            open_method(info.name, row.method, **full_settings(row), weights=info.weights).close()  # starts nothing


@contextlib.contextmanager
def _known_in_rows() -> Iterator[None]:
    """Advise no setting that a row cannot have."""
    try:
        yield
    except UnknownSettingError as error:
        raise UnknownSettingError(error.owner, error.name, set(error.known) - {*_FOR_ALL, *_NO_TEXT}) from error
