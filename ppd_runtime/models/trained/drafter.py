"""A drafter: one layer that foresees tokens before any layer of the model has run for them.

For a token it reads the token's embedding and the state of the token before: that of the model's last layer where the
token is certain, its own where it is a guess, for which no layer has run. The model's own norm and head, over a
shortlist, turn its states into chances.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.native.drafter import LAYERS, DrafterPasses, ScaledNorm, Where
from ppd_runtime.models.native.library import load
from ppd_runtime.models.native.linear import QuantisedLinear
from ppd_runtime.models.native.packing import pack, packed_bytes
from ppd_runtime.models.native.quantising import FORMAT_OF, quantise
from ppd_runtime.models.stage.embedding import Embedding
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.heads import model_end, normed
from ppd_runtime.models.trained.parts import PartInfo, describe_part, save_part

_HEAD_DIM, _BASE = 64, 10000.0
_INNER = 2  # times the hidden size
_INT8, _GROUP = "int8", 32


class DraftNetwork(Protocol):
    """Names what may follow a request's newest certain token, and chains of guesses behind it."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens whose logits `draft` gives."""
        ...

    def begin(self, capacity: int) -> None:
        """Forget the last sequence; make room for one of at most `capacity` tokens, guesses among them."""
        ...

    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Take the next certain tokens; `states` `[tokens, layers, hidden_size]` are of the token before each.

        A network that reads the tokens alone takes any states.
        """
        ...

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Logits of the token after each chain of guesses, `[chains, len(tokens)]`."""
        ...


@dataclass(frozen=True)
class DrafterInfo(PartInfo):
    """What a drafter was trained for; `describe_drafter` reads it from the drafter's folder. Its `exit_layer` is 0."""

    NAME: ClassVar[str] = "drafter"
    NOUN: ClassVar[str] = "drafter"
    COMMAND: ClassVar[str] = "ppd adapt"
    layers: ClassVar[tuple[int, ...]] = ()
    """Layers of the model after which it reads states; none is the last one."""
    reads_states: ClassVar[bool] = True
    """Whether it reads the model's states; else it reads the tokens alone, from the first one on."""
    reads_prompt: ClassVar[bool] = False
    """Whether it reads the prompt too."""
    takes_head: ClassVar[bool] = True
    """Whether it needs the model's head for its tokens."""
    STORED: ClassVar[torch.dtype] = torch.bfloat16

    tokens: tuple[int, ...]
    """The shortlist, in rising order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))

    @property
    def fingerprint(self) -> str:
        """Tells it from all others."""
        return self.weights_sha256

    def check_card(self) -> None:
        """Raise ValueError for tokens that no model has."""
        whole = all(type(number) is int and number >= 0 for number in self.tokens)
        if not whole or list(self.tokens) != sorted({*self.tokens}):
            raise ValueError("tokens are no numbers in rising order")
        if not self.tokens or self.tokens[-1] >= self.vocab_size:
            raise ValueError(f"tokens are none of the {self.vocab_size} of the vocabulary")

    def num_bytes(self, device: str) -> int:
        """Bytes that `load_drafter` adds to a model's own on a device, norm and head over the shortlist among them."""
        shapes = [tensor.shape for tensor in self.tensors().values()]
        shapes += [torch.Size([len(self.tokens), self.hidden_size]), torch.Size([self.hidden_size])]
        return sum(_bytes_of(shape, few_bits=device == "cpu") for shape in shapes)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * _num_heads(self.hidden_size) * _HEAD_DIM * torch.float32.itemsize


