"""AdaSPEED's linear probe: how likely the token that an exit drafts is to be accepted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.trained.parts import PartInfo, describe_part, save_part


@dataclass(frozen=True)
class ProbeInfo(PartInfo):
    """What a probe was trained for; `describe_probe` reads it from the probe's folder."""

    NAME: ClassVar[str] = "probe"
    NOUN: ClassVar[str] = "probe"
    COMMAND: ClassVar[str] = "ppd train probe"


class Probe(nn.Module):
    """σ(v · h + b) of a hidden state h after the exit layer (AdaSPEED, section II.B), in float32; v and b start at 0.

    It estimates the probability that full depth's likeliest token is the exit's.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        """Probabilities, in the shape of `hidden` without its last axis, `hidden_size`."""
        return self.log_odds(hidden).sigmoid()

    def log_odds(self, hidden: Tensor) -> Tensor:
        """v · h + b."""
        return hidden.float() @ self.direction + self.bias


def save_probe(folder: Path, probe: Probe, known: ProbeInfo, training: Mapping[str, Any]) -> ProbeInfo:
    """Write a probe's folder; see `save_part`."""
    return save_part(folder, probe.state_dict(), known, training)


def describe_probe(folder: str | Path, info: ModelInfo) -> ProbeInfo:
    """Read what a folder's probe was trained for and check that it was this model; see `describe_part`."""
    return describe_part(ProbeInfo, folder, info)


def load_probe(probe: ProbeInfo, model: PreTrainedModel) -> Probe:
    """The probe on the device of `model`."""
    network = Probe(probe.hidden_size)
    network.load_state_dict(probe.tensors())
    return network.to(model.device).requires_grad_(False).eval()
