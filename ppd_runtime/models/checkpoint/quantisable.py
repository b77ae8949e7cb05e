"""Which of a model's matrices can have weights of few bits; `native/formats.py` says what these are."""

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.config import layer_number
from ppd_runtime.models.native.formats import GROUP
from ppd_runtime.models.native.library import is_available
from ppd_runtime.models.stage.decoder_parts import decoder_in, decoder_name, embedding_name
from ppd_runtime.settings.config import GGUF, STORED

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_READ_BY_CODE = ".dt_proj.weight", ".indexer.weights_proj.weight"
"""Jamba multiplies by these weights without calling their layer; indexes take their number format."""


def check_quantisable(model: str, weights: str, skeleton: PreTrainedModel) -> None:
    """Raise ValueError if a layer has weights without a format, or this machine no product for them.

    `skeleton` has a layer of each kind.
    """
    refuse = f"weights={weights!r}: model {model!r} ({skeleton.config.model_type})"
    if not is_available(torch.device("cpu"), torch.float32):
        raise ValueError(f"weights={weights!r}: needs Linux and PyTorch 2.8 or newer; leave weights out")
    if weights in (GGUF, STORED):
        return  # only what the files have with few bits is packed
    if "lm_head.weight" in inspect.getsource(type(skeleton).forward):
        raise ValueError(f"{refuse} reads its head's weights in its own code; leave weights out")
    layers = decoder_in(skeleton).layers
    convolutions = {id(m.weight) for m in layers.modules() if isinstance(m, nn.Conv1d)}  # stay floats
    for name, parameter in layers.named_parameters():
        if parameter.dim() > 2 and id(parameter) not in convolutions:
            raise ValueError(f"{refuse} has stacked experts ({name}); leave weights out")
    for name, linear in quantised_linears(skeleton).items():
        if linear.in_features % GROUP:
            raise ValueError(
                f"{refuse}: {name} has {linear.in_features} inputs, no multiple of {GROUP}; leave weights out"
            )


def embedding_weight(model: PreTrainedModel) -> str:
    """The name of the embedding's table."""
    return f"{decoder_name(model)}.{embedding_name(decoder_in(model))}.weight"


def quantised_linears(model: nn.Module) -> Mapping[str, nn.Linear]:
    """The linear layers of a model's layers and its head, by their weights' names, but those whose weights the
    library's code reads itself.
    """
    linears = {f"{name}.weight": module for name, module in model.named_modules() if type(module) is nn.Linear}
    return {
        name: module
        for name, module in linears.items()
        if name == HEAD or (layer_number(name) >= 0 and not name.endswith(_READ_BY_CODE))
    }
