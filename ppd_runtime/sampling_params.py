"""How the tokens of one call are chosen, and when it stops: settings, frozen and checked where they are made."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ppd_runtime.checks import check_bool, check_int, check_range, is_text
from ppd_runtime.settings import check_known

if TYPE_CHECKING:
    from torch import Tensor

MOST_STOPS, MOST_STOP_CHARACTERS = 1000, 2**16
MOST_LOGPROBS = 20
_MOST = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # far below, logits divided by it are no longer finite
_MOST_PENALTY = 2.0  # OpenAI's range, and vLLM's
_ADDED = {"added": True}
"""Marks settings that files of earlier versions do not name; see `SamplingParams.as_dict`."""

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""From the tokens so far, `[1, tokens]`, and scores for the next one, `[1, vocab_size]`, to other scores."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one call are chosen and when it stops.

    Scores are changed in the order of transformers' `generate`: repetition penalty, frequency and presence penalty,
    `logits_processors`, temperature, top-k, top-p, min-p.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    temperature: float = 0.0
    """0 is greedy decoding; above it, higher is more random."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0 or -1 is all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that hold this share of the probability, in (0, 1]."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the prompt or text become less likely."""
    seed: int = 0
    """The same seed gives the same text, whatever the layout. It is the key of the shared noise."""
    stop: tuple[str, ...] = ()
    """Text that ends the generation and is not part of it; may be given again."""
    ignore_eos: bool = False
    """Go on after an end-of-text token."""
    min_p: float = field(default=0.0, metadata=_ADDED)
    """Leave out tokens less probable than this share of the likeliest one's probability, in [0, 1]. 0 leaves out none.
    As the other filters, it needs a temperature above 0."""
    presence_penalty: float = field(default=0.0, metadata=_ADDED)
    """Above 0, tokens that were generated before become less likely; in [-2, 2]. It is taken off their scores. As
    OpenAI's and vLLM's, it does not count the prompt's tokens."""
    frequency_penalty: float = field(default=0.0, metadata=_ADDED)
    """Above 0, tokens become less likely the more often they were generated before; in [-2, 2]. It is taken off a
    token's score for each time."""
    stop_token_ids: tuple[int, ...] = field(default=(), metadata=_ADDED)
    """Token that ends the generation; may be given again. It does so with `ignore_eos` too, with the finish reason
    "stop". The token itself is in `token_ids`, and in the text unless it is a special one."""
    timeout_s: float | None = field(default=None, metadata=_ADDED)
    """End after so many seconds with what there is. The finish reason is "timeout" then. They count from when the
    request's turn has come and the workers are there; a pass that has begun, over a long prompt for example, is
    finished. None: as long as it takes."""
    logits_processors: tuple[LogitsProcessor, ...] = field(default=(), metadata=_ADDED)
    """Functions of the tokens so far and of the next one's scores that give other scores. Tokens come as `[1, tokens]`,
    float32 scores as `[1, vocab_size]`; transformers' `LogitsProcessor` objects are such functions. They must give the
    same scores for the same text, for they are applied to guesses too, in several threads. They stay in this process:
    with `PPDRuntime` they need transport="local"."""
    num_generated: int = field(default=0, metadata=_ADDED)
    """So many tokens at the prompt's end count as generated: for a request that goes on with an earlier one."""

    logprobs: int | None = field(default=None, metadata=_ADDED)
    """Give each token's log-probability, and those of so many likeliest tokens, 0 to 20. They are the model's own,
    before temperature, penalties and filters. None: give none."""
    prompt_logprobs: bool = field(default=False, metadata=_ADDED)
    """Give the prompt's tokens' log-probabilities too, with `logprobs`."""

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, _MOST)
        check_int("top_k", self.top_k, -1, _MOST)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        check_int("seed", self.seed, 0, 2**64 - 1)
        temperatures = f"0, or {_LOWEST_TEMPERATURE} or more"
        check_range("temperature", self.temperature, lambda t: t == 0 or t >= _LOWEST_TEMPERATURE, temperatures)
        check_range("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]")
        check_range("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            check_range(name, getattr(self, name), lambda penalty: abs(penalty) <= _MOST_PENALTY, "in [-2, 2]")
        check_range("min_p", self.min_p, lambda p: 0 <= p <= 1, "in [0, 1]")
        if self.timeout_s is not None:
            check_range("timeout_s", self.timeout_s, lambda seconds: seconds > 0, "above 0")
        self._check_stops()
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        check_bool("prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs=True: is for logprobs, give them too, 0 or more")
        check_int("num_generated", self.num_generated, 0, _MOST)
        if not isinstance(self.logits_processors, tuple) or not all(map(callable, self.logits_processors)):
            given = f"{self.logits_processors!r:.200}"
            raise ValueError(f"logits_processors={given}: give a tuple of functions of token ids and scores")

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple):
            raise ValueError(f"stop={self.stop!r:.200}: give a tuple of texts")
        for text in self.stop:
            if not is_text(text, MOST_STOP_CHARACTERS):
                raise ValueError(f"stop={text!r:.200}: give texts of 1 to {MOST_STOP_CHARACTERS} Unicode characters")
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r:.200}: give a tuple of token ids")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, _MOST)
        for name in ("stop", "stop_token_ids"):
            if len(given := getattr(self, name)) > MOST_STOPS:
                raise ValueError(f"{name}={given!r:.100}…: {len(given)} of them, give at most {MOST_STOPS}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0

    def as_dict(self) -> dict[str, Any]:
        """The settings by name, for files that outlive a version: those added later only where they are not default."""
        names = [
            setting.name
            for setting in fields(self)
            if not setting.metadata.get("added") or getattr(self, setting.name) != setting.default
        ]
        return {name: getattr(self, name) for name in names}


SAMPLING_SETTINGS = tuple(setting.name for setting in fields(SamplingParams))
"""The names of `SamplingParams`' settings."""


def sampling_from(params: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
    """The settings of a call, which come as `params` or by name; stops may be lists, and a single one may stand alone.

    Raises:
        ValueError: for both, for a setting that there is not, or one that cannot work.
    """
    check_known("sampling", settings, SAMPLING_SETTINGS)
    if params is None:
        several = {name: _as_tuple(settings[name]) for name in _SEVERAL if name in settings}
        return SamplingParams(**{**settings, **several})
    if settings:
        raise ValueError(f"params and {next(iter(settings))} are both given: give one of them")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params={params!r:.200}: give SamplingParams(...), or settings by name")
    return params


_SEVERAL = ("stop", "stop_token_ids", "logits_processors")


def _as_tuple(given: Any) -> Any:
    """None, one or several as a tuple; what is neither is left for the check to name."""
    if given is None:
        return ()
    if isinstance(given, str | int) or (callable(given) and not isinstance(given, Iterable)):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) else given
