"""What the staged machines need of a stage, and what they ask to be computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ppd_runtime.models.trained.exit_heads import BoundaryHead
from ppd_runtime.pipeline.ports import Computation
from ppd_runtime.pipeline.staged.chances import Guess


class TreeRangeLike(Protocol):
    """A stage's layers over the rows of a pass; `ppd_runtime.models.stage.tree_range.TreeRange` is the real one."""

    num_layers: int
    """The stage's layers."""

    @property
    def layers_at_once(self) -> int:
        """Layers that a pass runs without a stop."""

    @property
    def layer_passes(self) -> int:
        """One-token layer passes so far."""

    cached_tokens: int
    """Prompt tokens whose entries were kept from an earlier prompt."""

    def begin(self, capacity: int, prompt: Sequence[int] = ()) -> None:
        """Forget the last sequence and make room for `capacity` tokens, the first of which are the prompt's."""

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk of a prompt of `tokens` tokens."""

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run the tokens or hidden states of the prompt's chunk at `position`."""

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]], layers: range) -> Tensor:
        """Run nodes through some of the stage's layers, counted from its first; each node ends a path after the kept
        tokens.
        """

    def keep(self, node: int) -> None:
        """Keep a node that has run as the next certain token."""

    def drop(self, node: int) -> None:
        """Drop a node of no more use."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head over the newest hidden state."""


@dataclass(slots=True)
class RowsPass(Computation):
    """The states after a pass, or a part of its layers; see `TreeRangeLike.run_rows`."""

    stage: TreeRangeLike
    inputs: Sequence[int] | Tensor
    paths: Sequence[Sequence[int]]
    layers: range

    def alone(self) -> Tensor:
        """`[1, nodes, hidden_size]`."""
        return self.stage.run_rows(self.inputs, self.paths, self.layers)


@dataclass(slots=True)
class Logits(Computation):
    """The final norm and head over a token's state."""

    stage: TreeRangeLike
    hidden: Tensor

    def alone(self) -> Tensor:
        """`[vocab_size]`."""
        return self.stage.logits(self.hidden)


@dataclass(slots=True)
class Naming(Computation):
    """What may follow several nodes; see `BoundaryHead.guesses`."""

    head: BoundaryHead
    hidden: Tensor
    texts: Sequence[Sequence[int]]
    k: int

    def alone(self) -> Sequence[Sequence[Guess]]:
        """Guesses after each node."""
        return self.head.guesses(self.hidden, self.texts, self.k)
