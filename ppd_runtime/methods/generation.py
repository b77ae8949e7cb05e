"""Requests from the user's side: a turn, events with their text, and a result with statistics for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields
from typing import Protocol

from ppd_runtime.client.ending import CANCELLED, TIMEOUT, Ending
from ppd_runtime.methods.request_queue import Place, RequestQueue
from ppd_runtime.methods.steps import Decoder, Step, Steps, Totals, lengths_of_runs, split_where_recomputed
from ppd_runtime.results import GenerationResult, Live, PathStats, Stats, TokenEvent
from ppd_runtime.sampling.logprobs import TokenLogprobs
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import check_int
from ppd_runtime.text import TextStream

_MOST_TEXTS = 1024


class QueuedDecoder(Decoder, Protocol):
    """Decodes requests at their turns."""

    queue: RequestQueue

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        """Predicted latency as a share of ordinary decoding's."""


class Generation(Iterator[TokenEvent]):
    """A generation in progress: iterate over its events, then read `result`. Closing or dropping it early cancels it.

    Its turn comes with the first event that is asked for; with `line_up`, earlier.
    """

    place: Place | None = None
    """Its place in the queue; None until it has one."""

    def __init__(
        self,
        decoder: QueuedDecoder,
        prompt_ids: list[int],
        params: SamplingParams,
        live: int = Live.TOKENS,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._decoder, self._prompt_ids, self._params, self._shown = decoder, prompt_ids, params, shown
        self._busy = self._over = False
        self._steps: Steps | None = None
        self.live = live
        """A `Live`; if tokens are not read as they come, the text is made at the end."""
        self.prompt_tokens = len(prompt_ids)
        self.most_tokens = self.prompt_tokens + params.max_new_tokens
        """Prompt tokens and those it may get."""
        self._ending = Ending(params.timeout_s)
        self._text = self._empty_text()
        self._events: list[TokenEvent] = []
        self._of_prompt: list[TokenLogprobs] = []
        self._result: GenerationResult | None = None

    def __next__(self) -> TokenEvent:
        self._check_idle()
        if self._over:
            raise StopIteration
        self._busy = True
        try:
            step = self._next_step()
            if isinstance(step, Step):
                return self._event(step)
            self._result = self._finished(step)
        except BaseException:
            self._end()
            raise
        finally:
            self._busy = False
        self._end()
        raise StopIteration

    def __del__(self) -> None:
        self.close()

    @property
    def result(self) -> GenerationResult:
        """The finished generation; raises RuntimeError while events are left."""
        if self._result is None:
            raise RuntimeError("the generation has not finished: iterate over its events first")
        return self._result

    def line_up(self, at_turn: Callable[[], object]) -> None:
        """Wait without a thread: `at_turn` is called once, in any thread, when events no longer wait for a turn."""
        self.place = self.place or self._decoder.queue.join()[0]
        self._decoder.queue.line_up(self.place, self.most_tokens, self._ending, at_turn)

    @property
    def has_turn(self) -> bool:
        """Whether its turn has come."""
        return self.place is not None and self.place.runs_since is not None

    def cancel(self) -> None:
        """End within a token, from any thread: the finish reason is "cancelled", with the text so far."""
        self._ending.cancel()
        if self.place is not None:
            self._decoder.queue.cancel(self.place)

    def close(self) -> None:
        """Cancel the generation, if it has not finished, and free the runtime for the next call.

        Raises:
            ValueError: another thread waits for its next event.
        """
        self._check_idle()
        if not self._over:
            self._end()

    def _check_idle(self) -> None:
        if self._busy:
            raise ValueError("another call waits for the generation's next event: cancel() ends it from any thread")

    def _end(self) -> None:
        self._over = True
        try:
            if self._steps is not None:
                self._steps.close()
        finally:
            if self.place is not None:
                self._decoder.queue.leave(self.place)

    def _next_step(self) -> Step | Totals:
        if self._steps is None:
            if self.place is None:
                self.place = self._decoder.queue.join()[0]
                self._decoder.queue.wait(self.place, self.most_tokens, self._ending)
            if not self.has_turn:
                return Totals(CANCELLED, PathStats())
            self._steps = split_where_recomputed(self._decoder, self._prompt_ids, self._params, self.live, self._ending)
        return next(self._steps)

    def _event(self, step: Step) -> TokenEvent:
        piece = self._text.push(step.token_id) + (self._text.finish() if step.last else "") if self.live else ""
        *before, own = step.logprobs or (None,)
        self._of_prompt += before
        position = self.prompt_tokens + len(self._events)
        event = TokenEvent(step.token_id, piece, position, step.hit, own, step.news)
        self._events.append(event)
        return event

    def _empty_text(self) -> TextStream:
        return TextStream(self._decoder.tokenizer, self._params.stop, self._shown)

    def _whole_text(self, reason: str) -> str:
        if self.live and reason not in (CANCELLED, TIMEOUT):  # then the last event may not have been final
            return "".join(event.text for event in self._events)
        text = self._empty_text()
        return "".join([*(text.push(event.token_id) for event in self._events), text.finish()])

    def _finished(self, totals: Totals) -> GenerationResult:
        events, asked = self._events, self._params.logprobs is not None
        return GenerationResult(
            text=self._whole_text(totals.finish_reason),
            token_ids=tuple(event.token_id for event in events),
            prompt_ids=tuple(self._prompt_ids),
            finish_reason=totals.finish_reason,
            stats=self._stats([event.hit for event in events], totals),
            trace=totals.trace,
            news=totals.news,
            logprobs=tuple(event.logprobs for event in events if event.logprobs) if asked else None,
            prompt_logprobs=tuple(self._of_prompt) if self._params.prompt_logprobs else None,
            seed=self._params.seed,
        )

    def _stats(self, verdicts: Sequence[bool | None], totals: Totals) -> Stats:
        hits = [hit for hit in verdicts if hit is not None]
        if totals.first_boundary:
            *named, never = totals.first_boundary
            hits = [True] * sum(named) + [False] * never
        path = totals.path
        rate = path.foreseen / path.asked if path.asked else sum(hits) / len(hits) if hits else None
        return Stats(
            prompt_tokens=self.prompt_tokens,
            new_tokens=len(verdicts),
            hits=sum(hits),
            misses=len(hits) - sum(hits),
            run_lengths=totals.run_lengths or lengths_of_runs(verdicts),
            predicted_ratio=self._decoder._predicted_ratio(rate, len(verdicts), totals),
            sub_layer_passes=totals.sub_layer_passes,
            sub_coherence_layer_passes=totals.sub_coherence_layer_passes,
            first_boundary=totals.first_boundary,
            layout=totals.layout,
            outside_guess_vocab=totals.outside_guess_vocab,
            speculation=totals.speculation,
            **{field.name: getattr(totals.path, field.name) for field in fields(totals.path)},
        )


def with_seeds(params: SamplingParams, n: int | None) -> list[SamplingParams]:
    """The settings of `n` texts: each further one has the next seed; None is one text."""
    if n is None:
        return [params]
    check_int("n", n, 1, _MOST_TEXTS)
    params = params.settled()
    return [params.with_later_seed(choice) for choice in range(n)]


def as_they_end(requests: Sequence[Generation], at_once: int) -> Iterator[int]:
    """Run every request, `at_once` at a time, and give each one's number when it has ended.

    If one fails, or Ctrl-C comes, the others are cancelled.
    """
    if at_once == 1 or len(requests) == 1:
        for number, request in enumerate(requests):
            exhaust(request)
            yield number
        return
    with ThreadPoolExecutor(min(at_once, len(requests)), "ppd-request") as pool:
        numbers = {pool.submit(exhaust, request): number for number, request in enumerate(requests)}
        try:
            for ended in as_completed(numbers):
                ended.result()
                yield numbers[ended]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for request in requests:
                request.cancel()
            raise


def exhaust(events: Iterable[object]) -> None:
    """Run it to its end."""
    for _ in events:
        pass
