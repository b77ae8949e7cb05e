"""A draft model: a whole, smaller model with the same vocabulary names what may follow a text.

Its guesses need not be exact, so it has any dtype and weight format, and its rows any order of sums.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer, read_info
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.compiling import read_code
from ppd_runtime.models.pass_kinds import PassKind, head_kind
from ppd_runtime.models.stage.emulation import EmulatedDevice, emulated
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slots import node_slots
from ppd_runtime.models.trained.drafter import DrafterInfo

_MOST_GUESSES = 128
"""Guesses with entries at any time; no chain is longer."""
_SHARED = 0.5
"""Least share of the smaller vocabulary's texts that the larger one has, too."""
_ANOTHER = "give a smaller model of the same family"


@dataclass(frozen=True)
class DraftModelInfo:
    """A draft model and how it is run; `describe_draft_model` finds it, and leaves the rest as it is by default."""

    layers: ClassVar[tuple[int, ...]] = ()
    reads_states: ClassVar[bool] = False
    reads_prompt: ClassVar[bool] = True
    takes_head: ClassVar[bool] = False

    info: ModelInfo
    vocab_size: int
    """Tokens that both models have."""
    dtype: torch.dtype = torch.float32
    shortlist: tuple[int, ...] = ()
    """The tokens that it names, ascending; empty: all."""
    code: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    """Files of compiled code, as a worker's."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that it names."""
        return self.shortlist or range(self.vocab_size)

    @property
    def fingerprint(self) -> str:
        """Tells it from all others, and from itself with other tokens."""
        return f"{model_fingerprint(self.info)} {self.info.weights_name} {len(self.tokens)}"

    @property
    def code_kinds(self) -> frozenset[int]:
        """The kinds of passes, and of the head, that compiled code is for."""
        return frozenset({PassKind.ONE, PassKind.SEVERAL, head_kind(len(self.shortlist))})

    def device(self, beside: str) -> str:
        """The device that it runs on where the layers beside it run on `beside`: products of few bits run on CPUs."""
        return "cpu" if self.info.weights else beside


def describe_draft_model(name: str, info: ModelInfo) -> DraftModelInfo:
    """Find a draft model for a model, and check that both have one vocabulary; no weights are read.

    Heads may have more rows than there are tokens: their number may differ where the tokenizers say the same.

    Args:
        name: as for `describe`.

    Raises:
        ValueError: in a line: no such model, one that cannot be run here, or another vocabulary.
    """
    try:
        found = describe(name)
    except ValueError as error:
        kinds = f"no folder that `{DrafterInfo.COMMAND}` wrote, head of speculators' format, or model that can draft"
        raise ValueError(f"drafter={name!r}: {kinds}: {error}") from error
    if found.folder != info.folder and (differ := _difference(found, info)):
        raise ValueError(f"drafter={name!r}: has another vocabulary than model {info.name!r} ({differ}); {_ANOTHER}")
    return DraftModelInfo(found, min(found.vocab_size, info.vocab_size))


def _difference(draft: ModelInfo, info: ModelInfo) -> str:
    """How the vocabularies differ; empty if they do not."""
    sizes = f"{draft.vocab_size} tokens, not {info.vocab_size}" if draft.vocab_size != info.vocab_size else ""
    try:
        theirs, ours = _ids(draft), _ids(info)
    except ValueError:  # without tokenizers only the sizes say anything
        return sizes
    both = theirs.keys() & ours.keys()
    if len(both) < _SHARED * min(len(theirs), len(ours)):
        return sizes or f"{len(both)} of {len(ours)} texts of tokens are the same"
    moved = next((text for text in sorted(both) if theirs[text] != ours[text]), None)
    return "" if moved is None else f"token {moved!r:.50} is {theirs[moved]}, not {ours[moved]}"


def _ids(info: ModelInfo) -> dict[str, int]:
    """The ids of a tokenizer's texts; those that were added, such as marks of a chat, do not count."""
    tokenizer = load_tokenizer(info)
    added = tokenizer.get_added_vocab()
    return {text: number for text, number in tokenizer.get_vocab().items() if text not in added}


def read_draft_model(told: Mapping[str, Any]) -> DraftModelInfo:
    """A draft model and how it is run, from JSON fields."""
    fields = {**told, "info": read_info(told["info"]), "dtype": getattr(torch, told["dtype"])}
    return DraftModelInfo(**{**fields, "shortlist": tuple(told["shortlist"]), "code": read_code(told["code"])})


def load_draft_model(draft: DraftModelInfo, beside: str, emulate: EmulatedDevice | None = None) -> "DraftModel":
    """The draft model, beside layers on the device `beside`; `emulate` is theirs."""
    info, device = draft.info, draft.device(beside)
    stage = load_stage(info, info.num_layers, draft.dtype, device, draft.code, head_tokens=draft.shortlist)
    emulated(stage, emulate and emulate.of_draft_model(info.num_layers))
    return DraftModel(stage, draft.tokens, info.max_positions)


