"""Logits → next token: logits processors, transformers' own if it has them, then noise keyed by (seed, position).

`argmax(processed_logits + noise)` is an exact sample of the processed distribution (the Gumbel-max trick). Whoever
predicts the token early adds the same noise, so early and final choice agree far more often than two independent
draws would, and a run can be repeated by any process with any layout.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ppd_runtime.request_error import RequestError, no_numbers, no_scores
from ppd_runtime.sampling.constraint import Constraint
from ppd_runtime.sampling.gpu_choice import DOUBT, LEAST_SURE, GpuChoices, UnreadLogits
from ppd_runtime.sampling.highest import NO_TOKEN, best, best_with_values, choice, choices, first_highest, with_chances
from ppd_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from ppd_runtime.sampling.noise import gumbel_noise
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.score_changes import score_changes
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind

_FILTERED = 1e6  # how far a filtered token ranks behind every token that top-k and top-p keep
_MOST_NOISE = 32  # positions whose noise is kept: drafts and their verification ask for the same


class Sampler:
    """Chooses tokens for one request; a pure function of logits, the tokens before them, and the parameters.

    Args:
        params: how.
        prompt_size: the prompt's tokens at the beginning of every history; counts of new tokens include those after
            them and the prompt's last `params.num_generated` ones.
        eos_token_ids: the model's, which end a text.
        constraint: the request's, if `params` say what the text has to look like.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_size: int = 0,
        eos_token_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        assert (params.form is None) == (constraint is None), "a request's form has a constraint"
        self.params, self.constraint = params, constraint
        self._changes = score_changes(params, prompt_size, eos_token_ids)
        self.plain = params.greedy and not self._changes and constraint is None
        """Whether the choice is simply the highest logit."""
        self._by_numpy = not params.greedy and not self._changes
        self.scale = 1.0 if params.greedy else params.temperature
        """Scores times this have the chances as softmax."""
        self._noted: deque[tuple[TokenLogprobs, ...]] = deque()
        self._of_prompt: list[TokenLogprobs] = []
        self._noise_at = lru_cache(_MOST_NOISE)(partial(gumbel_noise, params.seed))
        self._there = GpuChoices(params)
        self._top_k, self._min_p = params.top_k or 0, params.min_p or 0.0
        self._top_p = 1.0 if params.top_p is None else params.top_p
        self._temperature = LogitsProcessorList()
        self._filters = LogitsProcessorList()
        if self.scale != 1:
            self._temperature.append(TemperatureLogitsWarper(float(self.scale)))
        if self._top_k:
            self._filters.append(TopKLogitsWarper(self._top_k))
        if self._top_p < 1:
            self._filters.append(TopPLogitsWarper(float(self._top_p)))
        if self._min_p:
            self._filters.append(MinPLogitsWarper(float(self._min_p)))

    def choose(self, logits: Tensor | UnreadLogits, history: Sequence[int]) -> int:
        """The token that follows `history` (prompt and tokens so far), from full depth's `logits`, `[vocab_size]`.

        Raises:
            RequestError: if no number says which, or a processor of the request's fails.
        """
        if isinstance(logits, UnreadLogits):
            asks = self._reads_none and self.params.logprobs is None
            found = self._there.choice(logits, len(history)) if asks else None
            if found is not None:
                return found
            logits = _on_the_cpu(logits.read()) if asks else logits.read()  # the CPU decides what is in doubt
        token = self._chosen(logits, history)
        if token == NO_TOKEN:
            raise self.no_choice(logits, len(history))
        self.note(logits, token, len(history))
        return token

    def no_choice(self, logits: Tensor, position: int) -> RequestError:
        """The error if no token can be chosen for a position, by the model's logits or by the changed ones."""
        return no_numbers(position) if choice(logits) == NO_TOKEN else no_scores(position)

    def note(self, logits: Tensor, token: int, position: int) -> None:
        """Keep the log-probabilities of a token that was chosen for a position, if they are asked for."""
        if self.params.logprobs is not None:
            own = token_logprobs(logits, token, self.params.logprobs, position)
            self._noted.append((*self._of_prompt, own))
            self._of_prompt = []

    def note_prompt(
        self, logits_of: Callable[[Tensor], Tensor], hidden: Tensor, prompt_ids: Sequence[int], position: int = 0
    ) -> None:
        """Keep the prompt's log-probabilities for its first new token, if they are asked for.

        Args:
            logits_of: final norm and head over one hidden state, as for a chosen token.
            hidden: `[1, tokens, hidden_size]` after all layers, of the prompt's chunk at `position`, in order; the
                first one is a new beginning.
        """
        if not self.params.prompt_logprobs:
            return
        if position == 0:
            self._of_prompt = []
        most = self.params.logprobs or 0
        for row, token in enumerate(prompt_ids[position + 1 : position + 1 + hidden.shape[1]]):
            logits = logits_of(hidden[:, row : row + 1])
            self._of_prompt.append(token_logprobs(logits, token, most, position + 1 + row))

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Take the oldest log-probabilities not yet taken: the prompt's, then a token's; empty if not asked for."""
        return self._noted.popleft() if self._noted else ()

    def _chosen(self, logits: Tensor, history: Sequence[int]) -> int:
        """The token, or NO_TOKEN."""
        if self.plain:
            return choice(logits)
        if self._stays_there(logits):
            token = self._there.choice(logits, len(history))
            if token is not None:
                return token
        logits = _on_the_cpu(logits)
        if self._by_numpy:
            token = self._choice_without_doubt(self._constrained(logits, history).numpy(), len(history))
            if token is not None:
                return token
        return self._choose(logits, history)

    def _choice_without_doubt(self, logits: np.ndarray, position: int) -> int | None:
        """The choice of `_choose`, if the filters surely keep the choice without them; else None.

        Checking one token is quick. Finding all kept tokens takes a sort and most of a choice's time.
        """
        scaled = self._scaled(logits)
        token = int((scaled + self._noise_at(position, len(logits))).argmax())
        score = scaled[token]
        if not np.isfinite(score) or (self._top_k and self._top_p < 1):
            return None
        if self._top_k and not np.count_nonzero(scaled > score) < self._top_k:
            return None
        if self._min_p and not np.exp(score - scaled.max()) > max(self._min_p * (1 + DOUBT), LEAST_SURE):
            return None
        if self._top_p < 1:
            weights = np.exp(scaled - scaled.max())
            up_to_it = weights[scaled < score].sum() + weights[token]
            if not up_to_it > (1 - self._top_p + DOUBT) * weights.sum():
                return None
        return token

    def _stays_there(self, logits: Tensor) -> bool:
        """Whether logits lie on a GPU and need not be read there."""
        return not logits.is_cpu and self._reads_none

    @property
    def _reads_none(self) -> bool:
        """Whether logits that a GPU has need not be read there: nothing but noise and filters changes them."""
        return (self.plain or self._by_numpy) and self.constraint is None

    @torch.inference_mode()
    def _choose(self, logits: Tensor, history: Sequence[int]) -> int:
        if self.params.greedy:
            return self._checked(self._changed(logits, history), logits)
        scores = self._temperature(None, self._changed(logits, history)[None])
        noise, kept = self.noise(len(history), 1, logits.shape[-1]), self._filters(None, scores)[0]
        return self._checked(kept + noise[0], logits)

    def _checked(self, scores: Tensor, logits: Tensor) -> int:
        """Where scores are highest, or NO_TOKEN.

        A length penalty that overflows makes an end token's score infinitely high, and `generate` chooses it.
        """
        token = choice(scores)
        if token == NO_TOKEN and choice(logits) != NO_TOKEN and not self.params.logits_processors:
            highest = first_highest(scores)
            return highest if scores[highest] == math.inf else NO_TOKEN
        return token

    def choices(self, logits: Tensor) -> list[int] | None:
        """Like `choose`, after each of several tokens at once, from `[tokens, vocab_size]`, or NO_TOKEN; None if
        earlier tokens matter, or each has to be noted."""
        if not self.plain or self.params.logprobs is not None:
            return None
        return choices(logits)

    def rank(self, logits: Tensor | UnreadLogits, history: Sequence[int], k: int) -> list[int]:
        """The k likeliest choices, best first, from an exit's `logits`; tokens that the filters drop come last."""
        if isinstance(logits, UnreadLogits):
            return [token for token, _ in self.guesses(logits, [history], k)[0]]
        return best(self.noisy_scores(logits, history), k)

    def guesses(
        self, logits: Tensor | UnreadLogits, histories: Sequence[Sequence[int]], k: int
    ) -> list[list[tuple[int, float]]]:
        """Like `rank`, after each of several texts; each token with its chance (see `chances`).

        `logits` are `[texts, vocab_size]`: PyTorch is called once for all texts.
        """
        if isinstance(logits, UnreadLogits):
            if self._reads_none and not self._filters:
                return self._there.likeliest(logits, [*map(len, histories)], k)
            logits = logits.read().view(len(histories), -1)
        return self.ranked(logits if self.plain else self._noisy_rows(logits, histories), k)

    def ranked(self, scores: Tensor, k: int) -> list[list[tuple[int, float]]]:
        """The k highest of each row of noisy scores, best first, each with its chance."""
        return with_chances(*best_with_values(scores, self.chances(scores), k))

    def noisy_scores(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """The scores that choose the token after `history`, `[vocab_size]`: the argmax is the likeliest choice."""
        return logits if self.plain else self._noisy_rows(logits[None], [history])[0]

    def _noisy_rows(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        """`[texts, vocab_size]`, like the logits, with one call for all texts instead of one each."""
        if self._stays_there(logits) and not self._filters:
            return self._there.noisy(logits, [*map(len, histories)])
        logits = _on_the_cpu(logits)
        if not self._by_numpy:
            return torch.stack([self._noisy_scores(row, text) for row, text in zip(logits, histories, strict=True)])
        if self.constraint is not None:
            logits = torch.stack([self._guessed(row, text) for row, text in zip(logits, histories, strict=True)])
        return self._noisy_by_numpy(logits, [self._noise_at(len(text), logits.shape[-1]) for text in histories])

    def scores_among(self, logits: Tensor, positions: Sequence[int], tokens: np.ndarray, size: int) -> Tensor | None:
        """Noisy scores if a vocabulary of this size had only these tokens, `[positions, len(tokens)]` like the logits;
        None if earlier tokens matter.
        """
        if self.plain or not self._by_numpy or self.constraint is not None:
            return logits if self.plain else None
        noise = [self._noise_at(position, size)[tokens] for position in positions]
        return self._noisy_by_numpy(_on_the_cpu(logits), noise)

    def _noisy_by_numpy(self, logits: Tensor, noise: Sequence[np.ndarray]) -> Tensor:
        scaled = self._scaled(logits.numpy())
        noisy = scaled + (noise[0] if len(noise) == 1 else np.stack(noise))
        if self._filters:
            for of_text, its_scaled in zip(noisy, scaled, strict=True):
                of_text[its_scaled < self._least_kept(its_scaled)] -= _FILTERED
        return torch.from_numpy(noisy)

    @torch.inference_mode()
    def _noisy_scores(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        changed = self._guessed(logits, history)
        if self.params.greedy:
            return changed
        noise = self.noise(len(history), 1, logits.shape[-1])
        return self.scores(changed[None], noise)[0]

    def chances(self, scores: Tensor) -> Tensor:
        """How likely each token is to be full depth's choice, from an exit's `noisy_scores`, `[vocab_size]` like them.

        With shared noise a sampled choice is a greedy one among `logits + temperature * noise`: full depth adds the
        same noise, and its logits differ from the exit's by as much at any temperature. So the softmax, a greedy
        draft's measure, is of these. It is exact if the logits differ by independent standard Gumbel numbers.
        """
        return (scores if self.scale == 1 else self.scale * scores).softmax(-1)

    def likeliest(self, scores: Tensor) -> tuple[int, float]:
        """The token with the highest of the `chances`, and its chance."""
        if not scores.is_cpu:
            chances = self.chances(scores)
            token = int(scores.argmax())
            return token, float(chances[token])
        numbers = scores.numpy()
        token = int(numbers.argmax())
        with np.errstate(invalid="ignore"):  # if a score is infinite, there is no telling
            behind = numbers - numbers[token]
        return token, 1 / float(np.exp(behind if self.scale == 1 else self.scale * behind).sum())

    def distribution(self, logits: Tensor, history: Sequence[int], guessed: bool = False) -> Tensor:
        """`[vocab_size]` float64 probabilities of the tokens that may follow `history`; temperatures above 0 only.

        All are NaN if a logit is NaN or infinitely high. `guessed`: for logits that decide nothing.
        """
        change = self._guessed if guessed else self._changed
        scores = self._temperature(None, change(_on_the_cpu(logits), history)[None])
        return self._filters(None, scores)[0].softmax(-1, dtype=torch.float64)

    def scores(self, logits: Tensor, noise: Tensor) -> Tensor:
        """The scores that `rank` sorts by above temperature 0, for many positions: `[rows, vocab_size]`, like both.

        `logits` went through `changed`; `noise` is that of the rows' positions.
        """
        scaled = self._temperature(None, logits)
        noisy = scaled + noise
        if self._filters:
            noisy = noisy - _FILTERED * torch.isneginf(self._filters(None, scaled))
        return noisy

    def noise(self, position: int, rows: int, vocab_size: int) -> Tensor:
        """`[rows, vocab_size]` shared noise of `position` and those after it, on the CPU."""
        noise = [gumbel_noise(self.params.seed, position + i, vocab_size) for i in range(rows)]
        return torch.from_numpy(np.stack(noise))

    def _scaled(self, logits: np.ndarray) -> np.ndarray:
        """Scaled by the temperature, to the last bit like transformers' processor."""
        return logits if self.scale == 1 else logits / np.float32(self.scale)

    def _least_kept(self, scaled: np.ndarray) -> float:
        """The lowest kept score of the filters; of equal scores at the border they may drop some."""
        ranked = np.sort(scaled)
        if self._top_k:
            ranked = ranked[-self._top_k :]
        with np.errstate(invalid="ignore"):  # nothing is asked of NaN
            up_to_each = np.cumsum(np.exp(ranked - ranked[-1]))
        border = np.searchsorted(up_to_each, (1 - self._top_p) * up_to_each[-1], side="right")
        lowest = float(ranked[min(border, len(ranked) - 1)])
        return max(lowest, float(ranked[-1]) + math.log(self._min_p)) if self._min_p else lowest

    def changed(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
        """Logits after all but temperature and filters, `[texts, vocab_size]` like `logits`."""
        if not self._changes and self.constraint is None:
            return logits
        return torch.stack([self._changed(row, text) for row, text in zip(logits, histories, strict=True)])

    def _changed(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """The `changed` logits of one text, `[vocab_size]`."""
        if not self._changes:
            return self._constrained(logits, history)
        text = np.fromiter(history, np.int64, len(history))  # for long texts a tensor takes nine times as long
        input_ids, scores = torch.from_numpy(text).to(logits.device)[None], logits[None]
        with np.errstate(over="ignore"):  # a length penalty's power may become infinite
            for change in self._changes:
                scores = change(input_ids, scores)
        return self._constrained(scores[0], history)

    def _constrained(self, scores: Tensor, history: Sequence[int]) -> Tensor:
        """Scores of what the request's form allows, which is applied last: no other setting makes a text break it."""
        return scores if self.constraint is None else self.constraint.masked(scores, history)

    def _guessed(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """Like `_changed`, for a guess: a processor may fail on its text, which may never come."""
        try:
            return self._changed(logits, history)
        except RequestError:
            return logits


class TimedSampler(Sampler):
    """A sampler whose choices are spans of a process' time."""

    def __init__(
        self,
        params: SamplingParams,
        recorder: Recorder,
        prompt_size: int = 0,
        eos_token_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(params, prompt_size, eos_token_ids, constraint)
        self._recorder = recorder

    def choose(self, logits: Tensor | UnreadLogits, history: Sequence[int]) -> int:
        """Implements `Sampler.choose`."""
        began = time.perf_counter()
        token = super().choose(logits, history)
        self._note_choice(began, logits, len(history), token)
        return token

    def rank(self, logits: Tensor | UnreadLogits, history: Sequence[int], k: int) -> list[int]:
        """Implements `Sampler.rank`."""
        began = time.perf_counter()
        tokens = super().rank(logits, history, k)
        self._note_choice(began, logits, len(history), tokens[0])
        return tokens

    def _note_choice(self, began: float, logits: Tensor | UnreadLogits, position: int, token: int) -> None:
        if isinstance(logits, UnreadLogits):
            began = self._recorder.ended  # they were computed meanwhile, which has a span of its own
        self._recorder.note(Kind.CHOOSE, began, time.perf_counter(), position, token)


def _on_the_cpu(logits: Tensor) -> Tensor:
    """Move logits to the CPU, which decides where sums have to be exact: on GPUs a running sum, such as top-p's, may
    differ each time, and so may the token at its border.
    """
    return logits if logits.is_cpu else logits.cpu()
