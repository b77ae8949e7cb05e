"""The card of a folder that `ppd quantize` wrote: what its weights are, and which model they come from."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ppd_runtime.models.checkpoint.config import QUANTISED_CARD, read_json
from ppd_runtime.models.native.packing import LAYOUT
from ppd_runtime.settings.config import ALL_FORMATS, FLOATS, GGUF


@dataclass(frozen=True)
class WeightsCard:
    """What a quantised folder holds; `card_of` reads it."""

    weights: str
    """The format of the layers' matrices, such as int8; "gguf" and "stored" are of several."""
    head: str
    """The format of the head's matrix, or floats."""
    recipe: int
    """See `quantised.RECIPE`."""
    source: str
    """The model's name when it was quantised; the fingerprint tells which one it was."""
    source_fingerprint: str
    checksum: str
    """The weight file's checksum, by `files.checksummed`."""

    def write(self, folder: Path) -> None:
        """Put the card into the folder."""
        text = json.dumps({"format": LAYOUT, **asdict(self)}, indent=2)
        (folder / QUANTISED_CARD).write_text(text + "\n", encoding="utf-8")


def card_of(folder: Path) -> WeightsCard | None:
    """The folder's card; None if it is an ordinary model's; ValueError for one that this version cannot read."""
    if not (folder / QUANTISED_CARD).exists():
        return None
    card = read_json(folder / QUANTISED_CARD)
    try:
        formats = card["weights"], card["head"]
        if card.pop("format") != LAYOUT or formats[0] == FLOATS or not {*formats} <= {*ALL_FORMATS, FLOATS}:
            raise ValueError("another version wrote it")
        return WeightsCard(**card)
    except (KeyError, TypeError, ValueError) as error:
        way_out = "quantise the model again with `ppd quantize`"
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"model {str(folder)!r}: {QUANTISED_CARD} cannot be read ({reason}); {way_out}") from error


def agreed_format(model: str, weights: str | None, card: WeightsCard | None) -> str | None:
    """The format of a model's weights, given the wanted one; raises ValueError if its folder has another one."""
    if card and card.weights == GGUF and weights not in (None, GGUF):
        raise ValueError(f"weights={weights!r}: model {model!r} has those of its GGUF file; leave weights out")
    if card and weights not in (None, card.weights):
        has = f"model {model!r} has {card.weights} ones, made of {card.source!r}"
        raise ValueError(f"weights={weights!r}: {has}; leave weights out, or give the model they were made of")
    if weights == GGUF and not card:
        raise ValueError(f"weights={weights!r}: model {model!r} is no GGUF file with such weights; leave weights out")
    return card.weights if card else weights
