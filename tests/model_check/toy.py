"""A model whose every number is a hash of all that it must depend on, so that no mistake can go unseen.

A layer's output is a hash of the layer, the token's state, the number of tokens in the pass and every entry before
it; so a wrong, stale, doubled or missing entry, a state of another text, or a pass of another shape than ordinary
decoding's gives other numbers from there on.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.tracing.recorder import Recorder

CHUNK = 2
"""Tokens of a prompt's chunk; the paper's layout, whose stages cut prompts by themselves, gets none longer."""
VOCAB = 8
_HALF = 24  # bits; float32 holds that many exactly
_LAST_BITS = 2**_HALF - 1
_EMBED, _ENTRY, _OUTPUT = range(3)


def _mix(*parts: object) -> int:
    return hash(parts) & (2 ** (2 * _HALF) - 1)


def embed(token: int) -> int:
    """A token's state before the first layer."""
    return _mix(_EMBED, token)


def to_tensor(numbers: Sequence[Sequence[int]]) -> Tensor:
    """`[rows, columns, 2]` float32 for 48-bit numbers."""
    return torch.tensor([[(number >> _HALF, number & _LAST_BITS) for number in row] for row in numbers]).float()


def to_numbers(tensor: Tensor) -> list[list[int]]:
    """What `to_tensor` was given."""
    return [[int(high) << _HALF | int(low) for high, low in row] for row in tensor.tolist()]


class Pass(NamedTuple):
    """What ordinary decoding holds behind a text's newest token."""

    entries: tuple[tuple[int, ...], ...]
    """Of each layer, one a token."""
    states: tuple[int, ...]
    """Of the newest token, before the first layer and behind each."""


