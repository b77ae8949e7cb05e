"""What published draft heads have in common: layers of the library, a vocabulary, and one sequence's entries."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.checkpoint.loading import some_rows
from ppd_runtime.models.native.linear import QuantisedEmbedding
from ppd_runtime.models.native.packing import rows_in_floats
from ppd_runtime.models.stage.decoder_parts import embedding_in

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, by their names in configurations."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Tensors that a head may take from its model."""


class PublishedNetwork(nn.Module):
    """A head's modules, named as its tensors, on the meta device but for the rotary table.

    Args:
        config: of its decoder layers.
        num_states: how many layers of the model it reads states after.
        draft_size: how many tokens it gives chances of.
        fields: values of `FIELDS`, and perhaps others.
    """

    LAYERS: ClassVar[str]
    """The field of a card that has the layers after which states are read."""
    FIELDS: ClassVar[Mapping[str, Any]]
    """The other fields that the network depends on, with their defaults, or the type where there is none."""
    MODEL_TYPES: ClassVar[tuple[str, ...]]
    """The library's names of the layers that it may have."""

    def __init__(self, config: PretrainedConfig, num_states: int, draft_size: int, fields: Mapping[str, Any]) -> None:
        super().__init__()
        model = skeleton_of(config, config.num_hidden_layers)
        self.layers, self.norm, self.embed_tokens = model.model.layers, model.model.norm, model.model.embed_tokens
        with torch.device("meta"):
            self.fc = nn.Linear(num_states * config.hidden_size, config.hidden_size, bias=False)
            self.lm_head: nn.Module = nn.Linear(config.hidden_size, draft_size, bias=False)
        self.rotary = type(model.model.rotary_emb)(config)
        self.kinds = list(getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.fields = fields
        self.shared: set[str] = set()
        """Which of `EMBEDDING` and `HEAD` are the model's even if the head's files have copies."""

    def take_rest(self, model: PreTrainedModel, tokens: Sequence[int], absent: set[str]) -> None:
        """Take the embedding and the head for `tokens` from a whole model where they are among `absent` tensors."""
        if EMBEDDING in absent:
            self.embed_tokens = _Rows(embedding_in(model))
        if HEAD in absent:
            whole = len(tokens) == model.config.vocab_size
            self.lm_head = model.lm_head if whole else some_rows(model.lm_head, tokens)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """`[1, tokens, hidden_size]`."""
        ids = torch.tensor([list(tokens)], device=self.fc.weight.device)
        return self.embed_tokens(ids).to(self.fc.weight.dtype)

    def log_chances(self, normed: Tensor) -> Tensor:
        """Float32 log-probabilities `[tokens, draft_size]` of normed states `[1, tokens, hidden_size]`."""
        return self.lm_head(normed)[0].float().log_softmax(-1)

    def masks(self, full: Tensor, sliding: Tensor, roots: Tensor) -> dict[str, Tensor]:
        """What layers of each kind see, from `[rows, entries]`; a sliding one's window ends at each row's root."""
        if self.window is not None:
            sliding = sliding & (torch.arange(sliding.shape[1], device=roots.device) > roots[:, None] - self.window)
        return {FULL: full[None, None], SLIDING: sliding[None, None]}


class _Rows(nn.Module):
    """Rows of a model's embedding table, without what the model multiplies them by."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self._table: Any = table

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self._table, QuantisedEmbedding):
            return rows_in_floats(self._table.weight.detach(), ids.flatten()).view(*ids.shape, -1)
        return F.embedding(ids, self._table.weight)


class PublishedDrafter:
    """Drafts for one sequence at a time; keeps the entries of its certain tokens.

    Args:
        network: with its weights.
        layers: those of the model after which it reads states.
        tokens: those that `draft` gives the chances of.
    """

    def __init__(self, network: Any, layers: Sequence[int], tokens: Sequence[int]) -> None:
        self._network, self.layers, self.tokens = network, tuple(layers), tuple(tokens)
        self._device: torch.device = network.fc.weight.device
        self.begin(0)

    def another(self) -> "PublishedDrafter":
        """A drafter with this network for another sequence at the same time."""
        other = copy.copy(self)
        other.begin(0)
        return other

    def begin(self, capacity: int) -> None:
        """Forget the last sequence. Memory for the next one is taken as it grows, whatever its `capacity`."""
        self._cache, self._certain = DynamicCache(), 0

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Take the next certain tokens, from a text's second on.

        `states` are of the token before each, `[tokens, layers, hidden_size]`.
        """
        self._drop_guesses()
        self._take(tokens, states.to(self._network.fc.weight).flatten(1)[None])

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of the token after each chain, `[chains, len(tokens)]`."""
        raise NotImplementedError

    def _take(self, tokens: Sequence[int], joined: Tensor) -> None:
        """Append entries for certain tokens; `joined` is `[1, tokens, layers * hidden_size]`."""
        raise NotImplementedError

    def _drop_guesses(self) -> None:
        if guesses := self._cache.get_seq_length() - self._certain:
            self._cache.crop(-guesses)
