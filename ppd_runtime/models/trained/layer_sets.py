"""Files that say which sub-layers of one model a draft leaves out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.fingerprint import fingerprints, model_fingerprint
from ppd_runtime.models.stage.slicing import LayerSet
from ppd_runtime.settings.config import FLOATS

_FORMAT = 1
_KINDS = ("attention", "mlp")


def write_layer_set(path: Path, left_out: LayerSet, info: ModelInfo, search: Mapping[str, Any]) -> None:
    """Write a set; `search`, JSON values for people to read, says how it was found.

    Raises:
        ValueError: if `path` cannot be written.
    """
    card = {
        "format": _FORMAT,
        "model": info.name,
        "model_fingerprint": model_fingerprint(info),
        "weights": info.weights_name,
        "attention": left_out.attention,
        "mlp": left_out.mlp,
        "search": search,
    }
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def read_layer_set(path: str | Path, info: ModelInfo) -> LayerSet:
    """The set in a file, checked to be one for this model.

    Raises:
        ValueError: naming the file and the way out.
    """
    name, way_out = f"layer_set={str(path)!r}", "find one with `ppd search-layers`"
    try:
        card = json.loads(Path(path).read_text(encoding="utf-8"))
        if card["format"] != _FORMAT:
            raise ValueError(f"format {card['format']!r} is unknown to this version")
        model, fingerprint = str(card["model"]), str(card["model_fingerprint"])
        weights = card.get("weights", FLOATS)
        left_out = LayerSet(*(tuple(card[kind]) for kind in _KINDS))
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; {way_out}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{name} holds no layer set ({type(error).__name__}: {error}); {way_out}") from error
    if fingerprint not in (ours := fingerprints(info)):
        other = f"model {info.name!r}" if info.name != model else "these weights"
        raise ValueError(
            f"{name} was found for model {model!r} ({fingerprint[:12]}), not for {other} ({ours[0][:12]}): {way_out}"
        )
    if weights not in (FLOATS, info.weights):  # what suits the model's own numbers suits those made of them
        raise ValueError(f"{name} was found with {weights} weights, not with {info.weights_name}: {way_out} for these")
    inner = range(1, info.num_layers - 1)  # the first and the last layer stay whole
    for kind, layers in zip(_KINDS, (left_out.attention, left_out.mlp), strict=True):
        if not all(type(layer) is int and layer in inner for layer in layers) or len(set(layers)) < len(layers):
            raise ValueError(f"{name}: {kind} of layers {list(layers)} cannot be left out; {way_out}")
    return left_out