def run_layer(layer: int, states: Sequence[int], held: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Outputs and entries of a pass over tokens that follow those whose entries the layer holds."""
    entries = [*held, *(_mix(_ENTRY, layer, state, width) for state in states)]
    first = len(held)
    outputs = [_mix(_OUTPUT, layer, state, width, *entries[: first + i + 1]) for i, state in enumerate(states)]
    return outputs, entries[first:]


def choose(hidden: Tensor) -> Tensor:
    """`[VOCAB]` logits behind the newest state, of which one is 1."""
    logits = torch.zeros(VOCAB)
    logits[to_numbers(hidden)[0][-1] % VOCAB] = 1
    return logits


@dataclass(frozen=True)
class ToyModel:
    """Depth, the requests' prompts, and at which positions behind a prompt which candidate is right (0: none)."""

    num_layers: int
    exit_layer: int
    prompts: tuple[tuple[int, ...], ...] = ((3, 1), (2, 6))
    """All of one length."""
    winners: tuple[int, ...] = (1,)
    """They repeat."""
    boundaries: tuple[int, ...] = (1,)
    """Of stages: from which boundary on it is named; they repeat."""
    config: ClassVar = SimpleNamespace(hidden_size=2)

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt."""
        return len(self.prompts[0])

    def ordinary(self, text: tuple[int, ...]) -> Pass:
        """What ordinary decoding computes for a text: the prompt in chunks, then one token a pass."""
        return _ordinary(text, self.num_layers, self.prompt_length)

    def text(self, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
        """A prompt, or what begins with one, and what ordinary decoding makes of it, `length` tokens in all."""
        text = prompt[: min(self.prompt_length, length)]
        while len(text) < length:
            text = (*text, self.ordinary(text).states[-1] % VOCAB)
        return text

    def winner(self, position: int) -> int:
        """The rank of the right candidate at a position, or 0."""
        return self.winners[(position - self.prompt_length) % len(self.winners)]

    def first_boundary(self, position: int) -> int:
        """The first boundary that names the right candidate at a position."""
        return self.boundaries[(position - self.prompt_length) % len(self.boundaries)]

    @staticmethod
    def named(right: int, winner: int, k: int) -> list[int]:
        """k tokens, of which the right one has the rank `winner`; 0: none of them is right."""
        return [right if rank == winner else (right + rank) % VOCAB for rank in range(1, k + 1)]


@functools.cache
def _ordinary(text: tuple[int, ...], num_layers: int, prompt_length: int) -> Pass:
    before = len(text) - 1
    if len(text) <= prompt_length:
        before -= before % CHUNK
    new, held = (
        text[before:],
        _ordinary(text[:before], num_layers, prompt_length).entries if before else [()] * num_layers,
    )
    states = [embed(token) for token in new]
    entries, behind = [], [states[-1]]
    for layer, before in enumerate(held):
        states, added = run_layer(layer, states, before, len(new))
        entries.append((*before, *added))
        behind.append(states[-1])
    return Pass(tuple(entries), tuple(behind))


class ToyStage:
    """The first layers of a toy model; see `ppd_runtime.models.stage.layer_range.LayerRange`."""

    layer_seconds = 1e9
    """So long that no patience runs out by the clock."""
    cache = SimpleNamespace(entry_shape=lambda last: (1, 1))

    layers_at_once = 1
    states_dtype = torch.float32

    def __init__(self, model: ToyModel, num_layers: int) -> None:
        self.model, self.num_layers, self.state_size = model, num_layers, model.config.hidden_size
        self.recorder = Recorder()
        self.begin(0)

    def begin(self, capacity: int) -> None:
        """Forget the last sequence."""
        self.capacity = capacity
        self.entries: list[list[int]] = [[] for _ in range(self.num_layers)]
        self.text: tuple[int, ...] = ()
        """What the sequence began with."""

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run a half-open range of layers."""
        if isinstance(inputs, Tensor):
            (states,) = to_numbers(inputs)
        else:
            self.text = self.text if position else tuple(inputs)
            states = [embed(token) for token in inputs]
        width = len(states)
        for layer in range(first, last):
            self._check(layer, position, width)
            states, added = run_layer(layer, states, self.entries[layer], width)
            self.entries[layer] += added
        return to_tensor([states])

    def run_candidates(self, token_ids: Sequence[int], position: int) -> Tensor:
        """Run all layers over tokens that all stand at `position`; each gives a one-token pass' numbers."""
        states = [embed(token) for token in token_ids]
        for layer in range(self.num_layers):
            self._check(layer, position, len(states))
            held = tuple(self.entries[layer])
            passes = [run_layer(layer, [state], held, 1) for state in states]
            states = [outputs[0] for outputs, _ in passes]
            self.entries[layer] += [added[0] for _, added in passes]
        return to_tensor([states])

    def _check(self, layer: int, position: int, tokens: int) -> None:
        held = len(self.entries[layer])
        if held != position:
            raise RuntimeError(f"layer {layer} holds {held} tokens, the pass starts at position {position}")
        if held + tokens > self.capacity:
            raise IndexError(f"a cache for {self.capacity} tokens cannot hold {held + tokens}")

    def keep_candidate(self, position: int, index: int) -> None:
        """Of the siblings at `position`, keep one."""
        for entries in self.entries:
            entries[position:] = [entries[position + index]]

    def unread_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`."""
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[VOCAB]`, of which one is 1."""
        return choose(hidden)

    def length(self, layer: int) -> int:
        """Tokens whose entries `layer` holds."""
        return len(self.entries[layer])

    def keep_states(self, tokens: int | None) -> None:
        """There are none."""

    def held_from(self, first: int, last: int) -> int:
        """Tokens that the first layer holds."""
        return self.length(0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for entries in self.entries:
            del entries[length:]

    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """`[tokens, last, 2, 1, 1]`: a number's halves are a key and a value."""
        rows = [entries[first:end] for entries in self.entries[:last]]
        if any(len(row) != end - first for row in rows):
            raise RuntimeError(f"entries {first} to {end} of {last} layers are not all there")
        return to_tensor(list(zip(*rows, strict=True)))[..., None, None]

    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append consecutive tokens' entries."""
        for layer, added in enumerate(zip(*to_numbers(torch.stack(list(entries))[..., 0, 0]), strict=True)):
            if len(self.entries[layer]) != len(self.entries[0]) - len(added) * (layer > 0):
                raise RuntimeError("entries continue all layers or none")
            self.entries[layer] += added
        if max(map(len, self.entries)) > self.capacity:
            raise IndexError(f"a cache for {self.capacity} tokens cannot hold so many")


class MainStage(ToyStage):
    """Full depth; no token is decided but by ordinary decoding's very state."""

    def logits(self, hidden: Tensor) -> Tensor:
        """As a stage's, having compared the state."""
        text = self.model.text(self.text, len(self.entries[-1]))
        got, expected = to_numbers(hidden)[0][-1], self.model.ordinary(text).states[-1]
        assert got == expected, f"the token behind {text} is decided by a state that ordinary decoding does not have"
        return super().logits(hidden)


@dataclass(frozen=True)
class PatternHead(OracleHead):
    """Names the right token where and at which rank the model's pattern says so, be the text before it wrong.

    Behind a wrong candidate the next may so be right by luck: the main process must not take it.
    """

    model: ToyModel | None = None

    def candidates(self, hidden: Tensor, history: Sequence[int], k: int) -> list[int]:
        """k tokens, at most one of them right; `hidden` has to be the exit state of that very text."""
        assert self.model is not None
        expected = self.model.ordinary(tuple(history)).states[self.model.exit_layer]
        assert to_numbers(hidden)[0] == [expected], f"candidates behind {history} are named by another exit state"
        right = self.model.text(tuple(history), len(history) + 1)[-1]
        return self.model.named(right, self.model.winner(len(history)), k)
