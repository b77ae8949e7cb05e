"""What the library's code does with recurrent states, found by running layers that need no weights."""

import contextlib

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.stage.decoder_parts import cache_argument, decoder_in
from ppd_runtime.models.stage.library_probe import embedding_scale, kept_by_layers
from ppd_runtime.models.stage.slicing import decoder_of
from ppd_runtime.models.stage.states import State, StateCache, is_recurrent

_TOKENS = 2


def left_by_layer(skeleton: PreTrainedModel, number: int, before: State | None = None) -> State:
    """What a layer leaves after some tokens, at a text's start or after what it left `before`.

    `skeleton` may be on the meta device.
    """
    start = _TOKENS if before else 0
    cache = StateCache(kept_by_layers(skeleton.config), 2 * _TOKENS, dtype=skeleton.dtype)
    layer = cache.layers[number]
    layer.length, layer.states = start, {start - 1: before} if before else {}
    inputs = torch.zeros(1, _TOKENS, skeleton.config.hidden_size, device=skeleton.device, dtype=skeleton.dtype)
    piece = decoder_of(skeleton, {number: decoder_in(skeleton).layers[number]}, embedding_scale(skeleton))
    cache.begin_pass([number])
    with contextlib.suppress(RuntimeError, NotImplementedError):  # experts, which come later, need numbers
        piece(inputs_embeds=inputs, **{cache_argument(piece): cache.view([number])}, use_cache=True)
    cache.end_pass([number], _TOKENS)
    return layer.states.get(start + _TOKENS - 1, {})


def chunks_start_from_states(skeleton: PreTrainedModel) -> bool:
    """Whether a pass over several tokens starts from the recurrent state before it, in all layers that have one.

    Some kernels begin every such pass with zeros. `skeleton` may be on the meta device.
    """
    with torch.enable_grad():
        return all(
            _depends(skeleton, number) for number, layer in enumerate(kept_by_layers(skeleton.config)) if layer.states
        )


def _depends(skeleton: PreTrainedModel, number: int) -> bool:
    before = {key: part.detach().requires_grad_() for key, part in left_by_layer(skeleton, number).items()}
    if not before:  # the layer did not get so far without weights: nothing is known
        return False
    after = left_by_layer(skeleton, number, before)
    return all(key in after and _depends_on(after[key], part) for key, part in before.items() if is_recurrent(key))


def _depends_on(after: Tensor, before: Tensor) -> bool:
    if not after.requires_grad:
        return False
    (found,) = torch.autograd.grad(after.sum(), before, allow_unused=True, retain_graph=True)
    return found is not None
