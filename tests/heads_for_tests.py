"""Exit heads, adapters and drafters made without training, and texts to train on."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.trained.adapter import AdapterInfo, new_adapter, save_adapter
from ppd_runtime.models.trained.drafter import DrafterInfo, DrafterNetwork, save_drafter
from ppd_runtime.models.trained.heads import HeadInfo, HeadNetwork, new_head, save_head

Change = Callable[[HeadNetwork], object]


@torch.no_grad()
def shake(head: HeadNetwork) -> None:
    """Move every parameter a little, always the same way."""
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def make_head(folder: Path, model: Path, kind: str, exit_layer: int, change: Change = shake) -> HeadInfo:
    """A head folder for a model folder; the head is the shared one, changed."""
    info = describe(str(model))
    network = load_layers(info, info.num_layers, torch.float32, "cpu")
    head = new_head(kind, network)
    change(head)
    known = HeadInfo(
        folder=folder,
        kind=kind,
        model=info.name,
        model_fingerprint=model_fingerprint(info),
        exit_layer=exit_layer,
        hidden_size=network.config.hidden_size,
        vocab_size=info.vocab_size,
        weights_sha256="",
    )
    return save_head(folder, head, known, {})


def make_adapter(folder: Path, model: Path, exit_layer: int) -> AdapterInfo:
    """An untrained adapter's folder for a model folder."""
    info = describe(str(model))
    whole = load_layers(info, info.num_layers, torch.float32, "cpu")
    hidden_size, fingerprint = whole.config.hidden_size, model_fingerprint(info)
    known = AdapterInfo(folder, info.name, fingerprint, exit_layer, hidden_size, info.vocab_size, "")
    return save_adapter(folder, new_adapter(whole, exit_layer), known, {})


def make_drafter(folder: Path, model: str, tokens: range = range(5, 105)) -> DrafterInfo:
    """A drafter's folder for a model folder, with random weights and a layer that does something."""
    torch.manual_seed(0)
    network, info = DrafterNetwork(32), describe(model)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    known = DrafterInfo(folder, info.name, model_fingerprint(info), 0, 32, info.vocab_size, "", tuple(tokens))
    return save_drafter(folder, network, known, {})


def write_texts(path: Path, number: int = 120, key: str = "text") -> Path:
    """A JSON Lines file of texts made of few words."""
    words = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "waits", "for", "next", "model", "layer")
    generator = random.Random(0)
    texts = (" ".join(generator.choices(words, k=30)) for _ in range(number))
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path
