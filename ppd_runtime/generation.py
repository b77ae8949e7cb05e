"""`generate` and `stream`, the same for every way of decoding: checks, text, events, statistics, one call at a time."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from ppd_runtime.config import SamplingParams, stop_texts
from ppd_runtime.models.loading import ModelInfo
from ppd_runtime.results import GenerationResult, Ledger, Speculation, Stats, TokenEvent, run_lengths
from ppd_runtime.text import TextStream
from ppd_runtime.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Self

_TURN_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Step:
    """A new token, whether an early candidate was right about it (None: nothing to say), and whether it is the last."""

    token_id: int
    hit: bool | None
    last: bool


@dataclass(frozen=True)
class Totals:
    """What a way of decoding counted and timed; see `Stats` for the meaning and units."""

    finish_reason: str
    latency_s: float
    time_to_first_token_s: float
    stall_s: float
    ledger: Ledger
    first_token_ledger: Ledger
    main_layer_passes: int
    main_recomputed_layer_passes: int = 0
    sub_layer_passes: tuple[int, ...] = ()
    sub_coherence_layer_passes: tuple[int, ...] = ()
    trace: Trace | None = None
    speculation: Speculation | None = None
    run_lengths: tuple[int, ...] | None = None
    """None: as hits and misses have it."""


class TextGenerator(ABC):
    """Something that continues a prompt."""

    def __init__(self, info: ModelInfo, tokenizer: PreTrainedTokenizerBase) -> None:
        self.info, self.tokenizer = info, tokenizer
        self._turn = threading.Lock()
        self._turn_holder: int | None = None

    def close(self) -> None:  # noqa: B027 (most generators hold nothing)
        """Release what the generator holds; a second call does nothing."""

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype of weights and passes, such as float32; what "auto" came to."""

    @abstractmethod
    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: bool) -> Generator[Step | Totals, None, None]:
        """Yield each new token, then the totals; `live`: each as soon as it is certain."""

    @abstractmethod
    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        """Predicted latency as a share of ordinary decoding's."""

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
    ) -> GenerationResult:
        """Continue a text, or a list of token ids, and wait for the end; see `SamplingParams` for the settings.

        Raises:
            ValueError: for a prompt or setting that cannot work, before anything is sent to a worker.
        """
        params = SamplingParams(
            max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed, stop_texts(stop), ignore_eos
        )
        generation = self.request(prompt, params, live=False)
        for _ in generation:
            pass
        return generation.result

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
    ) -> "Generation":
        """Like `generate`, but gives each token as soon as it is certain; the result is there after the last."""
        params = SamplingParams(
            max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed, stop_texts(stop), ignore_eos
        )
        return self.request(prompt, params)

    def request(self, prompt: str | Sequence[int], params: SamplingParams, live: bool = True) -> "Generation":
        """Check a request; it begins when its first event is asked for. `live`: each token as soon as it is certain."""
        return Generation(self, self._prompt_ids(prompt, params), params, live)

    def _prompt_ids(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(_whole_characters(prompt))
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray):
            token_ids = [_token_id(token, self.info.vocab_size) for token in prompt]
        else:
            raise ValueError(f"prompt={prompt!r:.200}: give a text or a list of token ids")
        if not token_ids:
            raise ValueError("the prompt is empty: give some text, or at least one token id")
        most, wanted = self.info.max_positions, len(token_ids) + params.max_new_tokens
        if most is not None and wanted > most:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and max_new_tokens={params.max_new_tokens} make {wanted}, more than "
                f"the model's {most} positions: shorten the prompt or ask for fewer tokens"
            )
        return token_ids

    def _take_turn(self) -> None:
        if self._turn_holder == threading.get_ident():
            raise RuntimeError("another stream of this runtime is open in this thread: exhaust or close it first")
        if not self._turn.acquire(timeout=_TURN_DEADLINE_S):
            raise TimeoutError(f"another call has held this runtime for {_TURN_DEADLINE_S:.0f} s")
        self._turn_holder = threading.get_ident()

    def _end_turn(self) -> None:
        self._turn_holder = None
        self._turn.release()


