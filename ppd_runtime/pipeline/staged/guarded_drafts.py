"""Boundary 0 with a network that may fail, take long or give nonsense: that costs time, never a request."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.trained.drafter import DraftNetwork
from ppd_runtime.pipeline.staged.chances import Guess
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.settings.checks import foreign_token

logger = logging.getLogger(__name__)
_REST = 50  # times a draft that was not worth its time, until another request tries one
_MOST_WAITING = 256  # tokens whose states are kept for a network that is not asked

D = TypeVar("D", bound=DraftNetwork)


class DrafterHealth:
    """What a worker's requests have found out about its drafter: whether it fails, and whether it is too slow."""

    def __init__(self) -> None:
        self._rests_until, self._is_warm, self._has_told = 0.0, False, False

    @property
    def rests(self) -> bool:
        """Whether a draft that was not worth its time is so recent that a request should not try one."""
        return time.perf_counter() < self._rests_until

    def note_too_slow(self, seconds: float) -> None:
        """A draft took so long, which is more than it may save; the first one may be a cold start."""
        if self._is_warm:
            self._rests_until = time.perf_counter() + _REST * seconds
        self._is_warm = True

    def note_failure(self, error: Exception) -> None:
        """The drafter has failed in a request; only the first failure is logged."""
        if not self._has_told:
            self._has_told = True
            logger.warning("the drafter fails, and is asked no more where it does: %s", one_line(error))


def usable(load: Callable[..., D], *arguments: Any, vocab_size: int) -> D | None:
    """The drafter that `load` makes; None, with a warning, if it fails or names tokens that the model lacks."""
    try:
        drafter = load(*arguments)
        if (foreign := foreign_token(drafter.tokens, vocab_size)) is not None:
            raise ValueError(f"token id {foreign} is not among the model's {vocab_size}")
    except Exception as error:  # noqa: BLE001 (files may hold anything)
        logger.warning("no drafter guesses, for it cannot be loaded: %s", one_line(error))
        return None
    return drafter


class GuardedDrafts(NetworkDrafts):
    """A drafter's network for one request, in which it is asked no more once it has failed; see `NetworkDrafts`.

    Args:
        health: the worker's record of its drafter.
        network: for this request alone; whatever it raises or returns, nothing is raised here.
        arguments: the others of `NetworkDrafts`.
    """

    def __init__(self, health: DrafterHealth, network: DraftNetwork, *arguments: Any) -> None:
        super().__init__(_Checked(network), *arguments)
        self._health, self._has_failed = health, False

    def follow(self, token: int, state: Tensor | None) -> None:
        """See `NetworkDrafts.follow`; the states of tokens that wait for long are forgotten."""
        most = _MOST_WAITING + self._capacity * self.reads_prompt
        if not self._has_failed:
            super().follow(token, state if len(self._waiting) < most else None)

    def is_worth(self, chance: float) -> bool:
        """See `NetworkDrafts.is_worth`."""
        if self._has_failed or (not self._seconds and self._health.rests):
            return False
        return super().is_worth(chance)

    def guesses(self, paths: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Sequence[Sequence[Guess]]:
        """See `NetworkDrafts.guesses`; nothing is named behind a failure."""
        if self._has_failed:
            return [()] * len(paths)
        began = time.perf_counter()
        try:
            named = super().guesses(paths, texts)
        except Exception as error:  # noqa: BLE001 (a guess fails no request)
            self._has_failed = True
            self._health.note_failure(error)
            self.release()
            return [()] * len(paths)
        if not super().is_worth(1.0):
            self._health.note_too_slow(time.perf_counter() - began)
        return named

    def release(self) -> None:
        """See `NetworkDrafts.release`."""
        with suppress(Exception):
            super().release()


class _Checked:
    """A network whose logits are checked."""

    def __init__(self, network: DraftNetwork) -> None:
        self._network, self.tokens = network, network.tokens
        self.begin, self.follow = network.begin, network.follow

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """See `DraftNetwork.draft`; ValueError for logits of another shape, NaN and infinitely high ones."""
        logits = self._network.draft(chains)
        if logits.shape != (len(chains), len(self.tokens)):
            raise ValueError(f"logits {[*logits.shape]} for {len(chains)} chains and {len(self.tokens)} tokens")
        if not logits.is_floating_point():
            raise ValueError(f"logits of {logits.dtype}")
        if not bool((logits < float("inf")).all()):
            raise ValueError("logits that are NaN or infinitely high")
        return logits
