"""DFlash: a head that fills a block of masked places behind the newest certain token in one pass.

Its layers attend to what the model's layers made of earlier tokens, mixed by `fc`, and both ways within the block. What
it says of a place does not depend on the guesses before it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from ppd_runtime.models.trained.published_network import (
    EMBEDDING,
    FULL,
    HEAD,
    SLIDING,
    Entries,
    PublishedNetwork,
)


class DFlashNetwork(PublishedNetwork):
    """DFlash's modules; see `PublishedNetwork`."""

    LAYERS: ClassVar[str] = "aux_hidden_state_layer_ids"
    FIELDS: ClassVar[Mapping[str, Any]] = {
        "block_size": 8,  # places in a pass, the newest certain token's among them
        "mask_token_id": int,  # stands in the others
        "sample_from_anchor": False,  # the newest certain token's place speaks of the next token, not of itself
        "sliding_window_non_causal": False,  # sliding layers look both ways too
    }
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3",)

    def __init__(self, config: PretrainedConfig, num_states: int, draft_size: int, fields: Mapping[str, Any]) -> None:
        super().__init__(config, num_states, draft_size, fields)
        with torch.device("meta"):
            self.hidden_norm = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)

    @classmethod
    def taken_from_model(cls, fields: Mapping[str, Any], vocab_size: int) -> set[str]:
        """Tensors that are the model's even if a file has them."""
        return {EMBEDDING, HEAD} if fields["draft_vocab_size"] == vocab_size else {EMBEDDING}

    def remember(self, states: Tensor, places: Tensor, cache: Any) -> None:
        """Append the entries of tokens with states `[tokens, layers, hidden_size]` at positions `[tokens]`."""
        mixed = self.hidden_norm(self.fc(self.joined(states)))
        turn = self.rotary(mixed, places[None])
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            shape = (1, len(states), -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(mixed).view(shape)).transpose(1, 2)
            values = attention.v_proj(mixed).view(shape).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, *turn)[0], values, number)

    def forward(self, newest: int, certain: int, cache: Any) -> Tensor:
        """Float32 log-probabilities `[places, draft_size]` of the tokens behind the newest certain one.

        `certain` entries are in `cache`, which gets the block's behind them.
        """
        size, device = self.fields["block_size"], self.fc.weight.device
        hidden = self.embedded([newest, *[self.fields["mask_token_id"]] * (size - 1)])
        entries, rows = torch.arange(certain + size, device=device), certain + torch.arange(size, device=device)
        both_ways = torch.ones(size, certain + size, dtype=torch.bool, device=device)
        sees = both_ways if self.fields["sliding_window_non_causal"] else entries <= rows[:, None]
        masks = {FULL: both_ways, SLIDING: self.in_window(sees, torch.full_like(rows, certain - 1))}
        turn = self.rotary(hidden, rows[None])
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            mask = masks[kind][None, None]
            hidden = layer(hidden, attention_mask=mask, past_key_values=cache, position_embeddings=turn)
        return self.log_chances(self.norm(hidden if self.fields["sample_from_anchor"] else hidden[:, 1:]))


class DFlashDrafter:
    """Drafts for one sequence at a time; keeps the entries of its certain tokens.

    Args:
        network: with its weights.
        layers: those of the model after which it reads states.
        tokens: those that `draft` gives the chances of.
    """

    def __init__(self, network: DFlashNetwork, layers: Sequence[int], tokens: Sequence[int]) -> None:
        self._network, self.layers, self.tokens = network, tuple(layers), tuple(tokens)
        self.begin(0)

    def begin(self, capacity: int) -> None:
        """Forget the last sequence. Memory for the next one is taken as it grows, whatever its `capacity`."""
        self._entries, self._newest = Entries(), -1
        self._block: Tensor | None = None

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Take the next certain tokens, from a text's second on.

        `states` are of the token before each, `[tokens, layers, hidden_size]`.
        """
        entries = self._entries
        places = entries.certain + torch.arange(len(tokens), device=states.device)
        self._network.remember(states, places.to(self._network.fc.weight.device), entries.cache)
        entries.certain = entries.length = entries.certain + len(tokens)
        self._newest, self._block = tokens[-1], None

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of the token after each chain, `[chains, len(tokens)]`.

        A chain's tokens follow the newest certain token one after the other; an empty one ends with that. Only a
        chain's length counts. Behind the block all tokens are equally likely.
        """
        if self._block is None:
            self._block = self._network(self._newest, self._entries.certain, self._entries.cache)
            self._entries.length += self._network.fields["block_size"]
            self._entries.keep_certain()
        unknown = self._block.new_full((len(self.tokens),), -math.log(len(self.tokens)))
        lengths = map(len, chains)
        return torch.stack([self._block[length] if length < len(self._block) else unknown for length in lengths])
