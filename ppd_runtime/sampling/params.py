"""How the tokens of one call are chosen, and when it stops: settings, frozen and checked where they are made."""

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ppd_runtime.sampling import grammar as forms
from ppd_runtime.sampling.token_lists import MOST_TOKEN_ID, TokenIds, biases, sequence_biases, sequences, token_ids
from ppd_runtime.settings.checks import check_bool, check_int, check_range, is_text
from ppd_runtime.settings.fields import check_known

if TYPE_CHECKING:
    from torch import Tensor

MOST_STOPS, MOST_STOP_CHARACTERS = 1000, 2**16
MOST_LOGPROBS = 20
BY_CHANCE = -1
"""A seed that stands for one by chance."""
_SEEDS_BY_CHANCE = 2**53  # numbers that every JSON reader holds exactly
_MOST = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # far below, logits divided by it are no longer finite: there the highest is chosen
_MOST_NGRAM = 100  # tokens: so many copies of a prompt are made
_MOST_PENALTY = 2.0  # OpenAI's range, and vLLM's
END_TOKENS = ("stop_token_ids", "eos_token_ids")
"""The settings that hold tokens which end a generation."""
_ADDED = {"added": True}
"""Marks settings that files of earlier versions do not name; see `SamplingParams.as_dict`."""

LogitsProcessor = Callable[["Tensor", "Tensor"], "Tensor"]
"""From the tokens so far, `[1, tokens]`, and scores for the next one, `[1, vocab_size]`, to other scores."""

