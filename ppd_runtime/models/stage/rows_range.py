"""A layer range whose passes all have the same number of rows, so that rows share the reading of weights.

A product's kernel, and the order of its sums, follow from its shape. Passes of ordinary decoding have one token and as
many rows without one as are missing, passes over several tokens have the same shape: a row has the same bits in both,
if they depend neither on the other rows nor on its place. `row_probe` finds that out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ppd_runtime.models.stage.caches import SomeLayersCache
from ppd_runtime.models.stage.chunks import num_tokens
from ppd_runtime.models.stage.compiled_passes import CompiledPasses
from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT, decoder_in, shallow_copy
from ppd_runtime.models.stage.graphs import Recordings, current_device
from ppd_runtime.models.stage.layer_range import Head, LayerRange
from ppd_runtime.models.stage.row_attention import (
    ROWS,
    RowByRow,
    Rows,
    RowsLayer,
    RunningRows,
    attend_by_row,
    mixes_rows,
    with_rows,
)
from ppd_runtime.models.stage.row_probe import attends_to_slots
from ppd_runtime.models.stage.slicing import LayerSubset
from ppd_runtime.models.stage.trees import TextRows, chain_of, token_tree
from ppd_runtime.sampling.gpu_choice import Ask, UnreadLogits


class RowsRange(LayerRange):
    """A `LayerRange` in the library's own code, each of whose passes has `ROWS` rows; prompts run as usual.

    Attention and experts run row by row, and all other layers over all rows at once. More tokens take several passes.

    With attention over slots a pass is told its rows in device memory. So on a GPU one recording for each doubling of
    the longest text serves all passes through the same layers, unless they have experts. Further recordings hold the
    norm, the head and what is asked of the logits: a choice, or the likeliest tokens.
    """

    rows_of_a_pass = ROWS

    def __init__(
        self,
        model: PreTrainedModel,
        compiled: CompiledPasses | None = None,
        first_layer: int = 0,
        longest_in_chunks: int | None = None,
    ) -> None:
        if compiled:
            raise ValueError("rows_share_weights with compiled passes: leave one of them out")
        super().__init__(model, None, first_layer, longest_in_chunks)
        self.reads_slots = attends_to_slots(model)
        """Whether attention reads the texts' caches where they lie; else what rows see is gathered."""
        self._recordings = Recordings() if self.reads_slots and self._on_cuda else None
        layers = decoder_in(model).layers
        self._waits = any(mixes_rows(part) for layer in layers for part in layer.children())
        """Whether layers have experts, whose code may wait for what rows have chosen: their passes are launched."""
        attend_by_row(model)

    @property
    def _recorded(self) -> int:
        return self._recordings.made if self._recordings else 0

    def compiles_chains(self, tokens: int) -> bool:
        """Whether a chain's tokens have the bits of their own passes: always."""
        return True

    def _run(
        self,
        first: int,
        last: int,
        inputs: list[int] | Tensor,
        position: int,
        in_prompt: bool = False,
        tree: Any = None,
    ) -> Tensor:
        if in_prompt:
            return super()._run(first, last, inputs, position, in_prompt)
        if isinstance(tree, Sequence):
            return self._run_texts(first, last, inputs, tree)
        self.check_position(first, position)
        paths = (tree or chain_of(num_tokens(inputs), self.device)).paths
        return self._run_texts(first, last, inputs, [TextRows(self.cache, position, paths)])

    def _run_tree(self, token_ids: list[int], parents: Sequence[int], position: int) -> Tensor:
        self.check_position(0, position)
        paths = token_tree(tuple(parents), self.device).paths
        return self._run_texts(0, self.num_layers, token_ids, [TextRows(self.cache, position, paths)])

    @torch.inference_mode()
    def _run_texts(self, first: int, last: int, inputs: list[int] | Tensor, texts: Sequence[TextRows]) -> Tensor:
        hidden = self._here(inputs) if isinstance(inputs, Tensor) else self._embed(inputs)
        parts = [self._run_padded(first, last, hidden[:, rows], some) for rows, some in _passes(texts)]
        for text in texts:
            for layer in text.cache.layers[first:last]:
                layer.length = text.kept + len(text.paths)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _run_padded(self, first: int, last: int, hidden: Tensor, texts: Sequence[TextRows]) -> Tensor:
        """One pass over at most `ROWS` rows, `[1, rows, hidden_size]`."""
        subset, padded, size = self._range(first, last), _padded(hidden), hidden.shape[1]
        if self.reads_slots:
            return self._run_slots(subset, padded, texts)[:, :size]
        places = [text.kept + len(path) - 1 for text in texts for path in text.paths]
        positions = torch.tensor([places + places[:1] * (ROWS - size)], device=self.device)
        return run_decoder(subset, padded, positions, RunningRows(texts, self.device))[:, :size]

    def _run_slots(self, subset: LayerSubset, hidden: Tensor, texts: Sequence[TextRows]) -> Tensor:
        from ppd_runtime.models.stage.slot_rows import own_entries, slot_tables  # they need Triton

        of_pass = slot_tables(texts, subset.numbers, ROWS)

        def launch(hidden: Tensor, table: Tensor) -> Tensor:
            rows = of_pass.rows(table)
            return run_decoder(subset, hidden, rows.places(), rows)

        table = of_pass.table.to(self.device)
        if not self._recordings or self._waits:
            return launch(hidden, table)
        with current_device(self.device):
            written = partial(own_entries, texts, subset.numbers)
            return self._recordings.run(of_pass.kind, (hidden, table), launch, written)

    @torch.inference_mode()
    def _head_over(self, hidden: Tensor, *tokens: int) -> Tensor:
        """`[*tokens, vocab_size]` float32 logits, of `ROWS` tokens at a time."""
        parts = [self._asked(some, _themselves)[: some.shape[1]] for some in self._here(hidden).split(ROWS, dim=1)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*tokens, -1)

    def unread_logits(self, hidden: Tensor) -> Tensor | UnreadLogits:
        """The newest token's logits, unread if the head is recorded."""
        return self._unread(hidden if hidden.shape[1] == 1 else hidden[:, -1:], self.logits)

    def unread_token_logits(self, hidden: Tensor, head: Head | None = None) -> Tensor | UnreadLogits:
        """Each token's logits, unread if heads are recorded and one pass has room for all."""
        return self._unread(hidden, (lambda states: head(states)[0].float()) if head else self.token_logits, head)

    def _unread(
        self, hidden: Tensor, read: Callable[[Tensor], Tensor], head: Head | None = None
    ) -> Tensor | UnreadLogits:
        if not self._recordings or hidden.shape[1] > ROWS:
            return read(hidden)

        def find(ask: Ask, inputs: Sequence[Tensor]) -> Tensor:
            return self._timed_head(partial(self._asked, self._here(hidden), ask, *inputs, head=head))

        return UnreadLogits((ROWS, self.model.config.vocab_size), self.device, partial(read, hidden), find)

    @torch.inference_mode()
    def _asked(self, hidden: Tensor, ask: Ask, *inputs: Tensor, head: Head | None = None) -> Tensor:
        """What `ask` finds in a pass's float32 logits, `[ROWS, vocab_size]`, given further tensors."""
        of_states = head or self.head

        def launch(hidden: Tensor, *inputs: Tensor) -> Tensor:
            return ask(of_states(hidden)[0].float(), *inputs)

        if not self._recordings:
            return launch(_padded(hidden), *inputs)
        with current_device(self.device):
            return self._recordings.run((of_states, ask), (_padded(hidden), *inputs), launch)

    def _stand_in(self, number: int, layer: torch.nn.Module) -> torch.nn.Module:
        mixing = {name: RowByRow(part) for name, part in layer.named_children() if mixes_rows(part)}
        if mixing:
            layer = shallow_copy(layer)
            for name, part in mixing.items():
                setattr(layer, name, part)
        return super()._stand_in(number, layer)


