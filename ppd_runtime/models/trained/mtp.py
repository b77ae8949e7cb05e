"""Multi-token prediction: the layer behind a model's last one, trained with it, that foresees the token after the next.

Checkpoints have it as the layer after `num_hidden_layers`, with norms and a map of its own. For a token it reads the
token's embedding and the state of the token before: the model's last, normed, where the token is certain, its own where
it is a guess. A checkpoint with several such layers is asked for the first one alone.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ppd_runtime.models.checkpoint.config import layer_number, model_config, weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.embedding import Embedding

MTP = "mtp"
"""The name of a model's own layer where a drafter is chosen."""
_MIX = "eh_proj.weight"
_OWN = ("enorm.weight", "hnorm.weight", _MIX, "shared_head.norm.weight")
_COPIES = ("embed_tokens.", "shared_head.head.")
"""Names of the model's own tensors, again beside the layer's."""
_ANOTHER = "give another drafter"
_AT_ONCE = 512  # certain tokens in a pass: masks grow by their number


@dataclass(frozen=True)
class MtpInfo:
    """A model that has such a layer; `describe_mtp` finds it."""

    folder: Path
    number: int
    """The layer's, counted from 0."""
    vocab_size: int
    layers: ClassVar[tuple[int, ...]] = ()
    reads_states: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = True
    takes_head: ClassVar[bool] = True
    fingerprint: ClassVar[str] = MTP

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that it gives the chances of: all."""
        return tuple(range(self.vocab_size))

    def num_weights(self) -> int:
        """How many numbers `load_mtp` adds to the model's own."""
        stored = (
            (name.partition(f"layers.{self.number}.")[2], math.prod(file.get_slice(name).get_shape()))
            for file in _open_files(self.folder)
            for name in file.keys()  # noqa: SIM118 (a safetensors file is no mapping)
            if layer_number(name) == self.number
        )
        return sum(size for name, size in stored if not name.startswith(_COPIES))


def describe_mtp(info: ModelInfo) -> MtpInfo:
    """Find a model's own layer; ValueError, in a line, if it has none that is understood."""
    shapes = {name: file.get_slice(stored).get_shape() for name, stored, file in _stored(info)}
    for name in _OWN:
        if name not in shapes:
            raise ValueError(f"drafter='{MTP}': model {info.name!r} {_lacking(info, name)}; {_ANOTHER}")
    size = model_config(info.folder).hidden_size
    for name, shape in shapes.items():
        if shape != (expected := [size, 2 * size] if name == _MIX else [size]):
            raise ValueError(f"drafter='{MTP}': model {info.name!r} has {name} as {shape}, not {expected}; {_ANOTHER}")
    return MtpInfo(info.folder, info.num_layers, info.vocab_size)


def load_mtp(drafter: MtpInfo, model: PreTrainedModel, info: ModelInfo) -> "MtpDrafter":
    """The drafter beside `model`, which has its embedding, norm and head, with its dtype, on its device."""
    own = {name: file.get_tensor(stored).to(model.device) for name, stored, file in _stored(info)}
    stored, device = own[_MIX].dtype, str(model.device)  # in another dtype all files would be copied
    part = load_layers(replace(info, weights=None), drafter.number + 1, stored, device, first=drafter.number)
    network = MtpNetwork(part, own)
    for parameter in network.parameters():
        if parameter.dtype == stored:  # some stay in float32
            parameter.data = parameter.data.to(model.dtype)
    return MtpDrafter(network.requires_grad_(False).eval(), model, drafter.tokens)


def _lacking(info: ModelInfo, name: str) -> str:
    """What a model without the tensor `name` has in its place.

    Layers that are named `mtp.…`, as in Qwen3-Next and Qwen3.5, belong to recurrent models, which do not run here.
    """
    wanted = f"model.layers.{info.num_layers}.{name}"
    for file in _open_files(info.folder):
        for stored in sorted(file.keys()):
            if any(part.startswith(MTP) for part in stored.split(".")):
                return f"has such a layer as {stored}, a form that is not understood (there is no {wanted})"
    return f"has no such layer (no {wanted})"


def _stored(info: ModelInfo) -> Iterator[tuple[str, str, Any]]:
    """Which of `_OWN` a model's files have, by which names, and the open files."""
    for file in _open_files(info.folder):
        for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            own = name.partition(f"layers.{info.num_layers}.")[2]
            if layer_number(name) == info.num_layers and own in _OWN:
                yield own, name, file