FROM_THE_MODEL = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "renormalize_logits",
)
"""Settings that are the model's where a request says nothing (None): with these names its `generation_config.json` has
them, and transformers' `generate` takes them."""
_PLAIN: Mapping[str, Any] = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
"""What files of earlier versions note where nothing was said."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one call are chosen and when it stops.

    Scores are changed in the order of transformers' `generate`: `logit_bias` first, then what `generate` has a setting
    for, frequency and presence penalty, `logits_processors`, temperature, top-k, top-p, min-p.

    A setting that is None is the model's: what its `generation_config.json` says, as with `generate`, or else as if it
    were not there.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    max_new_tokens: int = 128
    """Tokens to generate at the most."""
    temperature: float = 0.0
    """0 is greedy decoding; above it, higher is more random. Below 0.000001 it is 0."""
    top_k: int | None = None
    """Sample among so many likeliest tokens; 0 or -1 is all. 1 is greedy decoding."""
    top_p: float | None = None
    """Sample among the likeliest tokens that hold this share of the probability, in [0, 1]. 0 is greedy decoding."""
    repetition_penalty: float | None = None
    """Above 1, tokens already in the prompt or text become less likely."""
    seed: int = 0
    """The same seed gives the same text, whatever the layout; -1 is one by chance. It is the key of the shared noise.
    A result tells its seed."""
    stop: tuple[str, ...] = ()
    """Text that ends the generation and is not part of it; may be given again. It matches special tokens as they are
    written, which the text leaves out."""
    ignore_eos: bool = False
    """Go on after an end-of-text token."""
    min_p: float | None = field(default=None, metadata=_ADDED)
    """Leave out tokens less probable than this share of the likeliest one's probability, in [0, 1]. 0 leaves out none,
    1 is greedy decoding. As the other filters, it needs a temperature above 0."""
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
    eos_token_ids: tuple[int, ...] = field(default=(), metadata=_ADDED)
    """Token that ends the generation beside the model's own end-of-text tokens. The finish reason is "eos" then, and
    `ignore_eos` holds for it too. `chat` adds the tokenizer's end token."""

    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = field(default=None, metadata=_ADDED)
    """Biases by token id, such as {464: -100}, in [-100, 100]; each is added to the token's logit before all else."""
    min_new_tokens: int | None = field(default=None, metadata=_ADDED)
    """Before there are so many new tokens, no token that ends a text is chosen. Such tokens are the model's, unless
    `ignore_eos`, and those of `stop_token_ids`."""
    min_length: int | None = field(default=None, metadata=_ADDED)
    """The same with the prompt's tokens counted; of no matter where `min_new_tokens` is given."""
    no_repeat_ngram_size: int | None = field(default=None, metadata=_ADDED)
    """Tokens in a row that are not repeated, neither the text's nor the prompt's, 0 to 100; 0 is none."""
    bad_words_ids: tuple[TokenIds, ...] | None = field(default=None, metadata=_ADDED)
    """Sequences of token ids that are not generated."""
    sequence_bias: tuple[tuple[TokenIds, float], ...] | None = field(default=None, metadata=_ADDED)
    """Biases by sequence of token ids, such as [[[5, 6], -2.0]]; added to the last one's score behind the others."""
    suppress_tokens: TokenIds | None = field(default=None, metadata=_ADDED)
    """Token ids that are not generated."""
    begin_suppress_tokens: TokenIds | None = field(default=None, metadata=_ADDED)
    """Token ids that a text does not begin with."""
    forced_bos_token_id: int | None = field(default=None, metadata=_ADDED)
    """The token that follows a prompt of one token."""
    forced_eos_token_id: TokenIds | None = field(default=None, metadata=_ADDED)
    """Token ids one of which is the last token of `max_new_tokens`."""
    exponential_decay_length_penalty: tuple[int, float] | None = field(default=None, metadata=_ADDED)
    """New tokens, and a factor: behind so many, tokens that end a text become likelier by that factor each time."""
    encoder_repetition_penalty: float | None = field(default=None, metadata=_ADDED)
    """Above 1, the prompt's tokens become likelier."""
    encoder_no_repeat_ngram_size: int | None = field(default=None, metadata=_ADDED)
    """So many tokens in a row of the prompt are not repeated, 0 to 100; 0 turns it off."""
    renormalize_logits: bool | None = field(default=None, metadata=_ADDED)
    """Whether the scores become log-probabilities in the end."""

    schema: str | Mapping[str, Any] | type | None = field(default=None, metadata=_ADDED)
    """The text is JSON that a JSON schema allows. Give a mapping, a JSON text, or a pydantic model class. As with the
    three settings below, of which a request may have one, other tokens are never chosen, and a complete text ends."""
    regex: str | None = field(default=None, metadata=_ADDED)
    """The whole text matches this regular expression, in the syntax of Rust's regex package."""
    choice: tuple[str, ...] | None = field(default=None, metadata=_ADDED)
    """The text is this one; give it again for each text that it may be."""
    grammar: str | None = field(default=None, metadata=_ADDED)
    """The text is one of a grammar's, in Lark's syntax as llguidance takes it."""

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, _MOST)
        check_int("seed", self.seed, BY_CHANCE, 2**64 - 1)
        self._check_sampling()
        self._check_changes()
        self._take_token_lists()
        if self.timeout_s is not None:
            check_range("timeout_s", self.timeout_s, lambda seconds: seconds > 0, "above 0")
        self._check_stops()
        check_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        check_bool("prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs and self.logprobs is None:
            raise ValueError("prompt_logprobs=True: is for logprobs, give them too, 0 or more")
        check_int("num_generated", self.num_generated, 0, _MOST)
        if not isinstance(self.logits_processors, tuple) or not all(map(callable, self.logits_processors)):
            given = f"{self.logits_processors!r:.200}"
            raise ValueError(f"logits_processors={given}: give a tuple of functions of token ids and scores")

        self._check_form()

    def _check_form(self) -> None:
        """Check what the text has to look like, and hold it in one form."""
        given = [name for name in FORMS if getattr(self, name) is not None]
        if not given:
            return
        if len(given) > 1:
            raise ValueError(f"{given[1]}: {given[0]} is given as well, give one of them")
        if self.ignore_eos:
            raise ValueError(f"ignore_eos=True: a text with a {given[0]} ends when it is complete, leave one out")
        for name, taken in FORMS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, taken(value))
        if self.form is not None:
            forms.check_form(self.form)

    def _check_sampling(self) -> None:
        check_range("temperature", self.temperature, lambda t: t >= 0, "0 or more")
        if self.temperature < _LOWEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k is not None:
            check_int("top_k", self.top_k, -1, _MOST)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in ("top_p", "min_p"):
            if (share := getattr(self, name)) is not None:
                check_range(name, share, lambda share: 0 <= share <= 1, "in [0, 1]")

    def _check_changes(self) -> None:
        for name in ("repetition_penalty", "encoder_repetition_penalty"):
            if (penalty := getattr(self, name)) is not None:
                check_range(name, penalty, lambda penalty: penalty > 0, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            check_range(name, getattr(self, name), lambda penalty: abs(penalty) <= _MOST_PENALTY, "in [-2, 2]")
        for name, most in _NUMBERS.items():
            if (number := getattr(self, name)) is not None:
                check_int(name, number, 0, most)
        if self.forced_bos_token_id is not None:
            check_int("forced_bos_token_id", self.forced_bos_token_id, 0, MOST_TOKEN_ID)
        if self.renormalize_logits is not None:
            check_bool("renormalize_logits", self.renormalize_logits)
        if self.exponential_decay_length_penalty is not None:
            self._check_decay(self.exponential_decay_length_penalty)

    def _check_decay(self, given: object) -> None:
        name = "exponential_decay_length_penalty"
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise ValueError(f"{name}={given!r:.200}: give a number of tokens and a factor")
        check_int(f"{name}[0]", given[0], 0, _MOST)
        check_range(f"{name}[1]", given[1], lambda factor: factor > 0, "above 0")
        object.__setattr__(self, name, (given[0], float(given[1])))

    def _take_token_lists(self) -> None:
        """Make tuples of one form out of token lists, however they are given."""
        for name, taken in _TOKEN_LISTS.items():
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, taken(name, given))

    def _check_stops(self) -> None:
        if not isinstance(self.stop, tuple):
            raise ValueError(f"stop={self.stop!r:.200}: give a tuple of texts")
        for text in self.stop:
            if not is_text(text, MOST_STOP_CHARACTERS):
                raise ValueError(f"stop={text!r:.200}: give texts of 1 to {MOST_STOP_CHARACTERS} Unicode characters")
        for name in END_TOKENS:
            given = getattr(self, name)
            if not isinstance(given, tuple):
                raise ValueError(f"{name}={given!r:.200}: give a tuple of token ids")
            for token in given:
                check_int(name, token, 0, _MOST)
        for name in ("stop", *END_TOKENS):
            if len(given := getattr(self, name)) > MOST_STOPS:
                raise ValueError(f"{name}={given!r:.100}…: {len(given)} of them, give at most {MOST_STOPS}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, the first of several that are alike, without noise."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0 or self.min_p == 1

    @property
    def form(self) -> "forms.Form | None":
        """What the text has to look like; None: anything."""
        for name in FORMS:
            if (given := getattr(self, name)) is not None:
                return forms.Form(name, json.dumps(given, ensure_ascii=False) if name == "choice" else given)
        return None

    def settled(self, model: "SamplingParams | None" = None) -> "SamplingParams":
        """The settings that a request runs with: the model's where nothing is said, a random seed where one is asked
        for."""
        own = {name: getattr(model, name) for name in FROM_THE_MODEL if getattr(self, name) is None} if model else {}
        found = {name: value for name, value in own.items() if value is not None}
        if self.seed == BY_CHANCE:
            found["seed"] = secrets.randbelow(_SEEDS_BY_CHANCE)
        return replace(self, **found) if found else self

    def without_form(self) -> "SamplingParams":
        """These settings for texts that may look like anything."""
        return replace(self, schema=None, regex=None, choice=None, grammar=None)

    def with_later_seed(self, number: int) -> "SamplingParams":
        """These settings with a seed that is `number` higher, modulo 2^64."""
        return replace(self, seed=(self.seed + number) % 2**64)

    def named_tokens(self) -> Iterable[tuple[str, int]]:
        """Each token id that a setting names, with the setting."""
        for name in (*END_TOKENS, "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"):
            yield from ((name, token) for token in getattr(self, name) or ())
        if self.forced_bos_token_id is not None:
            yield "forced_bos_token_id", self.forced_bos_token_id
        yield from (("logit_bias", token) for token in dict(self.logit_bias or ()))
        yield from (("bad_words_ids", token) for sequence in self.bad_words_ids or () for token in sequence)
        yield from (("sequence_bias", token) for sequence, _ in self.sequence_bias or () for token in sequence)

    def as_dict(self) -> dict[str, Any]:
        """The settings by name, for files that outlive a version: those added later only where they are not default."""
        names = [
            setting.name
            for setting in fields(self)
            if not setting.metadata.get("added") or getattr(self, setting.name) != setting.default
        ]
        values = {name: getattr(self, name) for name in names}
        return {name: _PLAIN.get(name) if value is None else value for name, value in values.items()}


_NUMBERS: Mapping[str, int] = {
    "min_new_tokens": _MOST,
    "min_length": _MOST,
    "no_repeat_ngram_size": _MOST_NGRAM,
    "encoder_no_repeat_ngram_size": _MOST_NGRAM,
}
"""The largest allowed value of each setting."""
_TOKEN_LISTS: Mapping[str, Callable[[str, object], Any]] = {
    "logit_bias": biases,
    "bad_words_ids": sequences,
    "sequence_bias": sequence_biases,
    "suppress_tokens": token_ids,
    "begin_suppress_tokens": token_ids,
    "forced_eos_token_id": token_ids,
}
"""The reader of each setting."""

FORMS: Mapping[str, Callable[[Any], Any]] = {
    "schema": forms.schema_text,
    "regex": lambda given: forms.pattern_text("regex", given),
    "choice": forms.choices,
    "grammar": lambda given: forms.pattern_text("grammar", given),
}
"""The settings that say what the text has to look like, each with its reader."""

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


_SEVERAL = ("stop", *END_TOKENS, "logits_processors")


def _as_tuple(given: Any) -> Any:
    """Nothing, one value or several, as a tuple; anything else is left for the check to name."""
    if given is None:
        return ()
    if isinstance(given, str | int) or (callable(given) and not isinstance(given, Iterable)):
        return (given,)
    return tuple(given) if isinstance(given, Iterable) else given
