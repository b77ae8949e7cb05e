"""What the staged machines need of a stage."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class RowStageLike(Protocol):
    """A stage's layers over the rows of a pass; `ppd_runtime.models.stage.row_stage.RowStage` is the real one."""

    num_layers: int
    """Of the stage alone."""

    @property
    def layer_passes(self) -> int:
        """One-token layer passes so far."""

    def begin(self, capacity: int) -> None:
        """Forget the last sequence and make room for `capacity` tokens."""

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk in which a prompt of so many tokens runs."""

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run the tokens or hidden states of the prompt's chunk at `position`."""

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Run nodes as one pass, each the last of a path behind the kept tokens."""

    def keep(self, node: int) -> None:
        """A node that has run is the next of the certain tokens."""

    def drop(self, node: int) -> None:
        """A node is of no use any more."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head over the newest hidden state."""