class _Guess:
    """A guess that has run, with what it is followed by; the root is the newest certain token."""

    def __init__(self, number: int, hidden: Tensor | None) -> None:
        self.number, self.hidden = number, hidden
        self.children: dict[int, _Guess] = {}

    def all_behind(self) -> "Iterator[_Guess]":
        for child in self.children.values():
            yield child
            yield from child.all_behind()


class DraftModel:
    """A `DraftNetwork` that runs all layers of a model, for one sequence at a time, from its first token on.

    It keeps the entries of its certain tokens and of the guesses that it has run, which form a tree; what becomes
    certain does not run again. Where a text is longer than the model can read, it foresees nothing: all tokens are
    equally likely.

    Args:
        stage: all layers and the head.
        tokens: what the head's rows stand for; it may have more of them.
        most_positions: tokens that the model can read; None: any number.
    """

    def __init__(self, stage: LayerRange, tokens: Sequence[int], most_positions: int | None = None) -> None:
        self._stage, self.tokens, self._most_positions = stage, tokens, most_positions
        self._last_token = stage.model.config.vocab_size - 1
        self.begin(0)

    def another(self) -> "DraftModel":
        """A drafter with this model for another sequence at the same time."""
        other = copy.copy(self)
        other.begin(0)
        return other

    def begin(self, capacity: int) -> None:
        """Implements `DraftNetwork.begin`."""
        self._stage.begin(capacity and capacity + _MOST_GUESSES + 1)
        self._cache = self._stage.cache
        self._slots = node_slots(self._cache, _MOST_GUESSES)
        self._root = _Guess(0, None)
        self._numbers = self._guesses = 0
        self._is_lost = False  # whether the text was too long

    def follow(self, tokens: Sequence[int], states: Tensor | None = None) -> None:
        """Implements `DraftNetwork.follow`, for all tokens of a text; it needs no states."""
        read = 0
        while read < len(tokens) and (guess := self._root.children.pop(tokens[read], None)):
            self._forget_guesses()
            self._slots.keep(guess.number)
            self._root, self._guesses, read = guess, sum(1 for _ in guess.all_behind()), read + 1
        if read < len(tokens):
            self._forget_guesses()
            self._read(tokens[read:])

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Implements `DraftNetwork.draft`."""
        logits = torch.zeros(len(chains), len(self.tokens))
        for row, chain in enumerate(chains):
            if (hidden := self._after(chain)) is not None:
                logits[row] = self._stage.logits(hidden)[: len(self.tokens)]
        return logits

    def _read(self, tokens: Sequence[int]) -> None:
        """Run certain tokens that were no guesses, as few passes."""
        position = self._slots.kept
        self._root, self._is_lost = _Guess(0, None), self._is_lost or not self._can_read(position + len(tokens))
        if self._is_lost:
            return
        self._stage.turn_to(self._cache)
        self._cache.set_length(position)
        for chunk in self._stage.prompt_chunks(len(tokens)):
            inputs = self._known(tokens[chunk.start : chunk.stop])
            hidden = self._run(inputs, position + chunk.start, in_prompt=not position or self._stage.has_states)
        self._slots.keep_run(len(tokens))
        self._root.hidden = hidden[:, -1:]

    def _after(self, chain: Sequence[int]) -> Tensor | None:
        """The state of a chain's last token, `[1, 1, hidden_size]`; None where the model cannot read as much."""
        if len(chain) > _MOST_GUESSES or not self._can_read(self._slots.kept + len(chain)):
            return None
        if self._guesses + len(chain) > _MOST_GUESSES:
            self._forget_guesses()
        guess, path = self._root, list[int]()
        for token in chain if self._root.hidden is not None else ():
            if token not in guess.children:
                self._stage.turn_to(self._cache)
                self._numbers, self._guesses = self._numbers + 1, self._guesses + 1
                position = self._slots.place([*path, self._numbers])
                guess.children[token] = _Guess(self._numbers, self._run(self._known([token]), position))
            guess = guess.children[token]
            path.append(guess.number)
        return guess.hidden

    def _run(self, tokens: list[int], position: int, in_prompt: bool = False) -> Tensor:
        return self._stage.run_pass(0, self._stage.num_layers, tokens, position, in_prompt)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the model can read in the place of these, of which it may lack those behind its last one."""
        return [min(token, self._last_token) for token in tokens]

    def _can_read(self, tokens: int) -> bool:
        return self._most_positions is None or tokens <= self._most_positions

    def _forget_guesses(self) -> None:
        for guess in self._root.all_behind():
            self._slots.drop(guess.number)
        self._root.children.clear()
        self._guesses = 0
