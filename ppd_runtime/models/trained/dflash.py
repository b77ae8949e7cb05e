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

from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT
from ppd_runtime.models.trained.published_network import EMBEDDING, HEAD, PublishedDrafter, PublishedNetwork


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
        self.shared = {EMBEDDING, HEAD} if draft_size == config.vocab_size else {EMBEDDING}
        with torch.device("meta"):
            self.hidden_norm = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)

    def remember(self, joined: Tensor, places: Tensor, cache: Any) -> None:
        """Append the entries of tokens with states `[1, tokens, layers * hidden_size]` at positions `[tokens]`."""
        mixed = self.hidden_norm(self.fc(joined))
        turn = self.rotary(mixed, places[None])
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            shape = (1, len(places), -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(mixed).view(shape)).transpose(1, 2)
            values = attention.v_proj(mixed).view(shape).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, *turn)[0], values, number)

    def forward(self, newest: int, certain: int, cache: Any) -> Tensor:
        """Float32 log-probabilities `[places, draft_size]` of the tokens behind the newest certain one.

        `certain` entries are in `cache`, which gets the block's behind them.
        """
        size, device = self.fields["block_size"], self.fc.weight.device
        hidden = self.embedded([newest, *[self.fields["mask_token_id"]] * (size - 1)])
        rows = certain + torch.arange(size, device=device)
        full = torch.ones(size, certain + size, dtype=torch.bool, device=device)
        sliding = full if self.fields["sliding_window_non_causal"] else full.tril(certain)
        masks = self.masks(full, sliding, torch.full_like(rows, certain - 1))
        turn = self.rotary(hidden, rows[None])
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            hidden = layer(hidden, attention_mask=masks[kind], position_embeddings=turn, **{CACHE_ARGUMENT: cache})
        return self.log_chances(self.norm(hidden if self.fields["sample_from_anchor"] else hidden[:, 1:]))


class DFlashDrafter(PublishedDrafter):
    """DFlash's; see `PublishedDrafter`."""

    def _take(self, tokens: Sequence[int], joined: Tensor) -> None:
        places = self._certain + torch.arange(len(tokens), device=self._device)
        self._network.remember(joined, places, self._cache)
        self._certain += len(tokens)
        self._newest, self._block = tokens[-1], Tensor()

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of the token after each chain, `[chains, len(tokens)]`.

        A chain's tokens follow the newest certain token one after the other; an empty one ends with that. Only a
        chain's length counts. Behind the block all tokens are equally likely.
        """
        if not len(self._block):
            self._block = self._network(self._newest, self._certain, self._cache)
            self._drop_guesses()
        unknown = self._block.new_full((len(self.tokens),), -math.log(len(self.tokens)))
        lengths = map(len, chains)
        return torch.stack([self._block[length] if length < len(self._block) else unknown for length in lengths])
