"""What a stage needs of compiled layers; see `models.compiled.passes.CompiledLayers`."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.stage.caches import PreallocatedLayer
from ppd_runtime.models.stage.slicing import FinalHead, LayerSubset
from ppd_runtime.models.stage.trees import PlacedTree, TokenTree


class Head(Protocol):
    """The final norm and the head in compiled code."""

    vocab_size: int

    def __call__(self, hidden: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Logits of `[1, tokens, hidden_size]`, in the shape `shape`."""


class CompiledPasses(Protocol):
    """Layers of a model that run passes over few tokens; each method is explained where it is implemented."""

    @property
    def head(self) -> Head | None:
        """The final norm and the head, if they are compiled."""

    def add(self, *passes: int) -> None:
        """Load code for these kinds of passes too."""

    def of_part(self, part: PreTrainedModel) -> "CompiledPasses":
        """Compiled passes of a model of one layer that runs behind another model."""

    def over(self, model: PreTrainedModel) -> "CompiledPasses":
        """The first layer's code with a model's weights."""

    def head_of(self, final: FinalHead) -> Head | None:
        """The head's code with another one's weights."""

    def forget(self) -> None:
        """Let go of the last sequence's caches."""

    def runs_tree(self, tokens: int) -> bool:
        """Whether there is code for a chain or a tree of `tokens`."""

    def runs_subset(self, subset: LayerSubset) -> bool:
        """Whether there is code for one token's pass through a piece."""

    def run(self, first: int, last: int, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """One token through layers `first` to `last`."""

    def run_subset(self, subset: LayerSubset, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """One token through the layers of a piece."""

    def run_tree(
        self, first: int, last: int, hidden: Tensor, tree: TokenTree, caches: Sequence[PreallocatedLayer]
    ) -> Tensor:
        """A tree's tokens through layers `first` to `last`."""

    @property
    def num_recorded(self) -> int:
        """Recordings made of passes so far."""

    @property
    def reads_lists(self) -> bool:
        """Whether all attention reads rows by a list, so that they may lie anywhere."""

    @property
    def joins_texts(self) -> bool:
        """Whether there is code for several texts' trees in one pass."""

    def run_trees(
        self, first: int, last: int, hidden: Tensor, trees: Sequence[PlacedTree], caches: Sequence[PreallocatedLayer]
    ) -> Tensor:
        """Several texts' trees through layers `first` to `last`, over caches that hold all these texts."""

    def chain_drafting(self, layers: int | LayerSubset, behind: Any, embedding: Tensor) -> Any:
        """Drafts greedy chains in one call; None if there is no code for it."""
