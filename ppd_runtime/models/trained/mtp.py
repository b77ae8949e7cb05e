"""Multi-token prediction: the layer behind a model's last one, trained with it, that foresees the token after the next.

Checkpoints have it as the layer after `num_hidden_layers`, or apart from the others as `mtp`, with norms and a map of
its own. For a token it reads the token's embedding and the state of the token before: the model's last, normed, where
the token is certain, its own where it is a guess. A checkpoint with several such layers is asked for the first one
alone.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ppd_runtime.models.checkpoint.config import model_config, weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.checkpoint.loading import load_layer
from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT, decoder_in, final_norm
from ppd_runtime.models.stage.embedding import Embedding
from ppd_runtime.models.stage.library_probe import kept_by_layers

MTP = "mtp"
"""The name of a model's own layer where a drafter is chosen."""
_MIX = "eh_proj.weight"
_OWN = ("enorm.weight", "hnorm.weight", _MIX, "shared_head.norm.weight")
_APART = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
"""Names of `_OWN`, in their order, where the layer is apart from the others."""
_COPIES = ("embed_tokens.", "shared_head.head.")
"""Names of the model's own tensors, again beside the layer's."""
_ANOTHER = "give another drafter"
_AT_ONCE = 512  # certain tokens in a pass: masks grow by their number


class _Form(NamedTuple):
    """How a model's files name the layer's tensors."""

    own: Mapping[str, str]
    """The names of `_OWN`."""
    block: str
    """What the names of its decoder layer begin with."""

    def of_block(self, stored: str) -> str | None:
        """The name of one of the decoder layer's tensors in the layer; None for other tensors."""
        name = stored.removeprefix(self.block)
        is_other = name == stored or stored in self.own.values() or name.startswith(_COPIES)
        return None if is_other else name


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
        form = _form(self.folder, self.number)
        return sum(
            math.prod(file.get_slice(stored).get_shape())
            for stored, file in _stored(self.folder)
            if stored in form.own.values() or form.of_block(stored)
        )


def describe_mtp(info: ModelInfo) -> MtpInfo:
    """Find a model's own layer; ValueError, in a line, if it has none that is understood."""
    refuse, form = f"drafter='{MTP}': model {info.name!r}", _form(info.folder, info.num_layers)
    shapes = {stored: file.get_slice(stored).get_shape() for stored, file in _stored(info.folder)}
    known = {*form.own.values()}
    for stored in form.own.values():
        if stored not in shapes:
            raise ValueError(f"{refuse} {_lacking(stored, shapes)}; {_ANOTHER}")
    odd = [name for name in shapes if name.startswith(f"{MTP}.") and name not in known and ".layers." not in name]
    if odd:
        raise ValueError(f"{refuse} has {min(odd)} beside such a layer, which is not understood; {_ANOTHER}")
    config = model_config(info.folder)
    size = config.hidden_size
    for name, stored in form.own.items():
        if (shape := shapes[stored]) != (expected := [size, 2 * size] if name == _MIX else [size]):
            raise ValueError(f"{refuse} has {stored} as {shape}, not {expected}; {_ANOTHER}")
    last = kept_by_layers(config)[-1]
    if not last.is_plain or last.index_size:
        reason = "such a layer behind one that keeps more than keys and values, which is not understood"
        raise ValueError(f"{refuse} has {reason}; {_ANOTHER}")
    return MtpInfo(info.folder, info.num_layers, info.vocab_size)


def _lacking(name: str, stored: Iterable[str]) -> str:
    """What a model without the tensor `name` has in its place, of the tensors that are `stored`."""
    others = sorted(other for other in stored if any(part.startswith(MTP) for part in other.split(".")))
    if others:
        return f"has such a layer as {others[0]}, a form that is not understood (there is no {name})"
    return f"has no such layer (no {name})"


def load_mtp(drafter: MtpInfo, model: PreTrainedModel, info: ModelInfo) -> "MtpDrafter":
    """The drafter beside `model`, which has its embedding, norm and head, with its dtype, on its device."""
    form = _form(drafter.folder, drafter.number)
    names = {stored: name for name, stored in form.own.items()}
    own, block = dict[str, Tensor](), dict[str, Tensor]()
    for stored, file in _stored(drafter.folder):
        if stored in names:
            own[names[stored]] = file.get_tensor(stored)
        elif name := form.of_block(stored):
            block[f"model.layers.{drafter.number}.{name}"] = file.get_tensor(stored)
    dtype = own[_MIX].dtype
    network = MtpNetwork(load_layer(info, drafter.number, block, dtype), own).to(model.device)
    for parameter in network.parameters():
        if parameter.dtype == dtype:  # some stay in float32
            parameter.data = parameter.data.to(model.dtype)
    return MtpDrafter(network.requires_grad_(False).eval(), model, drafter.tokens)


def _form(folder: Path, number: int) -> _Form:
    """How a model's files name the layer, which is its `number`-th, counted from 0, if they have it."""
    behind = f"model.layers.{number}."
    if any(stored.startswith(f"{MTP}.") for stored, _ in _stored(folder)):
        return _Form(dict(zip(_OWN, _APART, strict=True)), f"{MTP}.layers.0.")
    return _Form({name: behind + name for name in _OWN}, behind)


def _stored(folder: Path) -> Iterator[tuple[str, Any]]:
    """The names of the tensors in a model's files, and the open files that have them."""
    for file in _open_files(folder):
        for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            yield name, file


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
        part: a decoder whose last layer it is.
        own: the tensors of `_OWN`.
    """

    def __init__(self, part: Any, own: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layer, self.rotary = part.layers[-1], part.rotary_emb
        for module in self.layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # it has a cache of its own
        norms = [copy.deepcopy(part.norm) for _ in range(3)]
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
            position_embeddings=self.rotary(hidden, places[None]),
            **{CACHE_ARGUMENT: cache},
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
        self._norm = getattr(decoder_in(model), final_norm(decoder_in(model)))
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
        before = self._norm(states[None, :, 0].to(self._device))
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
