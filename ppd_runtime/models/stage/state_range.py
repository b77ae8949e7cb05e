"""A layer range some of whose layers keep a recurrent state: tokens after the prompt run one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppd_runtime.models.stage.chunks import num_tokens, part_of
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.library_probe import has_chunks, has_states, most_chosen
from ppd_runtime.models.stage.path_range import PathRange
from ppd_runtime.models.stage.slicing import LayerSubset
from ppd_runtime.models.stage.states import StateCache


class StateRange(LayerRange):
    """A `LayerRange` whose cache has states; it has no compiled code.

    A prompt's chunks run in the library's form for many tokens. Other passes have one token, also those of a chain or
    of candidates: so a token has the bits that it has alone.
    """

    has_states = True
    cache: StateCache

    def keep_states(self, tokens: int | None) -> None:
        """See `LayerRange.keep_states`."""
        self.cache.back = tokens

    def held_from(self, first: int, last: int) -> int:
        """See `LayerRange.held_from`."""
        return self.cache.held_from(first, last)

    def run_pass(
        self, first: int, last: int, inputs: list[int] | Tensor, position: int, in_prompt: bool = False
    ) -> Tensor:
        """Like `run`: a prompt's chunk in one pass, other tokens in a pass each.

        So are those of a later chunk if the library begins such passes without the state before them.
        """
        tokens = num_tokens(inputs)
        if tokens == 1 or (in_prompt and not (position and self._longest_in_chunks == 0)):
            return super().run_pass(first, last, inputs, position, in_prompt)
        each = [(part_of(inputs, range(i, i + 1)), position + i) for i in range(tokens)]
        return torch.cat([super(StateRange, self).run_pass(first, last, *one) for one in each], dim=1)

    def _run_tree(self, token_ids: list[int], parents: Sequence[int], position: int) -> Tensor:
        """Run candidates of one position in a pass each, the first one last, and move them to their places."""
        if any(parent >= 0 for parent in parents):
            raise RuntimeError("layers with a state run no trees but candidates of one position")
        found = list[Tensor]()
        for place in reversed(range(len(token_ids))):
            self.cache.set_length(position)
            found.append(self._run_library(0, self.num_layers, [token_ids[place]], position))
            if place:
                self.cache.move(position, position + place)
        return torch.cat(found[::-1], dim=1)

    def _output(self, subset: LayerSubset, feed: Mapping[str, Any]) -> Tensor:
        self.cache.begin_pass(subset.attending)
        hidden = super()._output(subset, feed)
        self.cache.end_pass(subset.attending, hidden.shape[1])
        return hidden


def range_class(config: PretrainedConfig) -> type[LayerRange]:
    """The class for a model's layers."""
    if has_states(config):
        return StateRange
    return PathRange if has_chunks(config) or most_chosen(config) is not None else LayerRange
