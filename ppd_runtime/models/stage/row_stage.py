"""A stage of several in a row: its layers over the rows of a pass, each row a token in flight behind its own text."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ppd_runtime.models.stage.slots import NodeSlots
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.models.stage.trees import Part, tree_of

_TRIED: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 2), (0, 2, 3), (1, 4), (0, 5), (0, 2, 3, 6), (1, 4, 7))
"""The paths of the rows that a stage tries at its start: siblings, and what stands behind them."""
_TRIED_TEXT, _LONGEST_TRIED_WINDOW = 61, 1024  # tokens before them: so their rows go past a step of the attended ones
_PROMPT = 3  # tokens of that text that are run


class RowStage:
    """A stage's layers for one request after the other; nodes are known by numbers. Others have `another` each.

    Rows run together where the stage has found at its start that this leaves their bits alone. Elsewhere each row runs
    as a pass of one token, over the entries of its text in the rows of their positions: its bits are ordinary
    decoding's, in every dtype and with every kernel.

    Args:
        stage: it has these layers.
        most_nodes: nodes that have entries at any time, but the certain ones.
    """

    def __init__(self, stage: Stage, most_nodes: int) -> None:
        self._stage, self._most_nodes = stage, most_nodes
        self.num_layers = stage.num_layers - stage.first_layer
        self.layer_passes = 0
        """One-token layer passes so far, a prompt's as one token's: the stage's when it was made, and its own."""
        self.most_together = 1
        """Rows that run together, at the most."""
        if stage.compiles_chains(len(_TRIED)) and stage.most_together(_PROMPT) is None:
            self.most_together = self._found_most_together()
        self.begin(0)

    def another(self) -> "RowStage":
        """The same layers over a cache of its own, for another request at the same time."""
        other = copy.copy(self)
        other.layer_passes = self._stage.layer_passes
        other.begin(0)
        return other

    def begin(self, capacity: int) -> None:
        """Forget the last sequence and make room for one of at most `capacity` tokens."""
        self._stage.begin(capacity + self._most_nodes)
        self._cache = self._stage.cache
        self._slots = NodeSlots(self._cache, self._most_nodes)

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk in which a prompt of so many tokens runs."""
        return self._stage.prompt_chunks(tokens)

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run a prompt's next chunk, its tokens or its hidden states `[1, tokens, hidden_size]`; the states behind the
        layers.
        """
        first, last, before = self._stage.first_layer, self._stage.num_layers, self._stage.layer_passes
        self._stage.turn_to(self._cache)
        hidden = self._stage.run_pass(first, last, inputs, position, in_prompt=True)
        self.layer_passes += self._stage.layer_passes - before
        self._slots.kept = position + hidden.shape[1]
        return hidden

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Run nodes as one pass: each path ends with one of them, before which stand those that are not kept.

        Each comes after those that it stands behind. `inputs` are their token ids, or their hidden states
        `[1, nodes, hidden_size]`; so are the states behind the layers.
        """
        before = self._stage.layer_passes
        self._stage.turn_to(self._cache)
        hidden = self._stage.run_rows(self._parts(inputs, paths), self._slots.kept + len(paths[-1]) - 1)
        self.layer_passes += self._stage.layer_passes - before
        return hidden

    def keep(self, node: int) -> None:
        """A node that has run is the next of the certain tokens."""
        self._slots.keep(node)

    def drop(self, node: int) -> None:
        """A node is of no use any more."""
        self._slots.drop(node)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[vocab_size]` float32 logits behind the newest of the hidden states: final norm and head."""
        return self._stage.logits(hidden)

    def _parts(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]]) -> Iterator[Part]:
        """What runs together; each part's slots are ready until the next is asked for."""
        slots = self._slots
        for start in range(0, len(paths), self.most_together):
            rows = slice(start, start + self.most_together)
            given = inputs[:, rows] if isinstance(inputs, Tensor) else list(inputs[rows])
            if len(paths[rows]) == 1:
                yield given, slots.place(paths[start]), None
            else:
                yield given, slots.kept, tree_of(slots.rows(paths[rows]), self._stage.device)

    def _found_most_together(self) -> int:
        """How many rows a pass may have for each to keep the bits of a pass of its own.

        That is found out by comparing: products and attention may depend on what is beside a row, or not.
        """
        most = len(_TRIED)
        alone = self._try([1] * most)
        self.most_together = most
        same = all(self._try([size, most - size]).equal(alone) for size in range(2, most + 1))
        return most if same else 1

    def _try(self, sizes: Sequence[int]) -> Tensor:
        """The states of the tried rows, run so many at a time, behind a text that is longer than short windows are."""
        generator = torch.Generator().manual_seed(0)
        config, first = self._stage.model.config, self._stage.first_layer
        states = torch.randn(1, _PROMPT + len(_TRIED), config.hidden_size, generator=generator, dtype=torch.float32)
        states = states.to(self._stage.device, self._stage.model.dtype)
        windows = [layer.sliding_window or 0 for layer in self._stage.cache.layers]
        text = max(_TRIED_TEXT, *(window + 1 for window in windows if window <= _LONGEST_TRIED_WINDOW))
        self.begin(text + len(_TRIED))
        self.run_prompt(states[:, :_PROMPT] if first else list(range(_PROMPT)), 0)
        self._stage.cache.fill(generator)
        self._slots.kept = text
        found, start = [], 0
        for size in filter(None, sizes):
            rows = slice(start, start + size)
            given = states[:, _PROMPT:][:, rows] if first else list(range(start, start + size))
            found.append(self.run_rows(given, _TRIED[rows]))
            start += size
        return torch.cat(found, dim=1)