def run_decoder(subset: LayerSubset, hidden: Tensor, positions: Tensor, rows: Rows) -> Tensor:
    """The states after a pass over rows at these positions, `[1, ROWS, hidden_size]`."""
    cache = SomeLayersCache([RowsLayer(number, rows) for number in subset.numbers], subset.numbers)
    feed = {"inputs_embeds": hidden, "position_ids": positions, CACHE_ARGUMENT: cache}
    return with_rows(rows, lambda: subset.decoder(**feed, use_cache=True).last_hidden_state)


def _themselves(logits: Tensor) -> Tensor:
    return logits


def _padded(hidden: Tensor) -> Tensor:
    """States of `ROWS` rows, those without a token zeros."""
    return pad(hidden, (0, 0, 0, ROWS - hidden.shape[1]))


def _passes(texts: Sequence[TextRows]) -> list[tuple[slice, list[TextRows]]]:
    """The texts' rows in passes of at most `ROWS`: which of all rows each has, and its texts."""
    passes, start, some, room = list[tuple[slice, list[TextRows]]](), 0, list[TextRows](), ROWS
    for text in texts:
        done = 0
        while done < len(text.paths):
            part = text._replace(paths=text.paths[done : done + room])
            some.append(part)
            done, room = done + len(part.paths), room - len(part.paths)
            if not room:
                passes.append((slice(start, start + ROWS), some))
                start, some, room = start + ROWS, [], ROWS
    if some:
        passes.append((slice(start, start + ROWS - room), some))
    return passes
