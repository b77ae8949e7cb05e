"""What a generation gives back: events while it runs, a result with statistics when it is done."""

from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from ppd_runtime.layouts import Layout
from ppd_runtime.logprobs import TokenLogprobs
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
    """And what every process computes."""


@dataclass(frozen=True)
class News:
    """What has become known of a generation since the event before; deciding tokens never waits for it."""

    boundaries: tuple[tuple[int, int], ...] = ()
    """Positions of tokens in the staged layout, each with the boundary that was the first to name it, where that was
    asked for (`boundaries=True`, `passes=True`): 0 is the text's repetitions, the number of stages none. A token's is
    there before the next token, or soon after; of a first stage that was lost, perhaps never. The last has none."""
    spans: tuple[ProcessSpans, ...] = ()
    """Passes through layers, heads and choices of each process, where they were asked for (`passes=True`)."""

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
    """Whether an early candidate was this token; None where none was used or asked for (the last token)."""
    logprobs: TokenLogprobs | None = None
    """Its log-probability and the likeliest tokens', where they were asked for."""
    news: News = NOTHING_NEW
    """Of the pipeline, about earlier tokens and perhaps this one."""


@dataclass(frozen=True)
class Speculation:
    """What drafting and verifying came to in one process, an entry for each verification, in order."""

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
    """Of the latency, what the main process spent waiting for sub-processes."""
    main_layer_passes: int = 0
    """Layer passes of the main process on the path of the tokens: d·ℓ − (d − d̄)·hits, the prompt's pass as one."""
    main_recomputed_layer_passes: int = 0
    """Layer passes that the main process spent on entries which no sub-process delivered in time."""
    cached_tokens: int = 0
    """Tokens of the prompt whose entries the last stage had from an earlier prompt."""
    ledger: LatencyBreakdown = _NOTHING
    """Where the latency went."""
    first_token_ledger: LatencyBreakdown = _NOTHING
    """Of that, where the time to the first token went."""
    asked: int = 0
    """New tokens that the main process of the paper's layout asked for candidates of."""
    foreseen: int = 0
    """Of those, the tokens that were among the candidates, be it too late for their early start."""
    way_seconds: tuple[float, ...] = ()
    """Seconds a token of one request alone in this run, by how it was guessed: not at all, from the text's repetitions,
    by exit heads too; 0 where that was not tried. Empty where guessing is fixed."""

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
    """Tokens between two misses, in order; of a self-speculative method, the tokens that the prompt's pass and each
    verification gave. They sum to `new_tokens`."""
    sub_layer_passes: tuple[int, ...]
    """Each sub-process' layer passes for candidates: d − d̄ a candidate."""
    sub_coherence_layer_passes: tuple[int, ...]
    """Each sub-process' layer passes to keep its cache coherent; Theorem 4.1 leaves them out."""
    predicted_ratio: float
    """Latency as a share of ordinary decoding's that Theorem 4.1 gives for this request's match rate; of stages, E[J]/N
    for its first boundaries; of a self-speculative method, what SWIFT's equation 6 gives for its drafts."""
    first_boundary: tuple[int, ...] = ()
    """Tokens that boundary 1, 2, … of the staged layout was the first to name, and last those that none named; empty in
    other layouts. What the text's repetitions named counts with boundary 1; a first stage that was lost has lost its
    counts."""
    layout: Layout | None = None
    """How the processes shared the layers, with what was chosen at the start; None where one process decoded."""
    outside_guess_vocab: int = 0
    """New tokens that no boundary could name, since they are not among those of `guess_vocab`."""
    speculation: Speculation | None = None
    """Drafts and verifications of a self-speculative method; None for other ways of decoding."""

    @cached_property
    def match_rate(self) -> float | None:
        """How often one of the candidates was right, in time or not; None where there were none."""
        if self.asked:
            return self.foreseen / self.asked
        compared = self.hits + self.misses
        return self.hits / compared if compared else None

    @cached_property
    def hit_rate(self) -> float | None:
        """Hits among the tokens that could be hits; in the paper's layout a right candidate that is late is none."""
        compared = self.hits + self.misses
        return self.hits / compared if compared else None

    @cached_property
    def measured_ratio(self) -> float | None:
        """Time a token as a share of what this run's tokens took without guesses; None where none went without."""
        alone = self.way_seconds[0] if self.way_seconds else 0.0
        return self.time_per_token_s / alone if alone and self.new_tokens > 1 else None

    @cached_property
    def acceptance_rate(self) -> float | None:
        """α: accepted drafts among draft steps; None where nothing was drafted."""
        drafted = sum(self.speculation.drafted) if self.speculation else 0
        return sum(self.speculation.accepted) / drafted if self.speculation and drafted else None

    @cached_property
    def mean_accepted_length(self) -> float:
        """M: new tokens for each full pass of the model, the prompt's among them (SWIFT, appendix B.3)."""
        return self.new_tokens / len(self.run_lengths) if self.speculation else 1.0

    @cached_property
    def compression_rate(self) -> float:
        """CR: tokens for each verification (Kangaroo, equation 1); 1 where there was none."""
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
        """Mean time of a token after the first; the whole latency where there is only one."""
        if self.new_tokens <= 1:
            return self.latency_s
        return (self.latency_s - self.time_to_first_token_s) / (self.new_tokens - 1)

    @cached_property
    def ledger_per_token(self) -> LatencyBreakdown:
        """Where the mean time of a token after the first went; the whole latency where there is only one."""
        if self.new_tokens <= 1:
            return self.ledger
        return self.ledger.per_token_since(self.first_token_ledger, self.new_tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        """All counts and times, and the rates that follow from them, in JSON's values."""
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
    """What every process did and when, where that was asked for."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Each generated token's log-probability, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Those of the prompt's tokens behind its first, where they were asked for."""
    seed: int = 0
    """The request's, with which the text comes again; the one that was drawn where it was by chance."""
    news: News = NOTHING_NEW
    """What came behind the last event of a stream."""

    def to_dict(self) -> dict[str, Any]:
        """All but the trace and the news, in JSON's values: `json.dumps` takes it, and `json.loads` gives it back."""
        told = {name: getattr(self, name) for name in ("logprobs", "prompt_logprobs")}
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_ids": list(self.prompt_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
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
    """Lists for tuples, as JSON gives them back."""
    return {name: _as_json(value) for name, value in values.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return _with_lists(value)
    return list(value) if isinstance(value, tuple) else value
