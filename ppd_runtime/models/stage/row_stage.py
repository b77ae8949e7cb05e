"""A stage of several in a row: its layers over the rows of a pass, each row a token in flight behind its own text."""

from collections.abc import Sequence

from torch import Tensor

from ppd_runtime.models.stage.slots import NodeSlots
from ppd_runtime.models.stage.stage import Stage


class RowStage:
    """Layers `first` to the stage's last, for one request after the other; nodes are known by numbers.

    Each row runs as a pass of one token, over the entries of its text in their places: its bits are ordinary
    decoding's, in every dtype and with every kernel.

    Args:
        stage: it has these layers.
        most_nodes: nodes that have entries at any time, but the certain ones.
    """

    def __init__(self, stage: Stage, most_nodes: int) -> None:
        self._stage, self._most_nodes = stage, most_nodes
        self.num_layers = stage.num_layers - stage.first_layer
        self.begin(0)

    @property
    def layer_passes(self) -> int:
        """One-token layer passes so far, a prompt's as one token's."""
        return self._stage.layer_passes

    def begin(self, capacity: int) -> None:
        """Forget the last sequence and make room for one of at most `capacity` tokens."""
        self._stage.begin(capacity + self._most_nodes)
        self._slots = NodeSlots(self._stage.cache, capacity, self._most_nodes)

    def run_prompt(self, inputs: list[int] | Tensor) -> Tensor:
        """Run a prompt, its tokens or its hidden states `[1, tokens, hidden_size]`; the states behind the layers."""
        first, last = self._stage.first_layer, self._stage.num_layers
        hidden = self._stage.run(first, last, inputs, 0)
        self._slots.kept = hidden.shape[1]
        return hidden

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Run nodes as one pass: each path ends with one of them, before which stand those that are not kept.

        `inputs` are their token ids, or their hidden states `[1, nodes, hidden_size]`; so are the states behind the
        layers.
        """
        rows = [inputs[:, i : i + 1] if isinstance(inputs, Tensor) else [inputs[i]] for i in range(len(paths))]
        return self._stage.run_rows(rows, lambda row: self._slots.place(paths[row]))

    def keep(self, node: int) -> None:
        """A node that has run is the next of the certain tokens."""
        self._slots.keep(node)

    def drop(self, node: int) -> None:
        """A node is of no use any more."""
        self._slots.drop(node)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[vocab_size]` float32 logits behind the newest of the hidden states: final norm and head."""
        return self._stage.logits(hidden)
