"""Folders of parts trained for one layer of one model: tensors, and a card that says what they were trained for."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.fingerprint import fingerprints

_FORMAT = 1


@dataclass(frozen=True)
class PartInfo:
    """What a part was trained for; `describe_part` reads it from the part's folder."""

    NAME: ClassVar[str]
    """The argument that takes such a folder; it names the folder's files too."""
    NOUN: ClassVar[str]
    """What messages call it."""
    COMMAND: ClassVar[str]
    """What writes such a folder."""
    INSTEAD: ClassVar[str] = ""
    """What else can be given."""
    STORED: ClassVar[torch.dtype] = torch.float32
    """The type of its numbers in the file."""

    folder: Path
    model: str
    """The model's name when the part was trained; the fingerprint tells which one it was."""
    model_fingerprint: str
    exit_layer: int
    hidden_size: int
    vocab_size: int
    weights_sha256: str

    @classmethod
    def card_name(cls) -> str:
        """The file that says what the part was trained for."""
        return f"{cls.NAME}.json"

    @classmethod
    def tensors_name(cls) -> str:
        """The file of its numbers."""
        return f"{cls.NAME}.safetensors"

    def check_card(self) -> None:
        """Raise ValueError if the card holds what this version does not know."""

    def check_model(self, info: ModelInfo) -> None:
        """Raise ValueError for any other model than the one that the part was trained for, or one quantised from it."""
        found = fingerprints(info)
        if self.model_fingerprint not in found:
            other = f"model {info.name!r}" if info.name != self.model else "these weights"
            raise ValueError(
                f"{self._was_trained} ({self.model_fingerprint[:12]}), not for {other} ({found[0][:12]}): "
                f"give that model, or train one for this model with `{self.COMMAND}`"
            )

    def check_layers(self, exit_layers: Sequence[int]) -> None:
        """Raise ValueError for any layer other than the one that the part was trained for."""
        others = [layer for layer in exit_layers if layer != self.exit_layer]
        if others:
            named = f"layer {others[0]}" if len(others) == 1 else f"layers {', '.join(map(str, others))}"
            raise ValueError(
                f"{self._was_trained}, not for {named}: choose layer {self.exit_layer} alone, "
                f"or train one for another layer with `{self.COMMAND}`"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Its numbers by name, float32."""
        return {name: tensor.float() for name, tensor in load_file(self.folder / self.tensors_name()).items()}

    @classmethod
    @torch.no_grad()
    def round_as_stored(cls, network: nn.Module) -> None:
        """Give a network's parameters the values that they have after saving and loading."""
        for parameter in network.parameters():
            parameter.copy_(parameter.to(cls.STORED))

    @property
    def _was_trained(self) -> str:
        return f"{self.NAME}={str(self.folder)!r} was trained for layer {self.exit_layer} of model {self.model!r}"


P = TypeVar("P", bound=PartInfo)


def save_part(folder: Path, tensors: Mapping[str, Tensor], known: P, training: Mapping[str, Any]) -> P:
    """Write a part's folder, which appears when it is whole; `training` says how it was made and what it reaches.

    Args:
        folder: must not exist yet, or be empty.
        tensors: what to save.
        known: what it was trained for; folder and hash are filled in.
        training: JSON values for the card, read by people.

    Raises:
        ValueError: if the folder cannot be written.
    """
    content = save({name: tensor.detach().to("cpu", known.STORED).contiguous() for name, tensor in tensors.items()})
    info = replace(known, folder=folder, weights_sha256=hashlib.sha256(content).hexdigest())
    card = {"format": _FORMAT, **asdict(info), "training": training}
    del card["folder"]
    with atomic_file(folder) as unfinished:
        unfinished.mkdir()
        (unfinished / info.tensors_name()).write_bytes(content)
        (unfinished / info.card_name()).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return info


def describe_part(part: type[P], folder: str | Path, info: ModelInfo) -> P:
    """Read what a folder's part was trained for and check that it was this model.

    Raises:
        ValueError: naming the folder and the way out: no such part there, a broken one, or one for another model.
    """
    path, name = Path(folder), f"{part.NAME}={str(folder)!r}"
    if not (path / part.card_name()).is_file():
        way_out = f"give {part.INSTEAD}a folder that `{part.COMMAND}` wrote"
        raise ValueError(f"{name}: holds no {part.card_name()}; {way_out}")
    try:
        found = _read_card(part, path)
        whole = hashlib.sha256((path / part.tensors_name()).read_bytes()).hexdigest() == found.weights_sha256
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name}: its {part.NOUN} cannot be read ({reason}); train it again") from error
    if not whole:
        described = f"{part.tensors_name()} is not what {part.card_name()} describes"
        raise ValueError(f"{name}: {described}; train the {part.NOUN} again")
    found.check_model(info)
    return found


def shipped_part(info: ModelInfo, name: str, wanted_by: str, command: str) -> Path:
    """The folder of the part called `name` that comes with a model; ValueError if none does."""
    folder = info.folder / name
    if not folder.is_dir():
        raise ValueError(f"{wanted_by} needs {name}=FOLDER for model {info.name!r}: make one with `{command}`")
    return folder


def _read_card(part: type[P], folder: Path) -> P:
    card = json.loads((folder / part.card_name()).read_text(encoding="utf-8"))
    if card["format"] != _FORMAT:
        raise ValueError(f"format {card['format']!r} is unknown to this version")
    names = [field.name for field in fields(part) if field.name != "folder"]
    found = part(folder=folder, **{name: card[name] for name in names})
    found.check_card()
    return found
