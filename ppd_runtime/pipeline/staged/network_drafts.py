"""Boundary 0 with a network: a drafter names what may follow a node, from the model's states or the tokens alone."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor, cat

from ppd_runtime.models.trained.drafter import DraftNetwork
from ppd_runtime.models.trained.exit_heads import ShortlistSampler
from ppd_runtime.pipeline.staged.chances import Guess
from ppd_runtime.sampling.sampler import Sampler

_GAIN = 0.5  # of a token, for what a node's successors are named, if the node comes true
_WEIGHT = 0.1  # the newest draft's time


class NetworkDrafts:
    """A drafter's network for one request.

    The network reads certain tokens only when something is asked, then all that wait at once. Where a state that it
    reads is missing, it begins anew behind the gap: its keys and values are context, which guesses can do without.

    Args:
        network: for this request alone.
        ranking: the request's, over the network's tokens.
        k: tokens to name behind a node.
        capacity: new tokens of the request and guesses behind them, at the most.
        pass_seconds: gives the time of the model's pass over one token, 0 while unknown.
        reads_prompt: whether the network follows the prompt too.
        reads_states: whether the network reads states; else it reads all tokens, and no states.
    """

    def __init__(
        self,
        network: DraftNetwork,
        ranking: Sampler | ShortlistSampler,
        k: int,
        capacity: int,
        pass_seconds: Callable[[], float],
        reads_prompt: bool = False,
        reads_states: bool = True,
    ) -> None:
        self.reads_prompt, self.reads_states = reads_prompt, reads_states
        self._network, self._ranking, self._k, self._capacity = network, ranking, k, capacity
        self._pass_seconds, self._seconds = pass_seconds, 0.0
        self.forget()

    def follow(self, token: int, state: Tensor | None) -> None:
        """One more token is certain; `state` `[1, layers, hidden_size]` is of the token before, if it is read."""
        if state is None and self.reads_states:
            self.forget()
        else:
            self._waiting.append((token, state))

    def is_worth(self, chance: float) -> bool:
        """Whether to name what follows some nodes costs less than it may save; `chance` is the sum of their paths'."""
        seconds = self._pass_seconds()
        return not seconds or chance * _GAIN * seconds > self._seconds

    def guesses(self, paths: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Sequence[Sequence[Guess]]:
        """What may follow each of some nodes: the last guess of a path behind the newest certain token, at the end of
        its text.

        Nothing is named before there is a token to read.
        """
        began, is_new = time.perf_counter(), self._begins
        self._read()
        began = time.perf_counter() if is_new else began  # no other draft has a whole prompt to read
        if not self._has_read:
            return [()] * len(paths)
        named = self._ranking.guesses(self._network.draft(paths), texts, self._k)
        seconds = time.perf_counter() - began
        self._seconds += (_WEIGHT if self._seconds else 1.0) * (seconds - self._seconds)
        return named

    def release(self) -> None:
        """Free the memory: the request is over."""
        self._network.begin(0)
        self.forget()

    def forget(self) -> None:
        """The text begins anew, or goes on behind a gap."""
        self._begins, self._has_read = True, False
        self._waiting: list[tuple[int, Tensor | None]] = []

    def _read(self) -> None:
        """Have the network follow the tokens that wait."""
        if not self._waiting:
            return
        if self._begins:
            self._network.begin(self._capacity)
            self._begins = False
        tokens = [token for token, _ in self._waiting]
        states = [state for _, state in self._waiting if state is not None] if self.reads_states else []
        self._network.follow(tokens, cat(states) if states else Tensor())
        self._waiting, self._has_read = [], True
