"""Exit heads trained for one layer of one model: two kinds of network, and the folders that hold them."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.cost_model.tradeoff import whole_file
from ppd_runtime.models.fingerprint import model_fingerprint
from ppd_runtime.models.loading import ModelInfo
from ppd_runtime.models.stage import FinalHead

LM_HEAD, AFFINE = "lm-head", "affine"
KINDS = (LM_HEAD, AFFINE)
_FORMAT = 1
_TENSORS, _CARD = "exit_head.safetensors", "exit_head.json"


class LmHead(nn.Module):
    """A classifier of the exit layer's own behind the model's frozen final norm (the paper's "Y" rows, section 5).

    It starts as the model's; what the model does to its logits afterwards, it does to these too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.lm_head = copy.deepcopy(model.lm_head).requires_grad_(True)
        self._final = FinalHead(model, self.lm_head)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`."""
        return self._final(hidden)


class AffineHead(nn.Module):
    """h → h + W h + b into the final layer's space, then the model's own frozen norm and head; W and b start at 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        size = model.config.hidden_size
        self.step = nn.Linear(size, size, device=model.device)
        nn.init.zeros_(self.step.weight)
        nn.init.zeros_(self.step.bias)
        self._final = FinalHead(model)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`."""
        return self._final(hidden + self.step(hidden))


HeadNetwork = LmHead | AffineHead


def new_head(kind: str, model: PreTrainedModel) -> HeadNetwork:
    """A head of one of `KINDS` that does not differ from the shared head yet; its parameters are what is trained."""
    return LmHead(model) if kind == LM_HEAD else AffineHead(model)


@dataclass(frozen=True)
class HeadInfo:
    """What an exit head was trained for; `describe_head` reads it from the head's folder."""

    folder: Path
    kind: str
    model: str
    """The model's name when the head was trained; the fingerprint tells which one it was."""
    model_fingerprint: str
    exit_layer: int
    hidden_size: int
    vocab_size: int
    weights_sha256: str

    def check_model(self, info: ModelInfo) -> None:
        """Raise ValueError for any other model than the one that the head was trained for."""
        found = model_fingerprint(info)
        if found != self.model_fingerprint:
            other = f"model {info.name!r}" if info.name != self.model else "these weights"
            raise ValueError(
                f"{self._was_trained} ({self.model_fingerprint[:12]}), not for {other} ({found[:12]}): "
                "give that model, or train a head for this one with `ppd train exit-head`"
            )

    def check_layers(self, exit_layers: Sequence[int]) -> None:
        """Raise ValueError where there is any other layer than the one that the head was trained for."""
        others = [layer for layer in exit_layers if layer != self.exit_layer]
        if others:
            named = f"layer {others[0]}" if len(others) == 1 else f"layers {', '.join(map(str, others))}"
            raise ValueError(
                f"{self._was_trained}, not for {named}: choose layer {self.exit_layer} alone, "
                "or train a head for another one with `ppd train exit-head`"
            )

    @property
    def _was_trained(self) -> str:
        return f"exit_head={str(self.folder)!r} was trained for layer {self.exit_layer} of model {self.model!r}"


def save_head(folder: Path, head: HeadNetwork, known: HeadInfo, training: Mapping[str, Any]) -> HeadInfo:
    """Write a head's folder, which appears when it is whole; `training` says how it was made and what it reaches.

    Args:
        folder: must not exist yet, or be empty.
        head: what to save; its parameters are kept in float32.
        known: what it was trained for; folder and hash are filled in.
        training: JSON values for the card, read by people.

    Raises:
        ValueError: where the folder cannot be written.
    """
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in head.state_dict().items()}
    content = save(tensors)
    info = replace(known, folder=folder, weights_sha256=hashlib.sha256(content).hexdigest())
    card = {"format": _FORMAT, **asdict(info), "training": training}
    del card["folder"]
    with whole_file(folder) as unfinished:
        unfinished.mkdir()
        (unfinished / _TENSORS).write_bytes(content)
        (unfinished / _CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return info


def describe_head(folder: str | Path, info: ModelInfo) -> HeadInfo:
    """Read what a folder's head was trained for and check that it was this model.

    Raises:
        ValueError: naming the folder and the way out: no head there, a broken one, or one for another model.
    """
    path = Path(folder)
    name = f"exit_head={str(folder)!r}"
    if not (path / _CARD).is_file():
        raise ValueError(f"{name}: holds no {_CARD}; give 'shared' or a folder that `ppd train exit-head` wrote")
    try:
        head = _read_card(path)
        whole = _sha256(path / _TENSORS) == head.weights_sha256
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name}: its head cannot be read ({reason}); train it anew") from error
    if not whole:
        raise ValueError(f"{name}: {_TENSORS} is not what {_CARD} describes; train the head anew")
    head.check_model(info)
    return head


def load_head(head: HeadInfo, model: PreTrainedModel) -> HeadNetwork:
    """The head as a network around the norm and head of `model`, with its dtype, on its device."""
    network = new_head(head.kind, model)
    network.load_state_dict(load_file(head.folder / _TENSORS))
    return network.to(model.device, model.dtype).requires_grad_(False).eval()


def _read_card(folder: Path) -> HeadInfo:
    card = json.loads((folder / _CARD).read_text(encoding="utf-8"))
    if card["format"] != _FORMAT or card["kind"] not in KINDS:
        raise ValueError(f"format {card['format']!r} and kind {card['kind']!r} are unknown to this version")
    names = HeadInfo.__dataclass_fields__.keys() - {"folder"}
    return HeadInfo(folder=folder, **{name: card[name] for name in names})


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
