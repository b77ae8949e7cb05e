"""Exit predictors, which name k candidates for the next token from a hidden state after the exit layer."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.native.drafter import likeliest
from ppd_runtime.models.native.library import is_loaded
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.heads import HeadNetwork
from ppd_runtime.sampling.gpu_choice import UnreadLogits
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind


class ExitHead(Protocol):
    """Names candidates, best first; every sub-process asks its own copy and takes the candidate of its rank."""

    def candidates(self, hidden: Tensor, history: Sequence[int], k: int) -> list[int]:
        """k different tokens that may follow `history`; `hidden` is `[1, 1, hidden_size]`, of its newest token."""
        ...


class BoundaryHead(Protocol):
    """Names what may follow several nodes of a pass; see `pipeline.staged`."""

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """For each of several texts, k tokens that may follow, likeliest first, each with how likely it is.

        `hidden` is `[1, texts, hidden_size]`, of their newest tokens.
        """
        ...


class ShortlistSampler:
    """Ranks the tokens of a shortlist, from their logits alone, as a sampler would if there were no others.

    Args:
        sampler: the request's.
        tokens: the shortlist, ascending.
        vocab_size: the model's.
    """

    def __init__(self, sampler: Sampler, tokens: Sequence[int], vocab_size: int) -> None:
        self._sampler, self._tokens, self._vocab_size = sampler, tokens, vocab_size
        self._places = np.array(tokens)

    def rank(self, logits: Tensor | UnreadLogits, history: Sequence[int], k: int) -> list[int]:
        """Like `Sampler.rank`, from `[len(tokens)]` logits."""
        (guesses,) = self.guesses(logits if isinstance(logits, UnreadLogits) else logits[None], [history], k)
        return [token for token, _ in guesses]

    def guesses(
        self, logits: Tensor | UnreadLogits, histories: Sequence[Sequence[int]], k: int
    ) -> list[list[tuple[int, float]]]:
        """Like `Sampler.guesses`, from `[texts, len(tokens)]` logits."""
        if isinstance(logits, UnreadLogits):
            if self._sampler.plain:
                found = self._sampler.guesses(logits, histories, k)
                return [[(self._tokens[place], chance) for place, chance in row] for row in found]
            logits = logits.read().view(len(histories), -1)
        scores = self._sampler.scores_among(logits, [len(text) for text in histories], self._places, self._vocab_size)
        if scores is not None:
            native = scores.is_cpu and scores.dtype == torch.float32 and is_loaded()
            found = likeliest(scores, k, self._sampler.scale) if native else self._sampler.ranked(scores, k)
            return [[(self._tokens[place], chance) for place, chance in row] for row in found]
        logits = logits.cpu()  # where the sampler wants them; a GPU would be sent the places each time
        whole = logits.new_full((len(logits), self._vocab_size), -math.inf)
        whole[:, torch.from_numpy(self._places)] = logits  # penalties go by tokens' numbers
        return self._sampler.guesses(whole, histories, k)


class ModelHead:
    """The model's own final norm and head, as the paper's untrained rows use them, ranked with the shared noise."""

    def __init__(self, stage: LayerRange, sampler: Sampler | ShortlistSampler) -> None:
        self._stage, self._sampler = stage, sampler

    def candidates(self, hidden: Tensor, history: Sequence[int], k: int) -> list[int]:
        """The k tokens that full depth would be likeliest to choose if it ended here."""
        return self._sampler.rank(self._stage.unread_logits(hidden), history, k)

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """Guess with full depth's head, as if the model ended here."""
        return self.ranked(self._stage.unread_token_logits(hidden), texts, k)

    def ranked(
        self, logits: Tensor | UnreadLogits, texts: Sequence[Sequence[int]], k: int
    ) -> Sequence[Sequence[tuple[int, float]]]:
        """Guesses from logits `[texts, vocab_size]`."""
        return self._sampler.guesses(logits, texts, k)


class TrainedHead:
    """A head trained for the exit layer, as the paper's trained rows use it, ranked with the shared noise.

    Args:
        network: the head.
        sampler: the request's.
        recorder: notes the time of its passes.
        final: the network's norm and head as the stage runs them, if they are compiled.
        stage: runs the network otherwise, which may be recorded.
    """

    def __init__(
        self,
        network: HeadNetwork,
        sampler: Sampler | ShortlistSampler,
        recorder: Recorder | None = None,
        final: Callable[[Tensor], Tensor] | None = None,
        stage: LayerRange | None = None,
    ) -> None:
        self._network, self._sampler, self._recorder = network, sampler, recorder or Recorder()
        self._final = final or network.final
        self._stage = stage if self._final is network.final else None
        self._device = next(network.parameters()).device

    @torch.inference_mode()
    def candidates(self, hidden: Tensor, history: Sequence[int], k: int) -> list[int]:
        """The k tokens that full depth is likeliest to choose, by this head."""
        began = time.perf_counter()
        logits = self._logits(hidden[:, -1:])
        self._recorder.note(Kind.HEAD, began, time.perf_counter())
        return self._sampler.rank(logits if isinstance(logits, UnreadLogits) else logits[-1], history, k)

    @torch.inference_mode()
    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """The `candidates`, each with the head's probability for it."""
        return self._sampler.guesses(self._logits(hidden), texts, k)

    def _logits(self, hidden: Tensor) -> Tensor | UnreadLogits:
        """`[tokens, vocab_size]` of hidden states `[1, tokens, hidden_size]`."""
        if self._stage is not None:
            return self._stage.unread_token_logits(hidden.to(self._device), self._network)
        return self._final(self._network.states(hidden.to(self._device)))[0].float()


@dataclass(frozen=True)
class OracleHead:
    """Is told the right texts beforehand and names the right token with a set probability: for tests and benchmarks.

    Whether it is right at a position, and at which rank, is a function of (seed, position) alone.
    """

    texts: tuple[tuple[int, ...], ...]
    """Token ids of each prompt with its continuation."""
    match_rate: float
    vocab_size: int
    seed: int = 0

    def candidates(self, hidden: Tensor, history: Sequence[int], k: int) -> list[int]:
        """The right token among wrong ones, or k wrong ones."""
        position = len(history)
        right = self._right_token(history)
        rng = np.random.default_rng((self.seed, position))
        named = [(right + 1 + i) % self.vocab_size for i in range(k)]
        if rng.random() < self.match_rate:
            named[int(rng.integers(k))] = right
        return named

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """The `candidates`, all with the same probability."""
        return [[(token, self.match_rate / k) for token in self.candidates(hidden, text, k)] for text in texts]

    def _right_token(self, history: Sequence[int]) -> int:
        known = tuple(history)
        for text in self.texts:
            if len(text) > len(known) and text[: len(known)] == known:
                return text[len(known)]
        return 0
