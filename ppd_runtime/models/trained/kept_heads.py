"""Where `ppd adapt` keeps a model's heads, so that everything that opens the model finds them."""

import logging
from pathlib import Path

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.fingerprint import fingerprints
from ppd_runtime.models.trained.heads import HeadInfo, describe_heads
from ppd_runtime.settings.config import FLOATS

logger = logging.getLogger(__name__)
COUNTS = "guess_counts.json"
"""The file beside the heads' folders of how often each token occurs, by which their shortlist was chosen."""


def kept_heads_folder(info: ModelInfo) -> Path:
    """The folder for a model's heads in the cache folder, which may not be there yet; its parent is made.

    Raises:
        ValueError: if there is no cache folder that can be used.
    """
    heads = cache_folder() / "heads"
    heads.mkdir(mode=0o700, exist_ok=True)
    return heads / _name(fingerprints(info)[0], info.weights_name)


def kept_heads(info: ModelInfo) -> dict[int, HeadInfo]:
    """The kept heads by their layers: those for the model's own format, else those for the floats that it was made of.

    None without such a folder; one that is damaged is left aside, with a warning.
    """
    try:
        places = cache_folder() / "heads"
        if not places.is_dir():
            return {}
        names = (_name(one, weights) for weights in (info.weights_name, FLOATS) for one in fingerprints(info))
        folder = next((places / name for name in names if (places / name).is_dir()), None)
        return describe_heads(folder, info) if folder else {}
    except (OSError, ValueError) as error:
        logger.warning("the model's own heads guess, for the kept ones cannot be used: %s", error)
        return {}


def _name(fingerprint: str, weights: str) -> str:
    return f"{fingerprint[:32]}-{weights}"
