"""EAGLE-3: a head that goes on from the states of the model's layers after the token before, or from its own states.

The first layer reads a token's embedding beside the state of the token before. For a certain token that is what the
model's layers made of it, mixed by `fc`; for a guess it is the head's own last state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT
from ppd_runtime.models.trained.published_network import PublishedDrafter, PublishedNetwork

_AT_ONCE = 512  # certain tokens in a pass: masks grow by their number


class Eagle3Network(PublishedNetwork):
    """EAGLE-3's modules; see `PublishedNetwork`."""

    LAYERS: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    FIELDS: ClassVar[Mapping[str, Any]] = {
        "norm_before_residual": False,  # the first layer adds to normed states
        "norm_before_fc": False,  # a norm over all layers' states together
        "fc_norm": False,  # a norm over each layer's states
        "norm_output": False,  # guesses go on from normed states
    }
    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("llama", "qwen3")

    def __init__(self, config: PretrainedConfig, num_states: int, draft_size: int, fields: Mapping[str, Any]) -> None:
        super().__init__(config, num_states, draft_size, fields)
        size, first = config.hidden_size, self.layers[0]
        make, eps = type(self.norm), config.rms_norm_eps
        with torch.device("meta"):
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(first.self_attn, name)
                setattr(first.self_attn, name, nn.Linear(2 * size, plain.out_features, plain.bias is not None))
            first.hidden_norm = make(size, eps=eps)
            if fields["norm_before_fc"]:
                self.input_norm = make(num_states * size, eps=eps)
            if fields["fc_norm"]:
                self.fc_norm = nn.ModuleList(make(size, eps=eps) for _ in range(num_states))

    def mixed(self, joined: Tensor) -> Tensor:
        """What certain tokens go on from, `[1, tokens, hidden_size]`, of `[1, tokens, layers * hidden_size]`."""
        if self.fields["norm_before_fc"]:
            joined = self.input_norm(joined)
        if self.fields["fc_norm"]:
            parts = joined.chunk(len(self.fc_norm), dim=-1)
            joined = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(joined)

    def forward(
        self, tokens: Sequence[int], before: Tensor, places: Tensor, masks: Mapping[str, Tensor], cache: Any
    ) -> Tensor:
        """The states that guesses behind `tokens` go on from, `[1, tokens, hidden_size]`; `cache` gets their entries.

        `before` are the states that they go on from themselves; positions are `[tokens]`.
        """
        told = {CACHE_ARGUMENT: cache, "position_embeddings": self.rotary(before, places[None])}
        layer, normed = self.layers[0], self.layers[0].hidden_norm(before)
        beside = torch.cat([layer.input_layernorm(self.embedded(tokens)), normed], dim=-1)
        hidden = layer.self_attn(hidden_states=beside, attention_mask=masks[self.kinds[0]], **told)[0]
        hidden = hidden + (normed if self.fields["norm_before_residual"] else before)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        for layer, kind in zip(self.layers[1:], self.kinds[1:], strict=True):
            hidden = layer(hidden, attention_mask=masks[kind], **told)
        return self.norm(hidden) if self.fields["norm_output"] else hidden

    def chances(self, states: Tensor) -> Tensor:
        """`log_chances` of states that `forward` gave."""
        return self.log_chances(states if self.fields["norm_output"] else self.norm(states))


class Eagle3Drafter(PublishedDrafter):
    """EAGLE-3's; see `PublishedDrafter`."""

    def begin(self, capacity: int) -> None:
        """See `PublishedDrafter.begin`."""
        super().begin(capacity)
        self._ran: dict[tuple[int, ...], tuple[Tensor, list[int]]] = {}
        """By chains: the state that a guess behind one goes on from, and the places of its guesses' entries."""

    def _take(self, tokens: Sequence[int], joined: Tensor) -> None:
        before = self._network.mixed(joined)
        for start in range(0, len(tokens), _AT_ONCE):
            piece = slice(start, start + _AT_ONCE)
            rows = self._certain + torch.arange(len(tokens[piece]), device=self._device)
            self._certain += len(rows)
            sees = torch.arange(self._certain, device=self._device) <= rows[:, None]
            states = self._run(tokens[piece], before[:, piece], rows, rows, sees)
        self._ran = {(): (states[:, -1:], [])}

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of the token after each chain, `[chains, len(tokens)]`.

        A chain's tokens follow the newest certain token one after the other; an empty one ends with that. Guesses of
        the same depth run together, and those that ran since the last `follow` do not run again.
        """
        wanted = [tuple(chain) for chain in chains]
        for depth in range(1, 1 + max(map(len, wanted))):
            parts = dict.fromkeys(chain[:depth] for chain in wanted if len(chain) >= depth)
            if new := [part for part in parts if part not in self._ran]:
                self._guess(new)
        return self._network.chances(torch.cat([self._ran[chain][0] for chain in wanted], dim=1))

    def _guess(self, chains: Sequence[tuple[int, ...]]) -> None:
        """Run the last tokens of chains of one length, whose other tokens have run."""
        held, parents = self._cache.get_seq_length(), [self._ran[chain[:-1]] for chain in chains]
        guesses = [[*entries, held + row] for row, (_, entries) in enumerate(parents)]
        sees = torch.zeros(len(chains), held + len(chains), dtype=torch.bool, device=self._device)
        sees[:, : self._certain] = True
        for row, entries in enumerate(guesses):
            sees[row, entries] = True
        roots = torch.full((len(chains),), self._certain - 1, device=self._device)
        before = torch.cat([state for state, _ in parents], dim=1)
        states = self._run([chain[-1] for chain in chains], before, roots + len(chains[0]), roots, sees)
        for row, chain in enumerate(chains):
            self._ran[chain] = states[:, row : row + 1], guesses[row]

    def _run(self, tokens: Sequence[int], before: Tensor, places: Tensor, roots: Tensor, sees: Tensor) -> Tensor:
        return self._network(tokens, before, 1 + places, self._network.masks(sees, sees, roots), self._cache)
