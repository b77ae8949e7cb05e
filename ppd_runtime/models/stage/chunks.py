"""Prompts in chunks: every layout and method reads a prompt in the same passes, so its entries have the same bits."""

from collections.abc import Iterator
from itertools import accumulate, chain, pairwise, repeat, takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.stage.decoder_parts import decoder_in
from ppd_runtime.models.stage.library_probe import attention_masks, kept_by_layers, most_chosen, without_weights
from ppd_runtime.models.stage.rotary import RotaryTable
from ppd_runtime.models.stage.state_probe import chunks_start_from_states
from ppd_runtime.models.stage.states import new_cache
from ppd_runtime.models.stage.trees import chain_of

ONE_PASS = 256
"""The longest prompt, in tokens, that is one chunk, as in the library's `generate`."""
PROMPT_CHUNKS = 224, 208, 192, 176, 160, 144, 144, 128
"""Tokens of a longer prompt's chunks in their order; further ones are as long as the last of these. An entry's bits
depend on them, so they are the same everywhere and no setting."""
SEVERAL_ROWS = 3
"""Represents several rows when the library's behaviour is checked."""


def prompt_chunks(tokens: int, longest: int | None = None) -> list[range]:
    """The positions of each chunk of a prompt; one of more than `longest` tokens stays whole, see `longest_in_chunks`.

    Later chunks attend to more, so they have fewer tokens and all take about as long: stages that work at once wait for
    the slowest.
    """
    is_cut = tokens > ONE_PASS and (longest is None or tokens <= longest)
    borders = takewhile(lambda end: end < tokens, _ends() if is_cut else ())
    return [range(*ends) for ends in pairwise([0, *borders, tokens])] if tokens else []


def _ends() -> Iterator[int]:
    """Yield the ends of an endless prompt's chunks."""
    return accumulate(chain(PROMPT_CHUNKS, repeat(PROMPT_CHUNKS[-1])))


def is_whole(chunk: range) -> bool:
    """Whether a longer prompt has this chunk, too: it is not cut short by the prompt's end."""
    return next(end for end in _ends() if end > chunk.start) == chunk.stop


def num_tokens(inputs: list[int] | Tensor) -> int:
    """Number of tokens in token ids, or in hidden states `[1, tokens, hidden_size]`."""
    return len(inputs) if isinstance(inputs, list) else inputs.shape[1]


def part_of(inputs: list[int] | Tensor, chunk: range) -> list[int] | Tensor:
    """A chunk's token ids, or its hidden states `[1, tokens, hidden_size]`."""
    tokens = slice(chunk.start, chunk.stop)
    return inputs[tokens] if isinstance(inputs, list) else inputs[:, tokens]


def longest_in_chunks(model: PreTrainedModel, most_positions: int | None) -> int | None:
    """The longest prompt that chunks compute like one pass, but for rounding; None: any.

    Three things make a token's result depend on later tokens of its pass: a rotary table chosen by the longest
    position, as in long-RoPE; code that overlooks a window that the cache keeps; and an index, whose choice among equal
    scores depends on how many tokens there are. And some kernels begin a pass over several tokens without the recurrent
    state before it.

    Args:
        model: it has a layer of each kind; it may be on the meta device.
        most_positions: the model's; None if it names no end.
    """
    if not library_masks_fit(model, SEVERAL_ROWS) or not chunks_start_from_states(model):
        return 0
    rotary, longest = getattr(without_weights(model)[0], "rotary_emb", None), most_chosen(model.config)
    if rotary is None:
        return longest
    table = RotaryTable(rotary, most_positions)
    ends = [end for end in (table.most_together(0), longest) if end is not None]
    return min(ends, default=None) if table.knows_borders else 0


@torch.inference_mode()
def library_masks_fit(model: PreTrainedModel, tokens: int) -> bool:
    """Whether, in a pass of `tokens` tokens, the library shows each token what its own pass would.

    No, if its code overlooks a window that its cache keeps to, as for a Llama with a `sliding_window`.
    """
    chain, kept = chain_of(tokens, torch.device("cpu")), kept_by_layers(model.config)[: len(decoder_in(model).layers)]
    for position in {1 + max(layer.window or 1, 1) for layer in kept}:
        cache = new_cache(kept, 0)
        for layer in cache.layers:
            layer.length = position
        layers = dict(enumerate(cache.layers))
        found = attention_masks(model, cache.view(range(len(kept))), tokens, position)
        for of_layer, mask, ours in zip(kept, found, chain.masks(layers, torch.float32).values(), strict=True):
            seen = torch.ones_like(ours, dtype=torch.bool) if mask is None else mask.cpu()
            if not torch.equal(seen, ours == 0) and (of_layer.entries or mask is not None):
                return False
    return True
