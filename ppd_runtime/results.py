"""What a generation gives back: events while it runs, a result with statistics when it is done."""

from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from ppd_runtime.replies.message import AssistantMessage
from ppd_runtime.sampling.logprobs import TokenLogprobs
from ppd_runtime.settings.layouts import Layout
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tracing.spans import ProcessSpans
from ppd_runtime.tracing.trace import Trace


class Live(IntEnum):
    """What a caller wants to hear while a generation runs."""

    NOTHING = 0
    """Only the result; tokens may come in batches."""
    TOKENS = 1
    """Each token as soon as it is certain."""
    BOUNDARIES = 2
    """With stages, which boundary foresaw each token, too."""
    PASSES = 3
    """Every process's work, too."""


@dataclass(frozen=True)
class News:
    """What became known since the last event; deciding tokens never waits for it."""

    boundaries: tuple[tuple[int, int], ...] = ()
    """Token positions in the staged layout, each with the first boundary that named the token, if asked for
    (`boundaries=True`, `passes=True`): 0 is guesses before layer 1, from repetitions or a drafter; the number of
    stages is none. A token's entry comes before the next token, or soon after; if a first stage was lost, perhaps
    never. The last token has none."""
    spans: tuple[ProcessSpans, ...] = ()
    """Passes through layers, heads and choices of each process, if they were asked for (`passes=True`)."""

    def and_then(self, later: "News") -> "News":
        """Both."""
        return News((*self.boundaries, *later.boundaries), (*self.spans, *later.spans))


NOTHING_NEW = News()


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, as soon as it is certain."""

    token_id: int
    text: str
    """The text that this token adds; empty for a special one, and while a character or a stop text is incomplete."""
    position: int
    """Place in the whole sequence, the prompt's tokens counted, from 0."""
    hit: bool | None
    """Whether an early candidate was this token; None if none was used or asked for (the last token)."""
    logprobs: TokenLogprobs | None = None
    """Its log-probability and the likeliest tokens', if they were asked for."""
    news: News = NOTHING_NEW
    """News about earlier tokens and perhaps this one."""


@dataclass(frozen=True)
class Speculation:
    """Drafting and verifying in one process, an entry for each verification, in order."""

    drafted: tuple[int, ...]
    """Draft steps."""
    accepted: tuple[int, ...]
    """Drafted tokens that stayed."""
    draft_s: float
    """Seconds of the latency in drafting."""
    verify_s: float
    """Seconds in verifying."""
    draft_cost: float
    """c: the layers that a draft step runs, as a share of the model's."""

    def and_then(self, later: "Speculation") -> "Speculation":
        """The counts of both parts of a request."""
        return Speculation(
            (*self.drafted, *later.drafted),
            (*self.accepted, *later.accepted),
            self.draft_s + later.draft_s,
            self.verify_s + later.verify_s,
            later.draft_cost,
        )


