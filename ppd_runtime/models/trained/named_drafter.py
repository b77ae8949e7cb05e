"""What a drafter's name stands for: a trained one's folder, a published head, or a model's own layer."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.hub import find_model
from ppd_runtime.models.trained.drafter import Drafter, DrafterInfo, describe_drafter, load_drafter
from ppd_runtime.models.trained.mtp import MTP, MtpDrafter, MtpInfo, describe_mtp, load_mtp
from ppd_runtime.models.trained.published import PublishedInfo, describe_published, is_published, load_published
from ppd_runtime.models.trained.published_network import PublishedDrafter

NamedInfo = DrafterInfo | PublishedInfo | MtpInfo
"""What a drafter is; it can travel as JSON, see `read_drafter`."""


def describe_named(name: str, info: ModelInfo) -> NamedInfo:
    """Find the drafter of a name and check that it is for this model.

    Raises:
        ValueError: in a line that names the drafter and the way out: there is none, or it cannot be used here.
    """
    if name == MTP:
        return describe_mtp(info)
    if os.path.isfile(os.path.join(name, DrafterInfo.card_name())):  # noqa: PTH113, PTH118 (a Path raises on long names)
        return describe_drafter(name, info)
    try:
        _, folder = find_model(name)
    except ValueError as error:
        raise ValueError(f"drafter={name!r}: {error}") from error
    if is_published(folder):
        return describe_published(name, info)
    raise ValueError(
        f"drafter={name!r}: neither a folder that `{DrafterInfo.COMMAND}` wrote nor a head in the format of speculators"
    )


def load_named(drafter: NamedInfo, model: PreTrainedModel, info: ModelInfo) -> Drafter | PublishedDrafter | MtpDrafter:
    """The drafter beside `model`, which has the embedding, norm and head of `info`'s, on its device."""
    if isinstance(drafter, DrafterInfo):
        return load_drafter(drafter, model)
    return load_published(drafter, model) if isinstance(drafter, PublishedInfo) else load_mtp(drafter, model, info)


def read_drafter(told: dict[str, Any]) -> NamedInfo:
    """What a drafter is, from its JSON fields."""
    fields = told | {"folder": Path(told["folder"])}
    if "number" in told:
        return MtpInfo(**fields)
    fields |= {"tokens": tuple(told["tokens"])}
    if "kind" not in told:
        return DrafterInfo(**fields)
    return PublishedInfo(**fields | {"layers": tuple(told["layers"])})
