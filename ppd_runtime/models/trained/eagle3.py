"""EAGLE-3: a head that goes on from the states of the model's layers after the token before, or from its own states.

The first layer reads a token's embedding beside the state of the token before. For a certain token that is what the
model's layers made of it, mixed by `fc`; for a guess it is the head's own last state.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppd_runtime.models.trained.published_network import FULL, SLIDING, Entries, PublishedNetwork

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

    def mixed(self, states: Tensor) -> Tensor:
        """What certain tokens go on from, `[1, tokens, hidden_size]`, of states `[tokens, layers, hidden_size]`."""
        joined = self.joined(states)
        if self.fields["norm_before_fc"]:
            joined = self.input_norm(joined)
        if self.fields["fc_norm"]:
            parts = joined.chunk(len(self.fc_norm), dim=-1)
            joined = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(joined)

    def forward(
        self, tokens: Sequence[int], before: Tensor, places: Tensor, masks: Mapping[str, Tensor], cache: Any
    ) -> Tensor:
        """The layers' states of tokens, whose entries go into `cache`; all are `[1, tokens, hidden_size]`.

        Args:
            tokens: their ids.
            before: states of the token before each.
            places: positions, `[tokens]`.
            masks: for each kind of layer, which entries each sees, `[tokens, entries]`.
            cache: the library's.
        """
        shared = {"past_key_values": cache, "position_embeddings": self.rotary(before, places[None])}
        hidden = self._first(self.embedded(tokens), before, attention_mask=masks[self.kinds[0]][None, None], **shared)
        for layer, kind in zip(self.layers[1:], self.kinds[1:], strict=True):
            hidden = layer(hidden, attention_mask=masks[kind][None, None], **shared)
        return hidden

    def _first(self, embedded: Tensor, before: Tensor, **attention: Any) -> Tensor:
        layer, normed = self.layers[0], self.layers[0].hidden_norm(before)
        beside = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        hidden = layer.self_attn(hidden_states=beside, **attention)[0]
        hidden = hidden + (normed if self.fields["norm_before_residual"] else before)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def passed_on(self, hidden: Tensor) -> Tensor:
        """The state that a guess goes on from."""
        return self.norm(hidden) if self.fields["norm_output"] else hidden

    def chances(self, passed_on: Tensor) -> Tensor:
        """`log_chances` of states that `passed_on` gave."""
        return self.log_chances(passed_on if self.fields["norm_output"] else self.norm(passed_on))


class _Node(NamedTuple):
    """A guess, or the newest certain token."""

    state: Tensor
    """That a guess behind it goes on from, `[1, 1, hidden_size]`."""
    entries: tuple[int, ...]
    """Places in the cache of the guesses up to it."""


class Eagle3Drafter:
    """Drafts for one sequence at a time; keeps the entries of its certain tokens.

    Args:
        network: with its weights.
        layers: those of the model after which it reads states.
        tokens: those that `draft` gives the chances of.
    """

    def __init__(self, network: Eagle3Network, layers: Sequence[int], tokens: Sequence[int]) -> None:
        self._network, self.layers, self.tokens = network, tuple(layers), tuple(tokens)
        self._device = network.fc.weight.device
        self.begin(0)

    def begin(self, capacity: int) -> None:
        """Forget the last sequence. Memory for the next one is taken as it grows, whatever its `capacity`."""
        self._entries = Entries()
        self._nodes: dict[tuple[int, ...], _Node] = {}

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Take the next certain tokens, from a text's second on.

        `states` are of the token before each, `[tokens, layers, hidden_size]`.
        """
        entries, before = self._entries, self._network.mixed(states)
        entries.keep_certain()
        for start in range(0, len(tokens), _AT_ONCE):
            piece = slice(start, start + _AT_ONCE)
            rows = entries.certain + torch.arange(len(tokens[piece]), device=self._device)
            sees = torch.arange(entries.certain + len(rows), device=self._device) <= rows[:, None]
            hidden = self._run(tokens[piece], before[:, piece], rows, rows, sees)
            entries.certain = entries.length
        self._nodes = {(): _Node(hidden[:, -1:], ())}

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities of the token after each chain, `[chains, len(tokens)]`.

        A chain's tokens follow the newest certain token one after the other; an empty one ends with that. Guesses of
        the same depth run together, and those that ran since the last `follow` do not run again.
        """
        wanted = [tuple(chain) for chain in chains]
        for depth in range(1, 1 + max(map(len, wanted))):
            parts = dict.fromkeys(chain[:depth] for chain in wanted if len(chain) >= depth)
            if new := [part for part in parts if part not in self._nodes]:
                self._guess(new)
        return self._network.chances(torch.cat([self._nodes[chain].state for chain in wanted], dim=1))

    def _guess(self, chains: Sequence[tuple[int, ...]]) -> None:
        """Run the last tokens of chains of one length, whose other tokens have run."""
        entries, parents = self._entries, [self._nodes[chain[:-1]] for chain in chains]
        seen = [(*parent.entries, entries.length + row) for row, parent in enumerate(parents)]
        sees = torch.zeros(len(chains), entries.length + len(chains), dtype=torch.bool, device=self._device)
        sees[:, : entries.certain] = True
        for row, places in enumerate(seen):
            sees[row, list(places)] = True
        roots = torch.full((len(chains),), entries.certain - 1, device=self._device)
        before = torch.cat([parent.state for parent in parents], dim=1)
        hidden = self._run([chain[-1] for chain in chains], before, roots + len(chains[0]), roots, sees)
        for row, chain in enumerate(chains):
            self._nodes[chain] = _Node(hidden[:, row : row + 1], seen[row])

    def _run(self, tokens: Sequence[int], before: Tensor, places: Tensor, roots: Tensor, sees: Tensor) -> Tensor:
        """The states that guesses behind these tokens go on from."""
        masks = {FULL: sees, SLIDING: self._network.in_window(sees, roots)}
        hidden = self._network(tokens, before, 1 + places, masks, self._entries.cache)
        self._entries.length += len(tokens)
        return self._network.passed_on(hidden)