_NOTHING = LatencyBreakdown(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class PathStats:
    """What the process that decides the tokens counted and timed; times in seconds, passes in layers times tokens.

    Raises:
        ValueError: for counts below 0.
    """

    latency_s: float = 0.0
    """From the request's arrival at the main process to its last token."""
    time_to_first_token_s: float = 0.0
    stall_s: float = 0.0
    """Latency that the main process spent waiting for sub-processes."""
    main_layer_passes: int = 0
    """Layer passes of the main process on the path of the tokens: d·ℓ − (d − d̄)·hits, the prompt's pass as one."""
    main_recomputed_layer_passes: int = 0
    """Layer passes that the main process spent on entries which no sub-process delivered in time."""
    cached_tokens: int = 0
    """Tokens of the prompt whose entries the last stage had from an earlier prompt."""
    ledger: LatencyBreakdown = _NOTHING
    """Where the latency went."""
    first_token_ledger: LatencyBreakdown = _NOTHING
    """Where the time to the first token went."""
    asked: int = 0
    """New tokens for which the paper's main process asked for candidates, or a single stage had any."""
    foreseen: int = 0
    """The asked tokens that were among the candidates, even if too late for an early start."""
    way_seconds: tuple[float, ...] = ()
    """Seconds a token of one request alone in this run, by way of guessing: none, the text's repetitions, and exit
    heads too; last, of one process of a staged layout. 0 for a way not tried. Empty if guessing is fixed."""
    one_process: bool = False
    """Whether one process of a staged layout decoded, as the others had nothing to save."""

    def __post_init__(self) -> None:
        passes = self.main_layer_passes, self.main_recomputed_layer_passes
        if min(*passes, self.cached_tokens, self.asked, self.foreseen) < 0:
            raise ValueError("layer passes or tokens below 0")

    def and_then(self, later: "PathStats") -> "PathStats":
        """The counts of both parts of a request."""
        return PathStats(
            self.latency_s + later.latency_s,
            self.time_to_first_token_s,
            self.stall_s + later.stall_s,
            self.main_layer_passes + later.main_layer_passes,
            self.main_recomputed_layer_passes + later.main_recomputed_layer_passes,
            self.cached_tokens,
            self.ledger.plus(later.ledger),
            self.first_token_ledger,
            self.asked + later.asked,
            self.foreseen + later.foreseen,
            later.way_seconds,
            self.one_process and later.one_process,
        )


@dataclass(frozen=True, kw_only=True)
class Stats(PathStats):
    """Counts and times of one generation."""

    prompt_tokens: int
    new_tokens: int
    hits: int
    """Tokens whose successor's pass started from a sub-process' work, or that were drafted right."""
    misses: int
    """Tokens for which no candidate was right, none was ready in time, or, in a pause, none was asked for; or whose
    draft was wrong."""
    run_lengths: tuple[int, ...]
    """Tokens between two misses, in order; for a self-speculative method, tokens of the prompt's pass and of each
    verification. They sum to `new_tokens`."""
    sub_layer_passes: tuple[int, ...]
    """Each sub-process' layer passes for candidates: d − d̄ a candidate."""
    sub_coherence_layer_passes: tuple[int, ...]
    """Each sub-process' layer passes to keep its cache coherent; Theorem 4.1 leaves them out."""
    predicted_ratio: float
    """Predicted share of ordinary decoding's latency: by Theorem 4.1 for this request's match rate; for stages, E[J]/N
    of its first boundaries; for one stage, passes a token; for a self-speculative method, by SWIFT's equation 6 for its
    drafts."""
    first_boundary: tuple[int, ...] = ()
    """Counts of tokens that boundary 1, 2, … of the staged layout named first, and last of those that none named; empty
    in other layouts. Tokens named before layer 1 count with boundary 1; a lost first stage loses its
    counts."""
    layout: Layout | None = None
    """How the processes shared the layers, with what was chosen at the start; None if one process decoded."""
    outside_guess_vocab: int = 0
    """New tokens that no boundary could name, since they are not among those of `guess_vocab`."""
    speculation: Speculation | None = None
    """Drafts and verifications of a self-speculative method; None for other ways of decoding."""

    @cached_property
    def match_rate(self) -> float | None:
        """How often one of the candidates was right, in time or not; None if there were none."""
        if self.asked:
            return self.foreseen / self.asked
        compared = self.hits + self.misses
        return self.hits / compared if compared else None

    @cached_property
    def hit_rate(self) -> float | None:
        """Hits among the tokens that could be hits; in the paper's layout late right candidates are misses."""
        compared = self.hits + self.misses
        return self.hits / compared if compared else None

    @cached_property
    def measured_ratio(self) -> float | None:
        """Time a token over that of this run's tokens without guesses; None if no token went without."""
        without, *_, of_one_process = self.way_seconds or (0.0, 0.0)
        alone = of_one_process or without
        return self.time_per_token_s / alone if alone and self.new_tokens > 1 else None

    @cached_property
    def acceptance_rate(self) -> float | None:
        """α: accepted drafts among draft steps; None if nothing was drafted."""
        drafted = sum(self.speculation.drafted) if self.speculation else 0
        return sum(self.speculation.accepted) / drafted if self.speculation and drafted else None

    @cached_property
    def mean_accepted_length(self) -> float:
        """M: new tokens for each full pass of the model, the prompt's among them (SWIFT, appendix B.3)."""
        return self.new_tokens / len(self.run_lengths) if self.speculation else 1.0

    @cached_property
    def compression_rate(self) -> float:
        """CR: tokens for each verification (Kangaroo, equation 1); 1 if there was none."""
        lengths = self._verified_lengths
        return sum(lengths) / len(lengths) if lengths else 1.0

    def ctar(self, window: int) -> float | None:
        """CTAR(w): share of the verifications that gave more than `window` tokens (Kangaroo, equation 2)."""
        lengths = self._verified_lengths
        return sum(length > window for length in lengths) / len(lengths) if lengths else None

    @property
    def _verified_lengths(self) -> tuple[int, ...]:
        return self.run_lengths[1:] if self.speculation else ()

    @cached_property
    def tokens_per_second(self) -> float:
        """New tokens over the whole latency."""
        return self.new_tokens / self.latency_s if self.latency_s else 0.0

    @cached_property
    def time_per_token_s(self) -> float:
        """Mean time of a token after the first; the whole latency if there is only one."""
        if self.new_tokens <= 1:
            return self.latency_s
        return (self.latency_s - self.time_to_first_token_s) / (self.new_tokens - 1)

    @cached_property
    def ledger_per_token(self) -> LatencyBreakdown:
        """Where the mean time of a token after the first went; the whole latency if there is only one."""
        if self.new_tokens <= 1:
            return self.ledger
        return self.ledger.per_token_since(self.first_token_ledger, self.new_tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        """All counts and times, and the rates that follow from them, as JSON values."""
        rates = {
            "match_rate": self.match_rate,
            "hit_rate": self.hit_rate,
            "measured_ratio": self.measured_ratio,
            "tokens_per_second": self.tokens_per_second,
            "time_per_token_s": self.time_per_token_s,
            "ledger_per_token": asdict(self.ledger_per_token),
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "compression_rate": self.compression_rate,
            "ctar": {str(window): self.ctar(window) for window in range(1, 7)},
        }
        return {**_with_lists(asdict(self)), **rates}


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation."""

    text: str
    """The generated text, without the prompt and without the stop text."""
    token_ids: tuple[int, ...]
    """The generated tokens, the one that ended the generation among them."""
    prompt_ids: tuple[int, ...]
    finish_reason: str
    """length, eos (an end token of the model, of the tokenizer in a chat, or of `eos_token_ids`), stop (a stop text, or
    a token of `stop_token_ids`), timeout, or cancelled."""
    stats: Stats
    trace: Trace | None = None
    """What every process did and when, if asked for."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Each generated token's log-probability, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Log-probabilities of the prompt's tokens after its first, if asked for."""
    seed: int = 0
    """The request's seed, given or drawn, which gives the text again."""
    news: News = NOTHING_NEW
    """What came after the last event of a stream."""
    message: AssistantMessage | None = None
    """In a chat, what the text says: the answer, calls of tools, and what the model thought."""

    def to_dict(self) -> dict[str, Any]:
        """All but the trace and the news, as JSON values: `json.dumps` takes it, and `json.loads` gives it back."""
        told = {name: getattr(self, name) for name in ("logprobs", "prompt_logprobs")}
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_ids": list(self.prompt_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
            **({} if self.message is None else {"message": self.message.to_dict()}),
            **{name: [_as_json(asdict(one)) for one in noted] for name, noted in told.items() if noted is not None},
        }


def run_lengths(hits: list[bool]) -> tuple[int, ...]:
    """Tokens between two misses: `hits[i]` says whether token i's successor started early, for all but the last."""
    lengths, current = [], 1
    for hit in hits:
        if hit:
            current += 1
        else:
            lengths.append(current)
            current = 1
    return (*lengths, current)


def _with_lists(values: dict[str, Any]) -> dict[str, Any]:
    """Lists for tuples, as in JSON."""
    return {name: _as_json(value) for name, value in values.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return _with_lists(value)
    return list(value) if isinstance(value, tuple) else value
