"""What a drafter's name stands for: a trained one's folder, a published head, a model's own layer, or a draft model."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.gguf.kept import is_gguf
from ppd_runtime.models.checkpoint.hub import find_model
from ppd_runtime.models.checkpoint.packages import packaged_file
from ppd_runtime.models.draft_model import (
    DraftModel,
    DraftModelInfo,
    describe_draft_model,
    load_draft_model,
    read_draft_model,
)
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.drafter import Drafter, DrafterInfo, describe_drafter, load_drafter
from ppd_runtime.models.trained.mtp import MTP, MtpDrafter, MtpInfo, describe_mtp, load_mtp
from ppd_runtime.models.trained.published import PublishedInfo, describe_published, is_published, load_published
from ppd_runtime.models.trained.published_network import PublishedDrafter

NamedInfo = DrafterInfo | PublishedInfo | MtpInfo | DraftModelInfo
"""What a drafter is; it can travel as JSON, see `read_drafter`."""
LoadedDrafter = Drafter | PublishedDrafter | MtpDrafter | DraftModel
"""A drafter in memory, a `DraftNetwork`."""


def describe_named(name: str, info: ModelInfo) -> NamedInfo:
    """Find the drafter of a name and check that it is for this model. What is nothing else is a draft model.

    Raises:
        ValueError: in a line that names the drafter and the way out: there is none, or it cannot be used here.
    """
    if name == MTP:
        return describe_mtp(info)
    if os.path.isfile(os.path.join(name, DrafterInfo.card_name())):  # noqa: PTH113, PTH118 (a Path raises on long names)
        return describe_drafter(name, info)
    whole_file = bool(packaged_file(name)) or is_gguf(name)
    if not whole_file and os.path.isfile(name):  # noqa: PTH113 (as above)
        way_out = "give the folder that it is in, a GGUF file, a hub name, mtp or none"
        raise ValueError(f"drafter={name!r}: is a file, not a drafter's folder; {way_out}")
    try:
        folder = None if whole_file else find_model(name)[1]
    except ValueError as error:
        raise ValueError(f"drafter={name!r}: {error}") from error
    if folder is not None and is_published(folder):
        return describe_published(name, info)
    return describe_draft_model(name, info)


def load_named(
    drafter: NamedInfo, model: PreTrainedModel, info: ModelInfo, emulate: EmulatedDevice | None
) -> LoadedDrafter:
    """The drafter beside `model`, which has the embedding, norm and head of `info`'s, on its device; `emulate` is the
    layers'.
    """
    if isinstance(drafter, DrafterInfo):
        return load_drafter(drafter, model)
    if isinstance(drafter, DraftModelInfo):
        return load_draft_model(drafter, str(model.device), emulate)
    return load_published(drafter, model) if isinstance(drafter, PublishedInfo) else load_mtp(drafter, model, info)


def read_drafter(told: dict[str, Any]) -> NamedInfo:
    """What a drafter is, from its JSON fields."""
    if "info" in told:
        return read_draft_model(told)
    fields = told | {"folder": Path(told["folder"])}
    if "number" in told:
        return MtpInfo(**fields)
    fields |= {"tokens": tuple(told["tokens"])}
    if "kind" not in told:
        return DrafterInfo(**fields)
    return PublishedInfo(**fields | {"layers": tuple(told["layers"])})
