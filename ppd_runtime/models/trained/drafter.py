"""A drafter: one layer that foresees tokens before any layer of the model has run for them.

For a certain token it reads the token's embedding and what the model's layers made of the token before. For guesses
behind it, for which no layer has run, it reads its own state of the token before in their place. The model's own norm
and head, over a shortlist, turn its states into chances.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.native.linear import with_floats
from ppd_runtime.models.stage.embedding import Embedding
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.library_probe import shallow_copy
from ppd_runtime.models.stage.slicing import layer_range
from ppd_runtime.models.trained.adapter import number_layer
from ppd_runtime.models.trained.heads import model_end
from ppd_runtime.models.trained.parts import PartInfo, describe_part, save_part


@dataclass(frozen=True)
class DrafterInfo(PartInfo):
    """What a drafter was trained for; `describe_drafter` reads it from the drafter's folder. Its `exit_layer` is 0."""

    NAME: ClassVar[str] = "drafter"
    NOUN: ClassVar[str] = "drafter"
    COMMAND: ClassVar[str] = "ppd adapt"

    layers: tuple[int, ...]
    """Layers after which it reads states, besides the last one, in rising order."""
    tokens: tuple[int, ...]
    """The shortlist, in rising order."""

    def __post_init__(self) -> None:
        for name in ("layers", "tokens"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def check_card(self) -> None:
        """Raise ValueError for layers or tokens that no model has."""
        for name, least in (("layers", 1), ("tokens", 0)):
            numbers = getattr(self, name)
            whole = all(type(number) is int and number >= least for number in numbers)
            if not whole or list(numbers) != sorted({*numbers}):
                raise ValueError(f"{name} are no numbers in rising order")
        if not self.tokens or self.tokens[-1] >= self.vocab_size:
            raise ValueError(f"tokens are none of the {self.vocab_size} of the vocabulary")


class DrafterNetwork(nn.Module):
    """What is learned of a drafter, in float32, around the model's embedding, norm and head, which are not.

    Args:
        model: whole. Its last layer is the first value of the drafter's.
        layers: those after which states are read, besides the last one.
        tokens: the shortlist.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], tokens: Sequence[int]) -> None:
        super().__init__()
        size, last = model.config.hidden_size, model.config.num_hidden_layers - 1
        self.mix = nn.Linear((len(layers) + 2) * size, size, device=model.device)
        """From a certain token's embedding and the states of the token before."""
        self.again = nn.Linear(2 * size, size, device=model.device)
        """From a guess's embedding and the drafter's state of the token before."""
        self.layer = with_floats(copy.deepcopy(model.model.layers[last])).float().requires_grad_(True)
        number_layer(self.layer, 0)
        decoder, end = layer_range(model, last, last + 1), model_end(model, tokens)
        decoder.layers, decoder.embed_tokens = nn.ModuleList([self.layer]), nn.Identity()
        decoder.norm = end.model.norm
        behind = shallow_copy(end)
        behind.model, behind.config = decoder, decoder.config
        self._frozen = behind, Embedding(model)  # in a tuple, so that they are no submodules

    @property
    def behind(self) -> PreTrainedModel:
        """Its layer, norm and head as a model of one layer, which takes what `certain` and `guessed` give."""
        return self._frozen[0]

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """The model's embeddings of tokens, `[tokens, hidden_size]`."""
        return self._frozen[1](list(tokens))[0].float().clone()

    def certain(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Inputs `[..., hidden_size]` for certain tokens.

        `states` are of the token before each, `[..., layers + 1, hidden_size]`, the last layer's at the end.
        """
        return self.mix(torch.cat([_normed(embedded), _normed(states.to(embedded.dtype)).flatten(-2)], dim=-1))

    def guessed(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Inputs `[..., hidden_size]` for guesses; `before` are the drafter's own states of the token before each."""
        return self.again(torch.cat([_normed(embedded), _normed(before)], dim=-1))


def _normed(states: Tensor) -> Tensor:
    """States of unit size: those of a model's layers differ by orders of magnitude."""
    return F.rms_norm(states, states.shape[-1:])


class Drafter:
    """Drafts for one sequence at a time; keeps the entries of its certain tokens.

    Args:
        network: what it has learned.
        tokens: the shortlist, of which `draft` gives the chances.
    """

    def __init__(self, network: DrafterNetwork, tokens: Sequence[int]) -> None:
        self._network, self.tokens = network, tuple(tokens)
        self._stage = LayerRange(network.behind)
        self.begin(0)

    def begin(self, capacity: int) -> None:
        """Forget the last sequence; make room for one of at most `capacity` tokens, guesses among them."""
        self._stage.begin(capacity)
        self._certain, self._state = 0, Tensor()
        self._chain: list[int] = []
        self._states: list[Tensor] = []

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Take the next certain tokens, one or several.

        `states` are of the token before each, `[tokens, layers + 1, hidden_size]`, the last layer's at the end.
        """
        self._stage.truncate(self._certain)
        self._chain, self._states = [], []
        inputs = self._network.certain(self._network.embedded(tokens), states)
        hidden = self._stage.run(0, 1, inputs[None], self._certain)
        self._certain, self._state = self._certain + len(tokens), hidden[:, -1:]

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of the token after each chain, `[chains, len(tokens)]`, over the shortlist.

        A chain's tokens follow the newest certain token one after the other; an empty one ends with that. What a chain
        begins with as the one before it did is not computed again.
        """
        found = [self._stage.logits(self._after(chain)) for chain in chains]
        return torch.stack(found).log_softmax(-1)

    def _after(self, chain: Sequence[int]) -> Tensor:
        """The state of a chain's last token, `[1, 1, hidden_size]`."""
        alike = 0
        while alike < min(len(chain), len(self._chain)) and chain[alike] == self._chain[alike]:
            alike += 1
        del self._chain[alike:], self._states[alike:]
        self._stage.truncate(self._certain + alike)
        for token in chain[alike:]:
            before = self._states[-1] if self._states else self._state
            inputs = self._network.guessed(self._network.embedded([token])[None], before)
            self._states.append(self._stage.run(0, 1, inputs, self._certain + len(self._chain)))
            self._chain.append(token)
        return self._states[-1] if self._states else self._state


def save_drafter(folder: Path, network: DrafterNetwork, known: DrafterInfo, training: Mapping[str, Any]) -> DrafterInfo:
    """Write a drafter's folder; see `save_part`."""
    return save_part(folder, network.state_dict(), known, training)


def describe_drafter(folder: str | Path, info: ModelInfo) -> DrafterInfo:
    """Read what a folder's drafter was trained for and check that it was this model; see `describe_part`."""
    return describe_part(DrafterInfo, folder, info)


def load_drafter(drafter: DrafterInfo, model: PreTrainedModel) -> Drafter:
    """The drafter beside `model`, which is whole, on its device."""
    network = DrafterNetwork(model, drafter.layers, drafter.tokens)
    network.load_state_dict(drafter.tensors())
    return Drafter(network.requires_grad_(False).eval(), drafter.tokens)
