"""A stage of several in a row: its layers over the rows of a pass, each row a token in flight behind its own text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ppd_runtime.models.stage.slots import NodeSlots
from ppd_runtime.models.stage.stage import Stage

_MOST_JOINED = 8  # rows of one pass
_PROMPT = 3  # tokens, to find out with


class RowStage:
    """Layers `first` to the stage's last, for one request after the other; nodes are known by numbers.

    Each row runs as a pass of one token, over the entries of its text in their places: its bits are ordinary
    decoding's, in every dtype and with every kernel. Rows that stand one behind the other run together where the stage
    has found at its start that this leaves their bits alone.

    Args:
        stage: it has these layers.
        most_nodes: nodes that have entries at any time, but the certain ones.
    """

    def __init__(self, stage: Stage, most_nodes: int) -> None:
        self._stage, self._most_nodes = stage, most_nodes
        self.num_layers = stage.num_layers - stage.first_layer
        self._most_together = _most_together(stage)
        self.begin(0)

    @property
    def layer_passes(self) -> int:
        """One-token layer passes so far, a prompt's as one token's."""
        return self._stage.layer_passes

    def begin(self, capacity: int) -> None:
        """Forget the last sequence and make room for one of at most `capacity` tokens."""
        self._stage.begin(capacity + self._most_nodes)
        self._slots = NodeSlots(self._stage.cache, capacity, self._most_nodes)

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk in which a prompt of so many tokens runs."""
        return self._stage.prompt_chunks(tokens)

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run a prompt's next chunk, its tokens or its hidden states `[1, tokens, hidden_size]`; the states behind the
        layers.
        """
        first, last = self._stage.first_layer, self._stage.num_layers
        hidden = self._stage.run_pass(first, last, inputs, position, in_prompt=True)
        self._slots.kept = position + hidden.shape[1]
        return hidden

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Run nodes as one pass: each path ends with one of them, before which stand those that are not kept.

        `inputs` are their token ids, or their hidden states `[1, nodes, hidden_size]`; so are the states behind the
        layers.
        """
        chains = _chains(paths, self._most_together)
        parts = [slice(chain.start, chain.stop) for chain in chains]
        several = [inputs[:, part] if isinstance(inputs, Tensor) else list(inputs[part]) for part in parts]
        return self._stage.run_rows(several, lambda i: self._slots.place(paths[chains[i][-1]], len(chains[i])))

    def keep(self, node: int) -> None:
        """A node that has run is the next of the certain tokens."""
        self._slots.keep(node)

    def drop(self, node: int) -> None:
        """A node is of no use any more."""
        self._slots.drop(node)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[vocab_size]` float32 logits behind the newest of the hidden states: final norm and head."""
        return self._stage.logits(hidden)


def _chains(paths: Sequence[Sequence[int]], most: int) -> list[range]:
    """The rows in their order, those together that stand one behind the other, so many at the most."""
    chains = [range(1)]
    for row in range(1, len(paths)):
        follows = list(paths[row][:-1]) == list(paths[row - 1])
        if follows and len(chains[-1]) < most:
            chains[-1] = range(chains[-1].start, row + 1)
        else:
            chains.append(range(row, row + 1))
    return chains


def _most_together(stage: Stage) -> int:
    """How many tokens, one behind the other, a pass may have for each to keep the bits of a pass of its own.

    That is found out by comparing: products and attention may depend on what is beside a row, or not.
    """
    if not stage.compiles_chains(_MOST_JOINED) or stage.most_together(_PROMPT) is not None:
        return 1
    alone = _states(stage, [1] * _MOST_JOINED)
    same = all(_states(stage, [size, _MOST_JOINED - size]).equal(alone) for size in range(2, _MOST_JOINED - 1))
    return _MOST_JOINED if same else 1


def _states(stage: Stage, sizes: Sequence[int]) -> Tensor:
    """The states of tokens behind a short prompt, run so many at a time."""
    first, last, tokens = stage.first_layer, stage.num_layers, _PROMPT + _MOST_JOINED
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, tokens, stage.model.config.hidden_size, generator=generator, dtype=torch.float32)
    inputs = states.to(stage.device, stage.model.dtype)
    stage.begin(tokens)
    run = [stage.run(first, last, inputs[:, :_PROMPT] if first else list(range(_PROMPT)), 0)]
    position = _PROMPT
    for size in sizes:
        ids = list(range(position, position + size))
        run.append(stage.run(first, last, inputs[:, position : position + size] if first else ids, position))
        position += size
    return torch.cat(run, dim=1)
