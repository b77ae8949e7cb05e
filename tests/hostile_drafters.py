"""Drafters' networks that know a text, and go wrong in any way."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor


def _raises(error: Exception) -> Callable[[Tensor], NoReturn]:
    def misdeed(logits: Tensor) -> NoReturn:
        raise error

    return misdeed


def _one(number: float) -> Callable[[Tensor], Tensor]:
    def misdeed(logits: Tensor) -> Tensor:
        changed = logits.clone()
        changed[0, 0] = number
        return changed

    return misdeed


def _takes_long(logits: Tensor) -> Tensor:
    time.sleep(0.05)
    return logits


FAILURES: dict[str, Callable[[Tensor], object]] = {
    "raises": _raises(ValueError("a line\nand another")),
    "no memory": _raises(MemoryError("3 GiB")),
    "no GPU memory": _raises(torch.OutOfMemoryError("3 GiB")),
    "NaN": _one(float("nan")),
    "infinitely high": _one(float("inf")),
    "too many logits": lambda logits: torch.cat([logits, logits], dim=1),
    "too few logits": lambda logits: logits[:, :-1],
    "another chain's": lambda logits: torch.cat([logits, logits]),
    "no row": lambda logits: logits[0],
    "numbers of another kind": lambda logits: logits.long(),
    "nothing": lambda logits: None,
}
"""What a network gives or raises in place of logits; each is noticed."""
NONSENSE: dict[str, Callable[[Tensor], object]] = {
    "one token for ever": lambda logits: torch.eye(1, logits.shape[1]).expand_as(logits) * 50,
    "another mind each time": lambda logits: logits[:, torch.randperm(logits.shape[1])],
    "all the same": torch.zeros_like,
    "nothing likely": lambda logits: logits - float("inf"),
    "enormous": lambda logits: logits * 1e37,
    "slow": _takes_long,
}
"""Logits that are as good as others, but wrong or late."""


class HostileNetwork:
    """Names what last followed a token in a text, until the first of its misdeeds.

    Args:
        text: token ids.
        tokens: what it gives logits of.
        misdeed: what becomes of logits.
        after: drafts that are as they should be.
    """

    def __init__(
        self, text: Sequence[int], tokens: Sequence[int], misdeed: Callable[[Tensor], object], after: int = 0
    ) -> None:
        self.tokens, self.drafts, self._misdeed, self._after = tokens, 0, misdeed, after
        self._places = {token: place for place, token in enumerate(tokens)}
        self._next, self._newest = dict(pairwise(text)), 0

    def begin(self, capacity: int) -> None:
        """Implements `DraftNetwork.begin`."""

    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Implements `DraftNetwork.follow`."""
        self._newest = tokens[-1]

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Implements `DraftNetwork.draft`, for a while."""
        self.drafts += 1
        logits = torch.zeros(len(chains), len(self.tokens))
        for row, chain in enumerate(chains):
            right = self._next.get(chain[-1] if chain else self._newest)
            if right in self._places:
                logits[row, self._places[right]] = 9.0
        return logits if self.drafts <= self._after else self._misdeed(logits)


class FailsToFollow(HostileNetwork):
    """Raises at what it should read."""

    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Implements `DraftNetwork.follow`."""
        raise RuntimeError("no room for tokens")


class FailsToBegin(HostileNetwork):
    """Raises where a request begins, and where it ends."""

    def begin(self, capacity: int) -> None:
        """Implements `DraftNetwork.begin`."""
        raise MemoryError("no room for a request")


def any_misdeed(generator: random.Random) -> Callable[[Tensor], object]:
    """One of all, drawn anew for each draft."""
    all_of_them = [*FAILURES.values(), *NONSENSE.values()]

    def misdeed(logits: Tensor) -> object:
        return generator.choice(all_of_them)(logits)

    return misdeed
