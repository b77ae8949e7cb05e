"""The steps of a request. A request is split in two if transformers' `generate` would read its long text again."""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol, TypeAlias

from transformers import PreTrainedTokenizerBase

from ppd_runtime.client.ending import Ending
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.results import NOTHING_NEW, News, PathStats, Speculation, run_lengths
from ppd_runtime.sampling.logprobs import TokenLogprobs
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import Layout
from ppd_runtime.text import StopRule
from ppd_runtime.tracing.trace import Trace


@dataclass(frozen=True)
class Step:
    """A new token, whether an early candidate was right about it (None: nothing to say), and whether it is the last."""

    token_id: int
    hit: bool | None
    last: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    """The token's, if they are asked for; the first step may have the prompt's before it."""
    news: News = NOTHING_NEW


@dataclass(frozen=True)
class Totals:
    """What a way of decoding counted and timed; see `Stats` for the meaning and units."""

    finish_reason: str
    path: PathStats
    sub_layer_passes: tuple[int, ...] = ()
    sub_coherence_layer_passes: tuple[int, ...] = ()
    trace: Trace | None = None
    speculation: Speculation | None = None
    run_lengths: tuple[int, ...] | None = None
    """Lengths of the runs; None: hits and misses tell them."""
    first_boundary: tuple[int, ...] = ()
    """See `Stats`."""
    layout: Layout | None = None
    outside_guess_vocab: int = 0
    news: News = NOTHING_NEW
    """What has come since the last step."""

    def and_then(self, later: "Totals") -> "Totals":
        """The totals of both parts of a request."""
        return Totals(
            finish_reason=later.finish_reason,
            path=self.path.and_then(later.path),
            sub_layer_passes=_sums(self.sub_layer_passes, later.sub_layer_passes),
            sub_coherence_layer_passes=_sums(self.sub_coherence_layer_passes, later.sub_coherence_layer_passes),
            trace=self.trace and later.trace and self.trace.and_then(later.trace),
            speculation=self.speculation and later.speculation and self.speculation.and_then(later.speculation),
            run_lengths=self.run_lengths and later.run_lengths and (*self.run_lengths, *later.run_lengths),
            first_boundary=_sums(self.first_boundary, later.first_boundary),
            layout=later.layout,
            outside_guess_vocab=self.outside_guess_vocab + later.outside_guess_vocab,
            news=self.news.and_then(later.news),
        )


Steps: TypeAlias = Generator[Step | Totals, None, None]
"""Each new token of a request, then the totals; closing it ends the request."""


class Decoder(Protocol):
    """Makes the steps of a request, or of a part of one."""

    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase

    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: int, ending: Ending) -> Steps:
        """Yield each new token, then the totals; `live` is a `Live`."""


def split_where_recomputed(
    decoder: Decoder, prompt_ids: list[int], params: SamplingParams, live: int, ending: Ending
) -> Steps:
    """The steps of a request, then its totals.

    Where transformers' `generate` drops its cache and reads the text again (`ModelInfo.recomputed_at`), so does this:
    the text up to there is the prompt of a second part, in every layout and method alike.
    """
    parts = sizes_of_parts(len(prompt_ids), params.max_new_tokens, decoder.info.recomputed_at)
    if len(parts) == 1:
        return decoder._steps(prompt_ids, params, live, ending)
    return _steps_of_parts(parts, decoder, prompt_ids, params, live, ending)


def _steps_of_parts(
    parts: Sequence[int], decoder: Decoder, prompt_ids: list[int], params: SamplingParams, live: int, ending: Ending
) -> Steps:
    stop = StopRule(params, decoder.info.eos_token_ids, decoder.tokenizer, prompt_ids)
    text = list(prompt_ids)
    before: Totals | None = None
    reason: str | None = None
    for most in parts:
        generated = params.num_generated + len(text) - len(prompt_ids)
        scored = params.prompt_logprobs and len(text) == len(prompt_ids)
        is_last = len(text) + most == len(prompt_ids) + params.max_new_tokens
        part = replace(
            params,
            max_new_tokens=most,
            num_generated=generated,
            prompt_logprobs=scored,
            forced_eos_token_id=params.forced_eos_token_id if is_last else None,
        )
        verdicts: list[bool | None] = []
        with closing(decoder._steps(list(text), part, live, ending)) as steps:
            for step in steps:
                if isinstance(step, Totals):
                    totals = replace(step, run_lengths=step.run_lengths or lengths_of_runs(verdicts))
                    before = before.and_then(totals) if before else totals
                else:
                    text.append(step.token_id)
                    verdicts.append(step.hit)
                    reason = stop.finish_reason(step.token_id)
                    cut_short = step.last and len(verdicts) < most  # cancelled, or out of time
                    yield replace(step, last=reason is not None or cut_short)
        if reason or before is None or before.finish_reason != "length":
            break
        if why := ending.reason():  # before a whole text is read again
            before = replace(before, finish_reason=why)
            break
    if before:
        yield before


def lengths_of_runs(verdicts: Sequence[bool | None]) -> tuple[int, ...]:
    """Tokens between two misses, from each token's `Step.hit`; without guesses each token is a run."""
    hits = [hit for hit in verdicts if hit is not None]
    return run_lengths(hits) if hits else (1,) * len(verdicts)


def sizes_of_parts(prompt_size: int, max_new_tokens: int, recomputed_at: int | None) -> list[int]:
    """New tokens of each part of a request: two if its text grows past `recomputed_at` tokens, else one."""
    first = (recomputed_at or 0) - prompt_size
    return [first, max_new_tokens - first] if 0 < first < max_new_tokens else [max_new_tokens]


def _sums(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(ours, theirs, fillvalue=0))
