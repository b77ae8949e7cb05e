"""A model's decoder and its parts, whose names differ from family to family, and copies that share them."""

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

DECODERS = ("model", "backbone")
"""Attributes of causal language models that may be the decoder."""
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""By which name decoders of the installed transformers take their cache; 5.24 renamed it."""
_OTHER_CACHE_ARGUMENT = "cache_params"
"""By which name decoders that have recurrent states alone take it."""
_FINAL_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f")
_EMBEDDINGS = ("embed_tokens", "embeddings")


def decoder_name(model: PreTrainedModel) -> str | None:
    """The attribute of a causal language model that is its decoder; None where it has none with layers."""
    return next((name for name in DECODERS if hasattr(getattr(model, name, None), "layers")), None)


def decoder_in(model: PreTrainedModel) -> Any:
    """A causal language model's decoder: what is before its head."""
    name = decoder_name(model)
    assert name is not None
    return getattr(model, name)


def set_decoder(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Put a decoder, or what stands in for it, before a model's head."""
    name = decoder_name(model)
    assert name is not None
    setattr(model, name, decoder)


def cache_argument(decoder: nn.Module) -> str:
    """By which name a decoder takes its cache."""
    known = inspect.signature(type(decoder).forward).parameters
    return _OTHER_CACHE_ARGUMENT if _OTHER_CACHE_ARGUMENT in known else CACHE_ARGUMENT


def states_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of states between layers: float32 where layers add in it, whatever their weights have, else theirs."""
    adds_in_float32 = any(getattr(layer, "residual_in_fp32", False) for layer in decoder_in(model).layers)
    return torch.float32 if adds_in_float32 else model.dtype


def embedding_in(model: PreTrainedModel) -> Any:
    """A causal language model's table of embeddings."""
    decoder = decoder_in(model)
    return getattr(decoder, embedding_name(decoder))


def has_final_norm(decoder: nn.Module) -> bool:
    """Whether a decoder has a final norm by one of the names that are known."""
    return any(hasattr(decoder, name) for name in _FINAL_NORMS)


def final_norm(decoder: nn.Module) -> str:
    """The attribute of a decoder that is its final norm."""
    return next(name for name in _FINAL_NORMS if hasattr(decoder, name))


def embedding_name(decoder: nn.Module) -> str:
    """The attribute of a decoder that is its embedding."""
    return next(name for name in _EMBEDDINGS if hasattr(decoder, name))


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of the module with its own table of children; parameters and children are shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
