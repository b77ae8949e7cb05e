"""Changes of the next token's scores before filters and noise: transformers' own processors in `generate`'s order.

`generate` makes them of settings with the same names, so the bits are the same. It lacks OpenAI's bias and penalties;
they are ours.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.params import LogitsProcessor, SamplingParams


def score_changes(params: SamplingParams, prompt_size: int, eos_token_ids: Iterable[int] = ()) -> list[LogitsProcessor]:
    """The changes that a request asks for, in order.

    Args:
        params: the request's.
        prompt_size: tokens of its prompt, with those that count as generated (`params.num_generated`).
        eos_token_ids: the model's, which end a text.
    """
    size = max(prompt_size - params.num_generated, 0)
    ends = sorted({*(() if params.ignore_eos else (*eos_token_ids, *params.eos_token_ids)), *params.stop_token_ids})
    own = [*_likelier(params, size), *_length(params, size, ends), *_forced(params, prompt_size, size, ends)]
    given = {type(processor): processor for processor in reversed(params.logits_processors)}
    taken: list[Any] = [given.get(type(change), change) for change in own]  # a request's own processor has priority
    if params.presence_penalty or params.frequency_penalty:
        taken.append(partial(_without_repeated, params, size))
    taken += [processor for processor in params.logits_processors if processor not in taken]
    mine = [partial(_checked, change) if change in params.logits_processors else change for change in taken]
    return [*_biased(params), *mine, *([LogitNormalization()] if params.renormalize_logits else [])]


def _biased(params: SamplingParams) -> list[LogitsProcessor]:
    bias = dict(params.logit_bias or ())
    return [SequenceBiasLogitsProcessor({(token,): float(number) for token, number in bias.items()})] if bias else []


def _likelier(params: SamplingParams, size: int) -> list[LogitsProcessor]:
    """What makes tokens likelier or less likely, by the text before them."""
    found: list[LogitsProcessor] = []
    if params.sequence_bias:
        found.append(SequenceBiasLogitsProcessor(dict(params.sequence_bias)))
    if (penalty := params.encoder_repetition_penalty or 1) != 1:
        found.append(_OfThePrompt(partial(EncoderRepetitionPenaltyLogitsProcessor, float(penalty)), size))
    if (penalty := params.repetition_penalty or 1) != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
    if params.no_repeat_ngram_size:
        found.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if ngram := params.encoder_no_repeat_ngram_size:
        found.append(_OfThePrompt(partial(EncoderNoRepeatNGramLogitsProcessor, ngram), size))
    return found


def _length(params: SamplingParams, size: int, ends: list[int]) -> list[LogitsProcessor]:
    """What forbids words, and ends that come too soon."""
    found: list[LogitsProcessor] = []
    if words := [list(word) for word in params.bad_words_ids or () if len(word) > 1 or word[0] not in ends]:
        found.append(NoBadWordsLogitsProcessor(words))
    if ends and params.min_new_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(size, params.min_new_tokens, ends))
    if ends and params.min_length and params.min_new_tokens is None:
        found.append(MinLengthLogitsProcessor(params.min_length, ends))
    return found


def _forced(params: SamplingParams, prompt_size: int, size: int, ends: list[int]) -> list[LogitsProcessor]:
    """What decides by a token's place."""
    found: list[LogitsProcessor] = []
    if params.forced_bos_token_id is not None:
        found.append(ForcedBOSTokenLogitsProcessor(params.forced_bos_token_id))
    if params.forced_eos_token_id:
        found.append(
            ForcedEOSTokenLogitsProcessor(prompt_size + params.max_new_tokens, list(params.forced_eos_token_id))
        )
    if ends and params.exponential_decay_length_penalty:
        start, factor = params.exponential_decay_length_penalty
        decay = start, np.float64(factor)  # its powers become infinite without an error
        found.append(ExponentialDecayLengthPenalty(decay, ends, size))
    if params.suppress_tokens:
        found.append(SuppressTokensLogitsProcessor(list(params.suppress_tokens)))
    if params.begin_suppress_tokens:
        begins_at = size + (size == 1 and params.forced_bos_token_id is not None)
        found.append(SuppressTokensAtBeginLogitsProcessor(list(params.begin_suppress_tokens), begins_at))
    return found


class _OfThePrompt:
    """A processor made from the prompt's tokens, which begin the first text."""

    def __init__(self, make: Callable[[Tensor], LogitsProcessor], size: int) -> None:
        self._make, self._size = make, size
        self._made: LogitsProcessor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._made is None:
            self._made = self._make(input_ids[:, : self._size])
        return self._made(input_ids, scores)


def _without_repeated(params: SamplingParams, size: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Presence and frequency penalty as OpenAI defines them and vLLM computes them, which transformers lacks."""
    counts = torch.bincount(input_ids[0, size:], minlength=scores.shape[-1])
    scores = scores - params.frequency_penalty * counts
    return scores - params.presence_penalty * (counts > 0)


def _checked(processor: LogitsProcessor, input_ids: Tensor, scores: Tensor) -> Tensor:
    """What a request's own processor gives; it may write into its arguments."""
    try:
        found = processor(input_ids.clone(), scores.clone())
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise RequestError(f"logits_processors: {processor!r:.200} raised {raised:.1000}") from error
    if not isinstance(found, Tensor) or found.shape != scores.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RequestError(f"logits_processors: {processor!r:.200} gave {shape}, not scores {list(scores.shape)}")
    return found.to(scores)
