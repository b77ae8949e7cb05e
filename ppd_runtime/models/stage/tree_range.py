"""One of several stages in a row: runs its layers over a pass's rows, each a token in flight after its own text."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.models.stage.arena import ArenaCache, RowArena
from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.chunks import num_tokens
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.prefixes import KeptChunk, KeptPrefixes
from ppd_runtime.models.stage.slots import node_slots
from ppd_runtime.models.stage.trees import Part, PlacedTree, TextRows, tree_of
from ppd_runtime.sampling.gpu_choice import UnreadLogits

_TRIED: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 2), (0, 2, 3), (1, 4), (0, 5), (0, 2, 3, 6), (1, 4, 7))
"""Paths of the rows that a stage tries at its start: siblings, and tokens after them."""
_TRIED_TEXTS, _LONGEST_TRIED_WINDOW = (61, 700), 1024
"""Text lengths before them: longer than a step of attended rows, and than the 512 keys that PyTorch's attention takes
at a time."""
_PROMPT = 3  # tokens of that text that are run
_BETWEEN_LOOKS_S = 0.002


class TreeRange:
    """A stage's layers for one request at a time; nodes have numbers. `another` serves a further request.

    Rows run together if that keeps their bits: in our own code, whose order of sums does not depend on the other rows,
    and in passes padded to one number of rows (`RowsRange`), each if the stage found it so at its start. Else each row
    runs as a pass of one token, over its text's entries in the rows of their positions: its bits are ordinary
    decoding's, in every dtype and with every kernel. A trial alone would not do: in bfloat16 most sums in another order
    round to the same number, so a trial may find no difference where a text of some hundred tokens does.

    A drafter may read states after several layers. These travel with the states that go from stage to stage: states
    are `[1, tokens, state_size]` then but for what stands before, the same tokens' hidden states after all layers of
    `told_layers` that come before, in their order. `top` and `told` take them apart.

    Args:
        stage: it has these layers.
        most_nodes: nodes that have entries at any time, but the certain ones.
        kept_tokens: of earlier prompts, whose entries are kept for prompts that begin alike.
        room: tokens of all requests at a time; None: not known.
        told_layers: the layers of the model after which a drafter reads states, rising; none is the model's last one.
    """

    def __init__(
        self,
        stage: LayerRange,
        most_nodes: int,
        kept_tokens: int = 0,
        room: int | None = None,
        told_layers: Sequence[int] = (),
    ) -> None:
        self._stage, self._most_nodes, self._kept = stage, most_nodes, KeptPrefixes(kept_tokens)
        self._told_layers, self._hidden_size = told_layers, int(stage.model.config.hidden_size)
        self._state_size = stage.state_size
        self.num_layers, self._on_gpu = stage.num_layers - stage.first_layer, stage.device.type == "cuda"
        self.layer_passes = 0
        """One-token layer passes so far, a prompt's as one token's: the stage's when it was made, and its own."""
        self.cached_tokens = 0
        """Tokens of the prompt whose entries were kept from an earlier one."""
        self.most_together = 1
        """Most rows that run together."""
        self._arena: RowArena | None = None
        self._joins_texts, self._pads = False, stage.rows_of_a_pass is not None
        self._begin(StageCache([], 0))
        if stage.most_together(_PROMPT) is None and stage.compiles_chains(len(_TRIED)):
            arena = stage.arena(room)
            if arena or self._pads:
                self._find_out_what_runs_together(arena)
        self.begin(0)

    @property
    def joins_requests(self) -> bool:
        """Whether rows of several requests run together."""
        return self._joins_texts or self._stage.rows_share_passes

    @property
    def only_chains(self) -> bool:
        """Whether rows side by side take a pass each."""
        return self.most_together == 1 and not self._stage.rows_share_passes

    def another(self) -> "TreeRange":
        """These layers over a new cache, for another request at the same time."""
        other = copy.copy(self)
        other.layer_passes = self._stage.layer_passes
        other._begin(StageCache([], 0))
        other.begin(0)
        return other

    def begin(self, capacity: int, prompt: Sequence[int] = ()) -> None:
        """Forget the last sequence and make room for one of at most `capacity` tokens; 0 makes room for none.

        `prompt` are its first tokens, if an earlier prompt's entries may be used.
        """
        self._kept.copy_from(self._cache)
        if isinstance(self._cache, ArenaCache):
            self._cache.arena.give_back(self._cache.rows, self._slots.reach)
        tokens = capacity + self._most_nodes
        self._stage.begin(tokens, self._arena.take(tokens) if self._arena and capacity else None)
        self._begin(self._stage.cache)
        self._prompt, self.cached_tokens = prompt, 0

    def _begin(self, cache: StageCache) -> None:
        self._cache, self._slots = cache, node_slots(cache, self._most_nodes)

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk of a prompt of `tokens` tokens."""
        return self._stage.prompt_chunks(tokens)

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run a prompt's next chunk, token ids or states `[1, tokens, hidden_size]`; returns the states after the
        layers.
        """
        self._stage.turn_to(self._cache)
        chunk = range(position, position + num_tokens(inputs))
        key = self._kept.key(self._prompt, chunk)
        if kept := self._kept.find(key):
            self._stage.append_chunk(kept)
            self.cached_tokens += len(chunk)
            hidden = kept.hidden
        else:
            before = self._stage.layer_passes

            def run(given: list[int] | Tensor, first: int, last: int) -> Tensor:
                return self._stage.run_pass(first, last, given, position, in_prompt=True)

            hidden = self._run_pieces(run, inputs, *self._numbers(None))
            self.layer_passes += self._stage.layer_passes - before
            if key:
                self._kept.keep(key, KeptChunk(self._cache, chunk, hidden))
        self._slots.kept = chunk.stop
        return hidden

    @property
    def layers_at_once(self) -> int:
        """Layers run between two looks, since looking costs time; all until one has run.

        On a GPU half of them: each piece is recorded by itself, and a length that follows the measured time would have
        passes recorded again and again.
        """
        if self._on_gpu:
            return -(-self.num_layers // 2)
        of_one = self._stage.layer_seconds
        return min(1 + int(_BETWEEN_LOOKS_S / of_one), self.num_layers) if of_one else self.num_layers

    def run_rows(
        self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]], layers: range | None = None
    ) -> Tensor:
        """Run nodes as one pass. Each path ends with one of them, after its ancestors that are not kept.

        Ancestors come first. `inputs` are the nodes' token ids, or their hidden states, as the result is. `layers` are
        some of the stage's, counted from its first one, or all. Nodes may be kept and dropped between two calls for
        some layers.
        """
        before, position = self._stage.layer_passes, self._slots.kept + len(paths[-1]) - 1

        def run(given: Sequence[int] | Tensor, first: int, last: int) -> Tensor:
            return self._stage.run_rows(self._parts([(self, given, paths)]), position, first, last)

        hidden = self._run_pieces(run, inputs, *self._numbers(layers))
        self.layer_passes += self._stage.layer_passes - before
        return hidden

    def _run_pieces(self, run: Callable[[Any, int, int], Tensor], inputs: Any, first: int, last: int) -> Tensor:
        """The states after the layers `first` to `last`, behind those after told layers; `run` runs a piece of them."""
        if not self._told_layers:
            return run(inputs, first, last)
        states, found = inputs, list[Tensor]()
        if isinstance(inputs, Tensor):
            inputs = inputs.to(self._stage.device)
            states, found = self.top(inputs), [inputs[..., : -self._state_size]]
        for end in [*(layer for layer in self._told_layers if first <= layer < last), last]:
            states = run(states, first, end) if first < end else states
            found.append(states[..., : self._hidden_size] if end < last else states)
            first = end
        return torch.cat(found, dim=-1)

    def top(self, hidden: Tensor) -> Tensor:
        """The states after the newest layer alone, `[1, tokens, state_size]`."""
        return hidden[..., -self._state_size :].contiguous() if self._told_layers else hidden

    def told(self, hidden: Tensor) -> Tensor:
        """The states that a drafter reads, from those after the model's last layer: `[tokens, layers, hidden_size]`."""
        layers = max(1, len(self._told_layers))
        return hidden[0, :, : layers * self._hidden_size].unflatten(-1, (layers, self._hidden_size))

    def _numbers(self, layers: range | None) -> tuple[int, int]:
        """The model's numbers of some of the stage's layers, half-open."""
        first = self._stage.first_layer
        return (first, self._stage.num_layers) if layers is None else (first + layers.start, first + layers.stop)

    def run_together(self, asked: Sequence["Asked"], layers: range | None = None) -> list[Tensor]:
        """The results of `run_rows` for several requests, from one pass."""
        if len(asked) == 1:
            ((stage, inputs, paths),) = asked
            return [stage.run_rows(inputs, paths, layers)]
        order = sorted(range(len(asked)), key=lambda place: not asked[place][0]._in_arena)
        in_order = [asked[place] for place in order]
        stage, _, paths = in_order[-1]
        position, sizes = stage._slots.kept + len(paths[-1]) - 1, [len(paths) for _, _, paths in in_order]
        first, last = self._numbers(layers)

        def run(given: Sequence[Sequence[int] | Tensor] | Tensor, first: int, last: int) -> Tensor:
            parts = given.split(sizes, dim=1) if isinstance(given, Tensor) else given
            some = [(stage, part, paths) for (stage, _, paths), part in zip(in_order, parts, strict=True)]
            return self._stage.run_rows(self._parts(some), position, first, last)

        joined: Any = [given for _, given, _ in in_order]
        if self._told_layers and isinstance(joined[0], Tensor):
            joined = torch.cat(joined, dim=1)
        hidden = self._run_pieces(run, joined, first, last)
        for stage, _, paths in asked:
            stage.layer_passes += len(paths) * (last - first)
        states = hidden.split(sizes, dim=1)
        return [states[order.index(place)] for place in range(len(asked))]

    def logits_together(self, asked: Sequence[tuple["TreeRange", Tensor]]) -> list[Tensor]:
        """`logits` of one token's states of each of several requests, together if that keeps their bits."""
        hidden = [self.top(states) for _, states in asked]
        if len(hidden) > 1 and self.joins_heads:
            starts = range(0, len(hidden), self.most_together)
            parts = (torch.cat([*hidden[start : start + self.most_together]], dim=1) for start in starts)
            return [logits for part in parts for logits in self._stage.token_logits(part)]
        return [stage.logits(states) for stage, states in asked]

    def keep(self, node: int) -> None:
        """Keep a node that has run as the next certain token."""
        self._slots.keep(node)

    def drop(self, node: int) -> None:
        """Drop an unneeded node."""
        self._slots.drop(node)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[vocab_size]` float32 logits after the newest hidden state: final norm and head."""
        return self._stage.logits(self.top(hidden))

    def unread_logits(self, hidden: Tensor) -> Tensor | UnreadLogits:
        """The `logits`, perhaps unread; see `LayerRange.unread_logits`."""
        return self._stage.unread_logits(self.top(hidden))

    def _parts(self, asked: Sequence["Asked"]) -> Iterator[Part]:
        """Parts that run together; a part's slots are ready until the next is asked for. The arena's come first."""
        joined = [one for one in asked if one[0]._joins]
        for group in (joined, *([one] for one in asked if not one[0]._joins)):
            for part in _cut(group, self.most_together):
                yield self._of_several(part) if len(part) > 1 else part[0][0]._part(*part[0][1:])

    def _part(self, inputs: list[int] | Tensor, paths: Sequence[Sequence[int]]) -> Part:
        self._stage.turn_to(self._cache)
        if len(paths) == 1:
            return inputs, self._slots.place(paths[0]), None
        return inputs, self._slots.kept, tree_of(self._slots.rows(paths), self._stage.device)

    def _of_several(self, asked: Sequence["Asked"]) -> Part:
        if self._arena:
            self._stage.turn_to(self._arena.cache)
        inputs = [of_stage for _, of_stage, _ in asked]
        trees: Any = [stage._placed(paths) for stage, _, paths in asked]
        states = [of_stage for of_stage in inputs if isinstance(of_stage, Tensor)]
        tokens = [token for of_stage in inputs if not isinstance(of_stage, Tensor) for token in of_stage]
        return torch.cat(states, dim=1) if states else tokens, 0, trees

    def _placed(self, paths: Sequence[Sequence[int]]) -> PlacedTree | TextRows:
        """Nodes of this text in a pass over several texts' nodes."""
        rows = self._slots.rows(paths)
        if not isinstance(self._cache, ArenaCache):
            return TextRows(self._cache, self._slots.kept, rows)
        tree = tree_of(rows, self._stage.device)
        return PlacedTree(tree, self._slots.kept, self._cache.rows.start, self._cache.memory.order)

    @property
    def _joins(self) -> bool:
        """Whether rows may run with those of other texts."""
        return self._joins_texts if self._pads else self._in_arena

    @property
    def _in_arena(self) -> bool:
        return isinstance(self._cache, ArenaCache) and self._cache.is_there

    @cached_property
    def joins_heads(self) -> bool:
        """Whether logits of several rows at once have the bits of each row's own, found by comparing."""
        if self.most_together == 1:
            return False
        states = self._random_states(len(_TRIED))
        alone = torch.stack([self._stage.logits(states[:, i : i + 1]) for i in range(len(_TRIED))])
        sizes = range(2, len(_TRIED) + 1)
        return all(self._stage.token_logits(states[:, :size]).equal(alone[:size]) for size in sizes)

    def _find_out_what_runs_together(self, arena: RowArena | None) -> None:
        """Find how many rows, of one text or of several, a pass may have so that each keeps its own pass's bits.

        That is found out by comparing: a model may have attention that our code does not know.
        """
        most = len(_TRIED)
        self.most_together, alone = most, list[Tensor]()
        for text in _TRIED_TEXTS:
            self._prepare_to_try(text)
            alone.append(self._try([1] * most))
            if not all(self._try([size, most - size]).equal(alone[-1]) for size in range(2, most + 1)):
                self.most_together = 1
                return
        self._arena, self._joins_texts = arena, True
        if not all(map(self._leaves_two_texts_alone, _TRIED_TEXTS, alone)):
            self._arena, self._joins_texts = None, False

    def _leaves_two_texts_alone(self, text: int, alone: Tensor) -> bool:
        """Whether the tried rows of two texts, run in the same passes, have the states that they have alone."""
        two, half, states = (self.another(), self.another()), len(_TRIED) // 2, [list[Tensor](), list[Tensor]()]
        for stage in two:
            stage._prepare_to_try(text)
        for rows in (slice(half), slice(half, len(_TRIED))):
            found = self.run_together([(stage, self._tried(rows), _TRIED[rows]) for stage in two])
            for of_stage, of_rows in zip(states, found, strict=True):
                of_stage.append(of_rows)
        for stage in two:
            stage.begin(0)
        return all(torch.cat(of_stage, dim=1).equal(alone) for of_stage in states)

    def _try(self, sizes: Sequence[int]) -> Tensor:
        """States of the tried rows after the text, run in groups of `sizes`."""
        kept, self._slots = self._slots.kept, node_slots(self._cache, self._most_nodes)
        self._slots.kept = kept
        starts = accumulate(sizes, initial=0)
        rows = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False) if size]
        return torch.cat([self.run_rows(self._tried(some), _TRIED[some]) for some in rows], dim=1)

    def _prepare_to_try(self, text: int) -> None:
        """Make entries of a text of `text` tokens, or more than short windows have."""
        first, states = self._stage.first_layer, self._random_states(_PROMPT)
        windows = [layer.sliding_window or 0 for layer in self._stage.cache.layers]
        text = max([text, *(window + 1 for window in windows if window <= _LONGEST_TRIED_WINDOW)])
        self.begin(text + len(_TRIED))
        self.run_prompt(states if first else list(range(_PROMPT)), 0)
        self._cache.fill(torch.Generator().manual_seed(0))
        self._slots.kept = text

    def _tried(self, rows: slice) -> list[int] | Tensor:
        """The tried rows' inputs."""
        numbers = range(len(_TRIED))[rows]
        return self._random_states(len(_TRIED))[:, rows] if self._stage.first_layer else list(numbers)

    def _random_states(self, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(1, tokens, self._state_size, generator=generator, dtype=torch.float32)
        return states.to(self._stage.device, self._stage.model.dtype)


Asked = tuple[TreeRange, Sequence[int] | Tensor, Sequence[Sequence[int]]]
"""A request's stage, and what it would run: see `TreeRange.run_rows`."""


def _cut(
    asked: Sequence[Asked], most: int
) -> Iterator[list[tuple[TreeRange, list[int] | Tensor, Sequence[Sequence[int]]]]]:
    """Split the rows into parts of at most `most` rows, in their order."""
    part, room = [], most
    for stage, inputs, paths in asked:
        done = 0
        while done < len(paths):
            rows = slice(done, done + room)
            given = inputs[:, rows] if isinstance(inputs, Tensor) else list(inputs[rows])
            part.append((stage, given, paths[rows]))
            done, room = done + len(paths[rows]), room - len(paths[rows])
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part
