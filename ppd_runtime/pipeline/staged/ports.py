"""The computations of the staged machines, which may be batched over several requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import BoundaryHead
from ppd_runtime.pipeline.ports import Computation
from ppd_runtime.pipeline.staged.chances import Guess
from ppd_runtime.sampling.gpu_choice import UnreadLogits


@dataclass(slots=True)
class RowsPass(Computation):
    """A pass over rows through some or all layers; see `TreeRange.run_rows`."""

    stage: TreeRange
    inputs: Sequence[int] | Tensor
    paths: Sequence[Sequence[int]]
    layers: range

    def alone(self) -> Tensor:
        """The states after these layers, `[1, nodes, hidden_size]`."""
        return self.stage.run_rows(self.inputs, self.paths, self.layers)


@dataclass(slots=True)
class Logits(Computation):
    """The final norm and head for a token's state."""

    stage: TreeRange
    hidden: Tensor

    def alone(self) -> Tensor | UnreadLogits:
        """The logits, `[vocab_size]`, perhaps unread."""
        return self.stage.unread_logits(self.hidden)


@dataclass(slots=True)
class Naming(Computation):
    """An exit head's guesses after several nodes; see `BoundaryHead.guesses`."""

    head: BoundaryHead
    hidden: Tensor
    texts: Sequence[Sequence[int]]
    k: int

    def alone(self) -> Sequence[Sequence[Guess]]:
        """The guesses for each node."""
        return self.head.guesses(self.hidden, self.texts, self.k)
