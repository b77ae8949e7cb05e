"""A model's vocabulary as grammars need it, and the constraint of a request."""

from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ppd_runtime.models.checkpoint.description import ModelInfo, load_tokenizer
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.constraint import Constraint
from ppd_runtime.sampling.grammar import (
    MOST_SHARED_STATES,
    Form,
    in_deep_thread,
    in_library_form,
    limits,
    one_line_fault,
)
from ppd_runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LOCK = Lock()  # several threads' workers may begin the same request
_MOST_MODELS, _MOST_FORMS = 4, 32
_MOST_FORCED = 4000  # tokens that follow each other with no choice, 400 bytes each in a lexer, beside its states
_END = "<|ppd_runtime.end|>"


def constraint_of(info: ModelInfo, params: SamplingParams, prompt_size: int) -> Constraint | None:
    """The constraint of a request with a prompt of so many tokens; None without one.

    A model's first one in a process takes a third of a second for 49,000 tokens.

    Raises:
        ValueError: for a model whose tokenizer cannot be used, or that has no end token; for a form that cannot be
            compiled, or begins with none of the model's tokens.
    """
    if (form := params.form) is None:
        return None
    named = info.eos_token_ids.union(params.eos_token_ids)
    ends = {end for end in named if end < info.vocab_size}  # a model's files may name others
    if not ends:
        raise ValueError(f"{form.setting}: model {info.name!r} has no token that ends a text, give eos_token_ids")
    start = max(prompt_size - params.num_generated, 0)
    try:
        with _LOCK:
            compiled = _compiled(info, form)
            matcher = compiled.shared()
        found = Constraint(matcher, compiled.fresh, _tokens(info).eos_token, ends, info.vocab_size, start)
        found.allowed(found.root)
    except (RequestError, ValueError) as error:
        raise ValueError(f"{form.setting}: {error}") from error
    return found


class _Compiled:
    """A form for a model's vocabulary.

    Its requests share a lexer, whose states the later ones find: a copy of a matcher has the lexer of the first. What a
    form keeps is bounded: a lexer that has met its bound is dropped, and that of a long forced text is not kept.
    """

    def __init__(self, info: ModelInfo, form: Form) -> None:
        self._tokens, self._grammar = _tokens(info), in_library_form(form)
        self._shared: LLMatcher | None = None

    def shared(self) -> "LLMatcher":
        """A matcher that has read nothing, with the lexer of the others."""
        if (first := self._shared) is None:
            first = self._matcher(MOST_SHARED_STATES)
            if len(first.deep_copy().compute_ff_tokens()) <= _MOST_FORCED:
                self._shared = first
        return first.deep_copy()

    def fresh(self) -> "LLMatcher":
        """A matcher with a lexer of its own, for a request whose lexer has failed; later ones do not get that."""
        self._shared = None
        found = self._matcher()
        if found.is_error():
            raise ValueError(f"{one_line_fault(found.get_error())}; mend it")
        return found

    def _matcher(self, *most_states: int) -> "LLMatcher":
        from llguidance import LLMatcher

        bounds = limits(*most_states)
        return in_deep_thread(lambda: LLMatcher(self._tokens, self._grammar, log_level=0, limits=bounds))


@lru_cache(_MOST_FORMS)
def _compiled(info: ModelInfo, form: Form) -> _Compiled:
    return _Compiled(info, form)


@lru_cache(_MOST_MODELS)
def _tokens(info: ModelInfo) -> "LLTokenizer":
    """The vocabulary with one more token, which stands for all that end a text: requests may add to those."""
    from llguidance import LLTokenizer

    whole = load_tokenizer(info)
    if not isinstance(whole, PreTrainedTokenizerFast):
        raise ValueError(f"model {info.name!r} has no fast tokenizer ({type(whole).__name__}), leave it out")
    try:
        tokenizer = Tokenizer.from_str(whole.backend_tokenizer.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens([AddedToken(_END, special=True)])
        end = tokenizer.token_to_id(_END)
        assert end is not None, "it was added"
        return LLTokenizer(tokenizer.to_str(), n_vocab=max(info.vocab_size, end + 1), eos_token=end)
    except Exception as error:  # both libraries raise plain ones
        fault = f"llguidance cannot read the tokenizer of model {info.name!r} ({one_line(error)}); leave it out"
        raise ValueError(fault) from error
