"""Outputs for fixed inputs, hashed: workers that compute the same bits have the same hashes.

Every worker can compute them, whichever layers it holds. They are of a layer in the model's shape with generated
weights, and of the final norm and head, which all have except boundaries that guess among some tokens. Both run as in
decoding.
"""

import copy
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.chunks import PROMPT_CHUNKS
from ppd_runtime.models.stage.decoder_parts import decoder_in, set_decoder, shallow_copy
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import some_layers

_PROMPTS = (3, 40, sum(PROMPT_CHUNKS[:2]) + PROMPT_CHUNKS[-1])
"""The longest has three chunks, the last as short as a whole one can be: kernels may depend on the number of rows."""
_CHAIN = 5
_PERIOD = 2**16 - 15
"""The weights' period, a prime: no two rows of a matrix are alike."""
_APART = 2**12
"""Numbers between two weights' beginnings: all are aligned like freshly allocated ones."""
_LARGEST = 2**7
"""The largest drawn whole number; bfloat16 has them all."""
_BESIDE_BFLOAT16 = 1 + 2.0**-12
"""Multiplies a bfloat16 number to one that only float32 has."""


def output_hashes(stage: LayerRange, with_head: bool = True) -> dict[str, str]:
    """SHA-256 of a layer's outputs for prompts, for single tokens behind them and for a chain, and of the head's.

    The keys say what was run, in the words of messages. It takes the memory of the layer's largest and smallest
    weights. `with_head` is for stages that have the model's whole head.
    """
    sample, tokens = stage.over(_sample_model(stage.model)), max(_PROMPTS) + 1 + _CHAIN
    states = _states(sample, tokens)
    hashes = {"the rows of a pass": str(stage.rows_of_a_pass or 1)}
    hashes["attention over slots"] = str(stage.reads_slots)
    for size in _PROMPTS:
        sample.begin(tokens)
        hashes[f"a layer over {size} tokens"] = _hash(sample.run(0, 1, states[:, :size], 0))
        one = sample.run(0, 1, states[:, size : size + 1], size)
        hashes[f"a layer over one token behind {size}"] = _hash(one)
        if sample.compiles_chains(_CHAIN):
            chain = sample.run(0, 1, states[:, size + 1 : size + 1 + _CHAIN], size + 1)
            hashes[f"a layer over {_CHAIN} tokens behind {size + 1}"] = _hash(chain)
    for size in (1, _CHAIN) if with_head else ():
        hashes[f"the head over {size}"] = _hash(stage.token_logits(_states(stage, tokens)[:, :size]))
    return hashes


def _states(stage: LayerRange, tokens: int) -> Tensor:
    states = _drawn(tokens * stage.state_size).view(1, tokens, -1) / (_LARGEST // 2)
    return states.to(stage.device, stage.model.dtype)


def _sample_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the first layer alone, whose weights come from a generator; head and embedding are shared."""
    twin = shallow_copy(model)
    decoder = some_layers(decoder_in(model), [0])
    layer = decoder_in(model).layers[0]
    known = {id(model.config): decoder.config, **_sample_weights(layer, model.config.hidden_size)}
    decoder.layers = nn.ModuleList([copy.deepcopy(layer, known)])
    set_decoder(twin, decoder)
    twin.config = decoder.config
    return twin


def _sample_weights(layer: nn.Module, hidden_size: int) -> dict[int, Tensor]:
    """Replacements of a checkpoint's tensors, by identity; matrices are parts of one piece of memory.

    Only the smallest matrix is not exact in bfloat16: compiled code reads it in another way, and it needs memory of its
    own. A stage without the layer has none of these tensors.
    """
    scale = 2.0 ** (1 - round(math.log2(hidden_size) / 2))  # a sub-layer adds about as much as it is given
    tensors = list(layer.state_dict(keep_vars=True).values())
    packing: dict[int, Any] = {id(module.weight): module for module in layer.modules() if hasattr(module, "packed")}
    packing |= {id(tensor): tensor.packing for tensor in tensors if hasattr(tensor, "packing")}
    shapes = [packing[id(t)].matrix_shape if id(t) in packing else tuple(t.shape) for t in tensors]
    size = max(map(math.prod, shapes)) + _APART * len(tensors)
    numbers = _drawn(_PERIOD).repeat(-(-size // _PERIOD)) * (scale / _LARGEST)
    likes = {(tensor.device, tensor.dtype) for tensor in tensors if id(tensor) not in packing}
    memory = {like: numbers.to(*like) for like in likes}
    smallest = _smallest_matrix({i: shape for i, shape in enumerate(shapes) if id(tensors[i]) not in packing})
    weights = dict[int, Tensor]()
    for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        packs = packing.get(id(tensor))
        kept = numbers if packs else memory[tensor.device, tensor.dtype]
        part = kept[i * _APART :][: math.prod(shape)].view(shape)
        part = (part * _BESIDE_BFLOAT16).to(part.dtype) if i == smallest else part
        weight = packs.packed(part) if packs else part if part.dim() > 1 else 1 + part
        weights[id(tensor)] = nn.Parameter(weight, False) if isinstance(tensor, nn.Parameter) else weight
    return weights


def _smallest_matrix(shapes: Mapping[int, tuple[int, ...]]) -> int | None:
    """The index of the smallest shape with at least two dimensions, the last among equals."""
    matrices = [i for i, shape in shapes.items() if len(shape) > 1]
    return min(reversed(matrices), key=lambda i: math.prod(shapes[i]), default=None)


def _drawn(size: int) -> Tensor:
    """Whole numbers in bfloat16, the same on every machine: normal draws depend on the processor."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(-_LARGEST, _LARGEST, (size,), generator=generator).to(torch.bfloat16)


def _hash(outputs: Tensor) -> str:
    return hashlib.sha256(outputs.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
