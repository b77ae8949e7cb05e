"""A contiguous layer range of a Hugging Face decoder that any process can run piece by piece.

The library's own forward pass runs each piece, over a shallow copy of the model that holds only the piece's layers:
masks, rotary tables, windows and soft caps stay the library's business.
"""

import copy
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ppd_runtime.models.kv_cache import LayerRangeCache, StageCache
from ppd_runtime.models.rotary import RotaryTable

if TYPE_CHECKING:
    from ppd_runtime.models.compiled import CompiledLayers


class Stage:
    """Layers 1 to `num_layers` of a model with its embedding and head, and the entries of one sequence.

    Hidden states are `[1, tokens, hidden_size]`; positions count from 0; layer ranges are half-open and count from 0.

    Args:
        model: its layers are the stage's.
        compiled: runs every one-token pass but the first one of a sequence; the others, prompts, are run by the
            library over the same caches.
    """

    def __init__(self, model: PreTrainedModel, compiled: "CompiledLayers | None" = None) -> None:
        self.model, self._compiled = model, compiled
        self.num_layers: int = model.config.num_hidden_layers
        self.layers_at_once = -(-self.num_layers // 3) if compiled else self.num_layers
        """Layers best run in one call: each call of the library's has a price of its own, a compiled one has none."""
        self.layer_passes = 0
        """One-sequence layer passes run so far: a pass over any number of tokens through one layer counts one."""
        self.layer_seconds = 0.0
        """Recent time of one layer for one token."""
        self._pieces: dict[tuple[int, int], nn.Module] = {}
        self._views: dict[tuple[int, int], LayerRangeCache] = {}
        rotary = getattr(model.model, "rotary_emb", None)
        self._rotary = None if rotary is None else RotaryTable(rotary)
        self._positions = torch.arange(0, device=model.device)[None]
        self.head = FinalHead(model)
        self.cache = StageCache(model.config, 0)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def begin(self, capacity: int) -> None:
        """Forget the last sequence and make room for one of at most `capacity` tokens."""
        self.cache = StageCache(self.model.config, capacity)
        self._views.clear()
        if capacity > self._positions.shape[1]:
            self._positions = torch.arange(capacity, device=self.device)[None]

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run layers `first` to `last` (half-open) and append to their caches; the hidden states behind them.

        `inputs` are token ids where `first` is 0, else hidden states; the first of them stands at `position`, which
        must be the number of entries that these layers hold. An empty range gives back its inputs.
        """
        if first == last and isinstance(inputs, Tensor):
            return inputs.to(self.device)
        began = time.perf_counter()
        hidden = self._run(first, last, inputs, position)
        if self.device.type == "cuda":  # whoever sends or judges the result waits for it anyway
            torch.cuda.synchronize(self.device)
        if hidden.shape[1] == 1 or not self.layer_seconds:
            self._note_time((time.perf_counter() - began) / (last - first))
        self.layer_passes += last - first
        return hidden

    def length(self, layer: int) -> int:
        """Tokens whose entries `layer` holds."""
        return self.cache.layers[layer].length

    def truncate(self, length: int) -> None:
        """Keep the entries of the first `length` tokens, drop the newer ones."""
        self.cache.truncate(length)

    @torch.inference_mode()
    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """A copy of the entries of tokens `first` to `end` in layers 0 to `last`: `[tokens, last, 2, heads, dim]`."""
        return self.cache.export_entries(first, end, last)

    @torch.inference_mode()
    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append consecutive tokens' entries to the first layers, each as `export_entries` gives it."""
        self.cache.import_entries([entry.to(self.device) for entry in entries])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """`[vocab_size]` float32 logits for the newest token: final norm, head and whatever the model adds to it."""
        return self.head(hidden[:, -1:])[0, -1].float()

    @torch.inference_mode()
    def _run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        length = self.cache.layers[first].length
        if length != position:
            raise RuntimeError(f"layer {first} holds {length} tokens, the pass starts at position {position}")
        if self._compiled and position and len(inputs if isinstance(inputs, list) else inputs[0]) == 1:
            hidden = inputs.to(self.device) if isinstance(inputs, Tensor) else self._embed(inputs)
            return self._compiled.run(first, last, hidden, self.cache.layers)
        return self._run_library(first, last, inputs, position)

    def _embed(self, token_ids: list[int]) -> Tensor:
        return self.model.model.embed_tokens(torch.tensor([token_ids], device=self.device))

    def _run_library(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        feed: dict[str, Tensor]
        if isinstance(inputs, Tensor):
            feed = {"inputs_embeds": inputs.to(self.device)}
        else:
            feed = {"input_ids": torch.tensor([inputs], device=self.device)}
        key = (first, last)
        if key not in self._pieces:
            self._pieces[key] = self._piece(first, last)
        if key not in self._views:
            self._views[key] = self.cache.view(first, last)
        size = next(iter(feed.values())).shape[1]
        feed["position_ids"] = self._positions[:, position : position + size]
        output = self._pieces[key](**feed, past_key_values=self._views[key], use_cache=True)
        return output.last_hidden_state

    def _piece(self, first: int, last: int) -> nn.Module:
        piece = layer_range(self.model, first, last)
        if self._rotary is not None:
            piece.rotary_emb = self._rotary
        return piece

    def _note_time(self, seconds: float) -> None:
        self.layer_seconds = 0.8 * self.layer_seconds + 0.2 * seconds if self.layer_seconds else seconds


class FinalHead:
    """The end of a model: final norm, head, and whatever the model adds to it, such as a soft cap or a scale.

    Args:
        model: whose end it is; weights are shared.
        lm_head: takes the place of the model's own map from normed states to the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, lm_head: nn.Module | None = None) -> None:
        self._model = model
        self._norm: nn.Module = model.model.norm
        self._lm_head: nn.Module = model.lm_head if lm_head is None else lm_head
        self._library = _shallow_copy(model)
        self._library.model = _NormOnly(self._norm)
        self._library.lm_head = self._lm_head

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`."""
        return self._plain_logits(hidden) if self._is_plain else self._library_logits(hidden)

    def _plain_logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(self._norm(hidden))

    def _library_logits(self, hidden: Tensor) -> Tensor:
        return self._library(inputs_embeds=hidden, use_cache=False).logits

    @cached_property
    @torch.no_grad()
    def _is_plain(self) -> bool:
        """Whether the model does nothing to its logits after the head."""
        model = self._model
        probe = torch.linspace(-8, 8, model.config.hidden_size, device=model.device, dtype=model.dtype)
        hidden = probe.view(1, 1, -1)
        return torch.equal(self._plain_logits(hidden), self._library_logits(hidden))


def layer_range(model: PreTrainedModel, first: int, last: int) -> nn.Module:
    """The model's decoder with only the layers `first` to `last` (half-open) and no final norm; it shares weights."""
    piece = _shallow_copy(model.model)
    piece.layers = nn.ModuleList(model.model.layers[first:last])
    piece.norm = nn.Identity()
    piece.config = _range_config(model.model.config, first, last)
    return piece


class _NormOnly(nn.Module):
    """Stands in for the decoder where only the final norm is left to do."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: Tensor, **_: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


def _shallow_copy(module: nn.Module) -> nn.Module:
    """The same module with a table of children of its own; parameters and children are shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _range_config(config: PretrainedConfig, first: int, last: int) -> PretrainedConfig:
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[first:last]
    config.num_hidden_layers = last - first
    return config