def _open_files(folder: Path) -> Iterator[Any]:
    """A model's files of tensors, each open until the next one is asked for."""
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise ValueError(f"drafter='{MTP}': {path.name} cannot be read: {one_line(error)}") from error


class MtpNetwork(nn.Module):
    """The layer, and what is before and behind it.

    Args:
        part: a model whose last layer it is.
        own: the tensors of `_OWN`, on its device.
    """

    def __init__(self, part: PreTrainedModel, own: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layer, self.rotary = part.model.layers[-1], part.model.rotary_emb
        for module in self.layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # it has a cache of its own
        norms = [copy.deepcopy(part.model.norm) for _ in range(3)]
        self.embedding_norm, self.state_norm, self.norm = norms
        for norm, name in zip(norms, ("enorm", "hnorm", "shared_head.norm"), strict=True):
            norm.weight = nn.Parameter(own[f"{name}.weight"], requires_grad=False)
        size = part.config.hidden_size
        self.mix = nn.Linear(2 * size, size, bias=False, device="meta")
        self.mix.weight = nn.Parameter(own[_MIX], requires_grad=False)

    def forward(self, embedded: Tensor, before: Tensor, places: Tensor, cache: DynamicCache) -> Tensor:
        """The normed states that the head reads and guesses go on from, `[1, tokens, hidden_size]`.

        `cache` gets the tokens' entries; `embedded` and the states `before` them have the result's shape, and positions
        are `[tokens]`.
        """
        hidden = self.mix(torch.cat([self.embedding_norm(embedded), self.state_norm(before)], dim=-1))
        held, size = cache.get_seq_length(), len(places)
        mask = None
        if size > 1:
            mask = hidden.new_full((size, held + size), torch.finfo(hidden.dtype).min).triu(held + 1)[None, None]
        found = self.layer(
            hidden,
            attention_mask=mask,
            position_ids=places[None],
            past_key_values=cache,
            position_embeddings=self.rotary(hidden, places[None]),
        )
        return self.norm(found[0] if isinstance(found, tuple) else found)


class MtpDrafter:
    """Drafts for one sequence at a time; keeps the entries of its certain tokens.

    Args:
        network: with its weights.
        model: with its embedding, norm and head.
        tokens: those that the head gives the logits of.
    """

    def __init__(self, network: MtpNetwork, model: PreTrainedModel, tokens: Sequence[int]) -> None:
        self._network, self._model, self.tokens = network, model, tuple(tokens)
        self._embed, self._device = Embedding(model), model.device
        self.begin(0)

    def another(self) -> "MtpDrafter":
        """A drafter with this network for another sequence at the same time."""
        other = copy.copy(self)
        other.begin(0)
        return other

    def begin(self, capacity: int) -> None:
        """Forget the last sequence. Memory for the next one is taken as it grows, whatever its `capacity`."""
        self._cache, self._certain = DynamicCache(), 0
        self._chain: list[int] = []
        self._states: list[Tensor] = []  # of the newest certain token, and of each of the chain

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Implements `DraftNetwork.follow`; the states are the last layer's alone."""
        self._drop_guesses(0)
        before = self._model.model.norm(states[None, :, 0].to(self._device))
        for start in range(0, len(tokens), _AT_ONCE):
            piece = slice(start, start + _AT_ONCE)
            hidden = self._run(tokens[piece], before[:, piece])
            self._certain += len(tokens[piece])
        self._states = [hidden[:, -1:]]

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Implements `DraftNetwork.draft`. What a chain begins with as the one before it did is not computed again."""
        found = torch.cat([self._after(chain) for chain in chains], dim=1)
        return self._model.lm_head(found)[0].float()

    def _after(self, chain: Sequence[int]) -> Tensor:
        """The state of a chain's last token, `[1, 1, hidden_size]`."""
        alike = 0
        while alike < min(len(chain), len(self._chain)) and chain[alike] == self._chain[alike]:
            alike += 1
        self._drop_guesses(alike)
        for token in chain[alike:]:
            self._states.append(self._run([token], self._states[-1]))
            self._chain.append(token)
        return self._states[-1]

    def _run(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        first = 1 + self._cache.get_seq_length()  # the text's first token has no state before it
        places = first + torch.arange(len(tokens), device=self._device)
        return self._network(self._embed(list(tokens)), before, places, self._cache)

    def _drop_guesses(self, kept: int) -> None:
        """Forget the chain but for its first `kept` guesses."""
        if guesses := len(self._chain) - kept:
            self._cache.crop(-guesses)
        del self._chain[kept:], self._states[1 + kept :]