class Generation(Iterator[TokenEvent]):
    """A generation in progress: iterate over its events, then read `result`. Closing it early cancels it."""

    def __init__(
        self, generator: TextGenerator, prompt_ids: list[int], params: SamplingParams, live: bool = True
    ) -> None:
        self._outcome: list[GenerationResult] = []
        # The running generator knows nothing of this object: dropped in the middle, it ends at once.
        self._events = _Request(generator, prompt_ids, params, live).events(self._outcome)

    def __next__(self) -> TokenEvent:
        return next(self._events)

    @property
    def result(self) -> GenerationResult:
        """The finished generation; raises RuntimeError while events are left."""
        if not self._outcome:
            raise RuntimeError("the generation has not finished: iterate over its events first")
        return self._outcome[0]

    def close(self) -> None:
        """Cancel the generation, if it has not finished, and give the runtime free for the next call."""
        self._events.close()


class _Request:
    """What one generation is made from."""

    def __init__(self, generator: TextGenerator, prompt_ids: list[int], params: SamplingParams, live: bool) -> None:
        self._generator, self._prompt_ids, self._params = generator, prompt_ids, params
        self._live = live  # where nobody reads along, the text is made at the end

    def events(self, outcome: list[GenerationResult]) -> Generator[TokenEvent, None, None]:
        """Generate; the result joins `outcome` behind the last event."""
        self._generator._take_turn()
        steps = self._generator._steps(self._prompt_ids, self._params, self._live)
        try:
            text = TextStream(self._generator.tokenizer, self._params.stop)
            events: list[TokenEvent] = []
            for step in steps:
                if isinstance(step, Totals):
                    outcome.append(self._finish(events, step))
                    return
                piece = self._piece(text, step) if self._live else ""
                position = len(self._prompt_ids) + len(events)
                events.append(TokenEvent(step.token_id, piece, position, step.hit))
                yield events[-1]
        finally:
            try:
                steps.close()
            finally:
                self._generator._end_turn()

    @staticmethod
    def _piece(text: TextStream, step: Step) -> str:
        return text.push(step.token_id) + (text.finish() if step.last else "")

    def _whole_text(self, events: list[TokenEvent]) -> str:
        if self._live:
            return "".join(event.text for event in events)
        text = TextStream(self._generator.tokenizer, self._params.stop)
        return "".join([*(text.push(event.token_id) for event in events), text.finish()])

    def _finish(self, events: list[TokenEvent], totals: Totals) -> GenerationResult:
        return GenerationResult(
            text=self._whole_text(events),
            token_ids=tuple(event.token_id for event in events),
            prompt_ids=tuple(self._prompt_ids),
            finish_reason=totals.finish_reason,
            stats=self._stats([event.hit for event in events], totals),
            trace=totals.trace,
        )

    def _stats(self, verdicts: list[bool | None], totals: Totals) -> Stats:
        hits = [hit for hit in verdicts if hit is not None]
        rate = sum(hits) / len(hits) if hits else None
        names = [field.name for field in fields(totals) if field.name not in ("finish_reason", "trace", "run_lengths")]
        return Stats(
            prompt_tokens=len(self._prompt_ids),
            new_tokens=len(verdicts),
            hits=sum(hits),
            misses=len(hits) - sum(hits),
            run_lengths=totals.run_lengths or (run_lengths(hits) if hits else (1,) * len(verdicts)),
            predicted_ratio=self._generator._predicted_ratio(rate, len(verdicts), totals),
            **{name: getattr(totals, name) for name in names},
        )


def _whole_characters(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"prompt={text!r:.200}: holds half a character (a lone surrogate), which is no text")
    return text


def _token_id(token: object, vocab_size: int) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise ValueError(f"token id {token!r}: give a text or a list of whole numbers")
    number = int(token.__index__())
    if not 0 <= number < vocab_size:
        raise ValueError(f"token id {number} is outside the vocabulary: choose 0 to {vocab_size - 1}")
    return number
