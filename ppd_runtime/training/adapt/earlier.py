"""Parts that are there before an adaptation: each stays where the new one foresees no more held-out tokens."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.trained.drafter import DrafterInfo, DrafterNetwork
from ppd_runtime.models.trained.heads import HeadInfo, HeadNetwork, load_head
from ppd_runtime.models.trained.kept_heads import COUNTS, DRAFTER, head_name, kept_drafter, kept_heads
from ppd_runtime.training.adapt.drafting import KeptDrafts
from ppd_runtime.training.adapt.head_choice import CHOSEN_BY_K, EARLIER, HeadChoice
from ppd_runtime.training.adapt.report import ALL, Shares
from ppd_runtime.training.adapt.states import KeptStates


@dataclass(frozen=True)
class EarlierParts:
    """Heads and a drafter that stages use already: kept ones, else those that ship."""

    heads: dict[int, HeadInfo] = field(default_factory=dict)
    """By their layers."""
    drafter: DrafterInfo | None = None

    @staticmethod
    def of(info: ModelInfo) -> "EarlierParts":
        """A model's; damaged ones are left aside, with a warning."""
        return EarlierParts(kept_heads(info).heads, kept_drafter(info))

    def networks(self, layers: Sequence[int], end: PreTrainedModel, tokens: Sequence[int]) -> dict[int, HeadNetwork]:
        """The heads after these layers, as far as there are any, behind a model's end for these tokens."""
        return {layer: load_head(self.heads[layer], end, tokens) for layer in layers if layer in self.heads}

    def drafts(self, model: PreTrainedModel, kept: KeptStates) -> KeptDrafts:
        """What the drafter, which there has to be, names behind kept texts."""
        assert self.drafter is not None
        network = DrafterNetwork(self.drafter.hidden_size)
        network.load_state_dict(self.drafter.tensors())
        return KeptDrafts(network.to(model.device).requires_grad_(False), model, self.drafter.tokens, kept)

    def copy_heads(self, folder: Path, choices: dict[int, HeadChoice]) -> None:
        """Copy those heads that were chosen, or for whose layers none was trained, beside the new ones."""
        for layer, head in self.heads.items():
            if layer not in choices or choices[layer].kind == EARLIER:
                shutil.copytree(head.folder, folder / head_name(layer))

    def copy_drafter(self, folder: Path) -> None:
        """Copy the drafter, if there is one, with the counts by which its tokens were chosen."""
        if self.drafter is not None:
            shutil.copytree(self.drafter.folder, folder / DRAFTER)
            if (counts := self.drafter.folder.parent / COUNTS).is_file():
                shutil.copy(counts, folder / COUNTS)

    def lines(self, choices: dict[int, HeadChoice]) -> list[str]:
        """What is told of the heads that stay."""
        told = list[str]()
        for layer in sorted(self.heads):
            if layer not in choices:
                told.append(f"layer {layer}, which got no new head")
            elif choices[layer].kind == EARLIER:
                tried = choices[layer].tried
                best = max(head.right for kind, head in tried.items() if kind != EARLIER)
                told.append(f"layer {layer}, right in {tried[EARLIER].right:.3f}, the best new head in {best:.3f}")
        return told


def foreseen(steps: Sequence[Shares]) -> float:
    """Tokens that a drafter names in a row, on average, by the shares of its steps' `CHOSEN_BY_K` best."""
    shares = [step[ALL][CHOSEN_BY_K] for step in steps]
    return sum(prod(shares[: number + 1]) for number in range(len(shares)))
