"""Exit heads trained for one layer of one model: three kinds of network, and the folders that hold them."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.loading import some_rows
from ppd_runtime.models.native.linear import with_floats
from ppd_runtime.models.stage.decoder_parts import decoder_in, embedding_name, final_norm, set_decoder, shallow_copy
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.parts import PartInfo, describe_part, save_part

LM_HEAD, AFFINE, GATED = "lm-head", "affine", "gated"
KINDS = (LM_HEAD, AFFINE, GATED)
_INNER = 0.75
_ROWS = "lm_head."
"""The name prefix of tensors with a row for each token."""


class LmHead(nn.Module):
    """The exit layer's own classifier after the model's frozen final norm (the paper's "Y" rows, section 5).

    It starts as the model's; the model's changes to its logits apply to these too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.lm_head = with_floats(copy.deepcopy(model.lm_head)).requires_grad_(True)
        self.final = FinalHead(model, self.lm_head)

    def states(self, hidden: Tensor) -> Tensor:
        """Input of `final` for hidden states `[batch, tokens, hidden_size]`."""
        return hidden

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`."""
        return self.final(self.states(hidden))


class AffineHead(nn.Module):
    """h → h + W h + b into the final layer's space, then the model's own frozen norm and head; W and b start at 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        size = model.config.hidden_size
        self.step = nn.Linear(size, size, device=model.device)
        nn.init.zeros_(self.step.weight)
        nn.init.zeros_(self.step.bias)
        self.final = FinalHead(model)

    def states(self, hidden: Tensor) -> Tensor:
        """Input of `final` for hidden states `[batch, tokens, hidden_size]`."""
        return hidden + self.step(hidden.to(self.step.weight.dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`."""
        return self.final(self.states(hidden))


class GatedHead(nn.Module):
    """m = n(h) + W n(h) + b, then m + D (silu(G n(m)) · U n(m)), then the model's own frozen norm and head.

    n scales to unit size. G and U have `_INNER` rows a number of a state; W, b and D start at 0. It needs no other
    token's state, so that a boundary keeps no cache for it, unlike a decoder layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        size, device = model.config.hidden_size, model.device
        inner = int(_INNER * size)
        self.step = nn.Linear(size, size, device=device)
        self.gate_up = nn.Linear(size, 2 * inner, bias=False, device=device)
        self.down = nn.Linear(inner, size, bias=False, device=device)
        for starts_at_zero in (self.step.weight, self.step.bias, self.down.weight):
            nn.init.zeros_(starts_at_zero)
        generator = torch.Generator(device).manual_seed(0)  # so that each training begins alike
        nn.init.uniform_(self.gate_up.weight, -(size**-0.5), size**-0.5, generator=generator)
        self.final = FinalHead(model)

    def states(self, hidden: Tensor) -> Tensor:
        """Input of `final` for hidden states `[batch, tokens, hidden_size]`."""
        unit = normed(hidden.to(self.step.weight.dtype))
        mapped = unit + self.step(unit)
        gate, up = self.gate_up(normed(mapped)).chunk(2, dim=-1)
        return mapped + self.down(F.silu(gate) * up)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`."""
        return self.final(self.states(hidden))


def normed(states: Tensor) -> Tensor:
    """`[..., hidden_size]`, each row scaled to unit size."""
    return F.rms_norm(states, states.shape[-1:])


def model_end(model: PreTrainedModel, tokens: Sequence[int]) -> PreTrainedModel:
    """The model's final norm and its head for `tokens`, in float32, as a model without embedding and layers."""
    end, decoder = shallow_copy(model), shallow_copy(decoder_in(model))
    decoder.layers, name = nn.ModuleList(), final_norm(decoder)
    setattr(decoder, embedding_name(decoder), nn.Identity())
    setattr(decoder, name, copy.deepcopy(getattr(decoder, name)).float().requires_grad_(False))
    end.lm_head = with_floats(some_rows(model.lm_head, tokens)).float().requires_grad_(False)
    set_decoder(end, decoder)
    return end


HeadNetwork = LmHead | AffineHead | GatedHead
_NETWORKS: dict[str, type[HeadNetwork]] = {LM_HEAD: LmHead, AFFINE: AffineHead, GATED: GatedHead}


def new_head(kind: str, model: PreTrainedModel) -> HeadNetwork:
    """An untrained head of one of `KINDS`, which names what the shared head does; its parameters are trained."""
    return _NETWORKS[kind](model)


@dataclass(frozen=True)
class HeadInfo(PartInfo):
    """What an exit head was trained for; `describe_head` reads it from the head's folder."""

    NAME: ClassVar[str] = "exit_head"
    NOUN: ClassVar[str] = "head"
    COMMAND: ClassVar[str] = "ppd train exit-head"
    INSTEAD: ClassVar[str] = "'shared' or "
    STORED: ClassVar[torch.dtype] = torch.bfloat16

    kind: str
    """One of `KINDS`."""

    def check_card(self) -> None:
        """Raise ValueError for a kind that this version does not know."""
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is unknown to this version")

    def num_weights(self, tokens: int = 0) -> int:
        """How many numbers `load_head` adds to a model's own; `tokens` are the rows of its head, 0 for all."""
        shapes = {name: tensor.shape for name, tensor in self.tensors().items()}
        rows = {name: (tokens or shape[0], *shape[1:]) for name, shape in shapes.items()}
        return sum(math.prod(rows[name] if name.startswith(_ROWS) else shape) for name, shape in shapes.items())


def save_head(folder: Path, head: HeadNetwork, known: HeadInfo, training: Mapping[str, Any]) -> HeadInfo:
    """Write a head's folder; see `save_part`."""
    return save_part(folder, head.state_dict(), known, training)


def describe_head(folder: str | Path, info: ModelInfo) -> HeadInfo:
    """Read what a folder's head was trained for and check that it was this model; see `describe_part`."""
    return describe_part(HeadInfo, folder, info)


def describe_heads(folder: str | Path, info: ModelInfo) -> dict[int, HeadInfo]:
    """The head in a folder, or those in the folders in it, by their layers; see `describe_head`."""
    path, card = Path(folder), HeadInfo.card_name()
    inner = [] if (path / card).is_file() else sorted(one.parent for one in path.glob(f"*/{card}"))
    found: dict[int, HeadInfo] = {}
    for place in inner or [path]:
        head = describe_head(place, info)
        if other := found.get(head.exit_layer):
            both = f"{other.folder.name} and {place.name} are both for layer {head.exit_layer}"
            raise ValueError(f"exit_head={str(folder)!r}: {both}, keep one of them")
        found[head.exit_layer] = head
    return found


def load_head(head: HeadInfo, model: PreTrainedModel, tokens: Sequence[int] = ()) -> HeadNetwork:
    """The head as a network around the norm and head of `model`, with its dtype, on its device.

    `tokens` are those of the model's head, if it has not the whole vocabulary.
    """
    network, tensors = new_head(head.kind, model), head.tensors()
    if tokens:
        tensors = {name: part[list(tokens)] if name.startswith(_ROWS) else part for name, part in tensors.items()}
    network.load_state_dict(tensors)
    return network.to(model.device, model.dtype).requires_grad_(False).eval()