class DrafterNetwork(nn.Module):
    """What is learned of a drafter, in float32: a map of its inputs, and a layer of attention and a gated product.

    The layer begins as nothing, so that the map alone decides. Positions count from the first token that the drafter
    follows.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.heads = _num_heads(size)
        wide, inner = self.heads * _HEAD_DIM, _INNER * size
        self.mix = nn.Linear(2 * size, size)
        """From a token's embedding and the state of the token before."""
        self.query_key_value = nn.Linear(size, 3 * wide, bias=False)
        self.out = nn.Linear(wide, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)
        for begins_as_nothing in (self.out, self.down):
            nn.init.zeros_(begins_as_nothing.weight)

    def inputs(self, embedded: Tensor, before: Tensor) -> Tensor:
        """`[..., hidden_size]` of tokens' embeddings and the states before them, which are both scaled to unit size."""
        return self.mix(torch.cat([normed(embedded), normed(before.to(embedded.dtype))], dim=-1))

    def attended(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[..., heads, tokens, head_dim]` each, of inputs `[..., tokens, hidden_size]`."""
        parts = self.query_key_value(normed(inputs)).unflatten(-1, (3 * self.heads, _HEAD_DIM)).transpose(-2, -3)
        query, key = _turned(parts[..., : 2 * self.heads, :, :], rotary).chunk(2, dim=-3)
        return query, key, parts[..., 2 * self.heads :, :, :]

    def states(self, inputs: Tensor, found: Tensor) -> Tensor:
        """The drafter's states, from its inputs and what attention found, `[..., heads, tokens, head_dim]`."""
        hidden = inputs + self.out(found.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(normed(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


def _num_heads(size: int) -> int:
    return max(1, size // _HEAD_DIM)


def rotary_table(positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of so many positions, `[positions, head_dim / 2]`."""
    steps = _BASE ** -(torch.arange(_HEAD_DIM // 2, device=device) / (_HEAD_DIM // 2))
    angles = torch.arange(positions, device=device)[:, None] * steps
    return angles.cos(), angles.sin()


def _turned(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Queries and keys with their positions, whose rows of the table are given."""
    (first, second), (cos, sin) = states.chunk(2, dim=-1), rotary
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(states.dtype)


class Drafter:
    """Drafts for one sequence at a time; keeps the entries of its certain tokens, and those of guesses until the next
    certain one.

    Args:
        network: what it has learned; it is changed.
        model: with its embedding, and its norm and head, for all tokens or for the shortlist.
        tokens: the shortlist, of which `draft` gives the chances.
        few_bits: whether its matrices have 8 bits a number on a CPU: a draft reads all of them.
    """

    def __init__(
        self, network: DrafterNetwork, model: PreTrainedModel, tokens: Sequence[int], few_bits: bool = True
    ) -> None:
        self._network, self.tokens = network.to(model.device).requires_grad_(False).eval(), tuple(tokens)
        has_all = model.lm_head.out_features != len(self.tokens)
        end = model_end(model, self.tokens if has_all else range(len(self.tokens)))
        self._device, self._embed = model.device, Embedding(model)
        if few_bits and model.device.type == "cpu" and _has_native_code():
            _in_few_bits(self._network)
            if isinstance(end.lm_head, nn.Linear):
                end.lm_head = _of_few_bits(end.lm_head)
        self._head = FinalHead(end)
        parts = {name: getattr(network, name) for name in LAYERS}
        self._packed = parts if all(isinstance(part, QuantisedLinear) for part in parts.values()) else None
        self._native_head = self._norm_and_map(end.lm_head) if self._packed else None
        self.begin(0)

    def _norm_and_map(self, head: nn.Module) -> tuple[ScaledNorm, QuantisedLinear] | None:
        """What the native code takes as the model's end; None if it is anything else."""
        norm = self._head.scaled_norm()
        return (ScaledNorm(*norm), head) if norm and isinstance(head, QuantisedLinear) else None

    def another(self) -> "Drafter":
        """A drafter with this network for another sequence at the same time."""
        other = copy.copy(self)
        other.begin(0)
        return other

    def begin(self, capacity: int) -> None:
        """Implements `DraftNetwork.begin`."""
        shape = 2, self._network.heads, capacity, _HEAD_DIM
        self._entries = torch.empty(shape, device=self._device)
        self._states = torch.empty(capacity, self._network.down.out_features, device=self._device)
        self._rotary = rotary_table(capacity, self._device)
        self._certain = 0
        self._rows: dict[tuple[int, ...], int] = {}  # of chains: that of the last token
        self._native: DrafterPasses | None = None
        if self._packed:
            self._native = DrafterPasses(self._packed, self._native_head, self._entries, self._states, self._rotary)

    @torch.inference_mode()
    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Implements `DraftNetwork.follow`; the states are the last layer's alone."""
        first, end = self._certain, self._certain + len(tokens)
        rows = range(first, end)
        where = Where(rows, rows, range(first + 1, end + 1), ())
        self._run(tokens, states[:, 0].to(self._device).float(), where)
        self._certain, self._rows = end, {}

    @torch.inference_mode()
    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Implements `DraftNetwork.draft`. What was drafted since the newest certain token is not computed again."""
        wanted = [tuple(chain) for chain in chains]
        if self._certain + len(self._rows) + sum(map(len, wanted)) > len(self._states):
            self._rows = {}
        for depth in range(1, max(map(len, wanted)) + 1):
            missing = {chain[:depth] for chain in wanted if len(chain) >= depth} - self._rows.keys()
            if missing:
                self._run_guesses(sorted(missing))
        rows = [self._row(chain) for chain in wanted]
        if self._native and self._native_head:
            return self._native.logits(rows)
        return self._head(self._states[rows][None])[0].float()

    def _row(self, chain: tuple[int, ...]) -> int:
        """The row of a chain's last token, or of the newest certain one."""
        return self._rows[chain] if chain else self._certain - 1

    def _run_guesses(self, chains: Sequence[tuple[int, ...]]) -> None:
        """Run the last tokens of chains of one length, of whose other tokens all have run."""
        depth, first = len(chains[0]), self._certain + len(self._rows)
        rows = range(first, first + len(chains))
        before = [self._row(chain[:-1]) for chain in chains]
        paths = [
            [*(self._rows[chain[:length]] for length in range(1, depth)), row]
            for chain, row in zip(chains, rows, strict=True)
        ]
        places = [self._certain + depth - 1] * len(chains)
        where = Where(places, rows, [self._certain] * len(chains), paths)
        self._run([chain[-1] for chain in chains], before, where)
        self._rows.update(zip(chains, rows, strict=True))

    def _run(self, tokens: Sequence[int], before: Tensor | list[int], where: Where) -> None:
        """Compute entries and states of tokens, from the states before them, `[tokens, hidden_size]`, or their rows."""
        embedded = self._embed(list(tokens))[0].float()
        if self._native:
            before = before.contiguous() if isinstance(before, Tensor) else before
            self._native.run(embedded.contiguous(), before, where)
            return
        places, rows = list(where.places), list(where.rows)
        inputs = self._network.inputs(embedded, before if isinstance(before, Tensor) else self._states[before])
        query, key, value = self._network.attended(inputs, (self._rotary[0][places], self._rotary[1][places]))
        self._entries[0][:, rows], self._entries[1][:, rows] = key, value
        keys, values = self._entries[:, None, :, : rows[-1] + 1]
        mask = torch.arange(rows[-1] + 1, device=self._device) < torch.tensor(where.seen, device=self._device)[:, None]
        for row, path in enumerate(where.paths):
            mask[row, path] = True
        found = F.scaled_dot_product_attention(query[None], keys, values, attn_mask=mask)
        self._states[rows] = self._network.states(inputs, found[0])


def _has_native_code() -> bool:
    """Whether matrices of few bits can be multiplied here."""
    try:
        load()
    except ValueError:
        return False
    return True


def _in_few_bits(network: DrafterNetwork) -> None:
    for name, part in list(network.named_children()):
        if isinstance(part, nn.Linear):
            setattr(network, name, _of_few_bits(part))


def _of_few_bits(part: nn.Linear) -> nn.Module:
    if part.in_features % _GROUP:
        return part
    bias = None if part.bias is None else part.bias.detach()
    return QuantisedLinear(pack(quantise(part.weight.detach(), _INT8)), bias)


def _bytes_of(shape: torch.Size, few_bits: bool) -> int:
    """Bytes of a tensor of the drafter."""
    if few_bits and len(shape) == 2 and shape[1] % _GROUP == 0:
        return packed_bytes(FORMAT_OF[_INT8], *shape)
    return shape.numel() * torch.float32.itemsize


def save_drafter(folder: Path, network: DrafterNetwork, known: DrafterInfo, training: Mapping[str, Any]) -> DrafterInfo:
    """Write a drafter's folder; see `save_part`."""
    return save_part(folder, network.state_dict(), known, training)


def describe_drafter(folder: str | Path, info: ModelInfo) -> DrafterInfo:
    """Read what a folder's drafter was trained for and check that it was this model; see `describe_part`."""
    return describe_part(DrafterInfo, folder, info)


def load_drafter(drafter: DrafterInfo, model: PreTrainedModel) -> Drafter:
    """The drafter beside `model`, on its device; see `Drafter`."""
    network = DrafterNetwork(drafter.hidden_size)
    network.load_state_dict(drafter.tensors())
    return Drafter(network, model, drafter.tokens)
