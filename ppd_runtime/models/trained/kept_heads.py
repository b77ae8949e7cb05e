"""A model's heads, found by its fingerprint: those that `ppd adapt` has kept, else those that ship with the package."""

import logging
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.fingerprint import fingerprints
from ppd_runtime.models.trained.drafter import DrafterInfo, describe_drafter
from ppd_runtime.models.trained.heads import HeadInfo, describe_head
from ppd_runtime.settings.config import FLOATS

logger = logging.getLogger(__name__)
DRAFTER = "drafter"
"""The drafter's folder beside the heads'."""
COUNTS = "guess_counts.json"
"""The file beside the heads' folders of how often each token occurs, by which their shortlist was chosen."""
_LAYER = "layer-"

SHIPPED = Path(str(resources.files("ppd_runtime.models") / "adapted"))
"""Holds the folders that ship, named as the kept ones are."""


def kept_heads_folder(info: ModelInfo) -> Path:
    """The folder for a model's heads in the cache folder, which may not be there yet; its parent is made.

    Raises:
        ValueError: if there is no cache folder that can be used.
    """
    heads = cache_folder() / "heads"
    heads.mkdir(mode=0o700, exist_ok=True)
    return heads / folder_name(info)


def folder_name(info: ModelInfo) -> str:
    """The name of the folder for a model's heads, the same on every machine."""
    return _name(fingerprints(info)[0], info.weights_name)


@dataclass(frozen=True)
class KeptHeads:
    """A model's kept heads."""

    heads: dict[int, HeadInfo] = field(default_factory=dict)
    """By their layers."""
    left_aside: tuple[int, ...] = ()
    """Layers whose kept heads cannot be used."""


def kept_heads(info: ModelInfo) -> KeptHeads:
    """The kept heads: those for the model's own format, else those for the floats that it was made of.

    The shipped ones where none are kept; none without such a folder. One that is damaged is left aside, with a warning
    that names its file and the way out.
    """
    heads, left_aside = dict[int, HeadInfo](), list[int]()
    try:
        folder = _found_folder(info)
        places = sorted(folder.glob(f"{_LAYER}*")) if folder else []
    except (OSError, ValueError) as error:
        logger.warning("the model's own heads guess, for the kept ones cannot be used: %s", error)
        return KeptHeads()
    for place in places:
        layer = place.name.removeprefix(_LAYER)
        try:
            if not (place / HeadInfo.card_name()).is_file():
                raise ValueError(f"{place} holds no {HeadInfo.card_name()}")
            head = describe_head(place, info)
            if str(head.exit_layer) != layer:
                raise ValueError(f"{place} has the head for layer {head.exit_layer}")
            heads[head.exit_layer] = head
        except (OSError, ValueError) as error:
            told = "the model's own head guesses after layer %s, not the kept one: %s; %s"
            logger.warning(told, layer, error, "run `ppd adapt` for this model again, or give exit_head='shared'")
            left_aside += [int(layer)] * layer.isdecimal()
    return KeptHeads(heads, tuple(sorted(left_aside)))


def head_name(layer: int) -> str:
    """The folder's name of the head for a layer, beside the other kept ones."""
    return f"{_LAYER}{layer}"


def kept_drafter(info: ModelInfo) -> DrafterInfo | None:
    """The drafter beside the kept heads; None if there is none. A damaged one is left aside, with a warning."""
    try:
        folder = _found_folder(info)
        return describe_drafter(folder / DRAFTER, info) if folder and (folder / DRAFTER).is_dir() else None
    except (OSError, ValueError) as error:
        logger.warning("no drafter guesses, for the kept one cannot be used: %s", error)
        return None


def _found_folder(info: ModelInfo) -> Path | None:
    formats = dict.fromkeys((info.weights_name, FLOATS))
    places = [cache_folder() / "heads", SHIPPED]
    places = [place for place in places if any(any(place.glob(f"*-{weights}")) for weights in formats)]
    prints = fingerprints(info) if places else ()  # reads a sample of all weights
    found = (place / _name(one, weights) for place in places for weights in formats for one in prints)
    return next(filter(Path.is_dir, found), None)


def _name(fingerprint: str, weights: str) -> str:
    return f"{fingerprint[:32]}-{weights}"
