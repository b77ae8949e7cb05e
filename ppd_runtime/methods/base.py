"""`generate`, `stream` and `chat`, the same for every way of decoding: what they take, and its checks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from transformers import PreTrainedTokenizerBase

from ppd_runtime.client.ending import Ending
from ppd_runtime.methods.chat import Messages, TemplateOptions, chat_text, options_of, template_of
from ppd_runtime.methods.chat_turn import ChatTurn, chat_turn, reply_options
from ppd_runtime.methods.generation import Generation, as_they_end, exhaust, with_seeds
from ppd_runtime.methods.prompts import Prompt, Prompts, encoded_all, several_prompts, token_ids_of
from ppd_runtime.methods.request_queue import RequestQueue, Room
from ppd_runtime.methods.steps import Steps, Totals
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.generation import GenerationDefaults, check_tokens
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.replies.choice import ReplyFormats
from ppd_runtime.replies.tools import ToolUse
from ppd_runtime.results import GenerationResult, Live
from ppd_runtime.sampling.params import SamplingParams, sampling_from

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class TextGenerator(ABC):
    """Continues prompts. A `queue` limits calls of several threads; by default one runs at a time.

    `defaults` are the settings that its requests do not name.
    """

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: PreTrainedTokenizerBase,
        defaults: GenerationDefaults,
        queue: RequestQueue | None = None,
    ) -> None:
        self.info, self.tokenizer, self.defaults = info, tokenizer, defaults
        self.queue = queue or RequestQueue(1)
        """Admits every request."""

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

    def unwell(self) -> list[str]:
        """Names of needed processes that do not serve; empty if all is well. May be called in any thread."""
        return []

    @property
    def process_names(self) -> tuple[str, ...]:
        """Names of the processes that compute, by rank."""
        return ("one process",)

    @property
    def max_requests(self) -> int:
        """Requests that run at once; further calls wait for their turn."""
        return self.queue.most

    @property
    def room(self) -> Room | None:
        """The room for keys and values that a request may have; None: any number of tokens."""
        return self.queue.room

    @property
    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """How it decodes, as JSON values: the `method` by its name in `open_method`, and its layout."""

    @abstractmethod
    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: int, ending: Ending) -> Steps:
        """Yield each new token, then the totals; `live` is a `Live`."""

    @abstractmethod
    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        """Predicted latency as a share of ordinary decoding's."""

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int, **settings: Any
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        n: None = None,
        **settings: Any,
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: None = None, **settings: Any
    ) -> GenerationResult: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        add_special_tokens: bool = True,
        **settings: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Continue a prompt, or each of several, and wait for the end; several results come in the order given.

        Args:
            prompt: a text, or token ids: a list, a tensor or array `[tokens]` or `[1, tokens]`, or a tokenizer's
                `BatchEncoding`. Several are a list of texts, or of two lists of token ids at least.
            params: how to sample and when to stop; or
            settings: the same by name; see `SamplingParams`. A list setting may be one value alone.
            n: give a list of `n` texts for the prompt. The first has the given seed, each further one the next seed
                (modulo 2^64): text i is that of a request with `seed + i`.
            add_special_tokens: whether a text gets the tokenizer's special tokens; False if a chat template gave them.

        Raises:
            ValueError: for a prompt or setting that cannot work, before anything is sent to a worker.
        """
        requests, alone = self.requests(prompt, sampling_from(params, settings), n, add_special_tokens)
        results = self._results(requests)
        return results[0] if alone else results

    def _results(self, requests: Sequence[Generation]) -> list[GenerationResult]:
        self.queue.check_own(max(request.most_tokens for request in requests))
        exhaust(as_they_end(requests, self.max_requests))
        return [request.result for request in requests]

    def requests(
        self,
        prompt: Prompt | Prompts,
        params: SamplingParams,
        n: int | None,
        add_special_tokens: bool,
    ) -> tuple[list[Generation], bool]:
        """The checked requests that `generate` runs with these arguments, and whether it gives one result alone."""
        prompts = several_prompts(prompt, n)
        texts: list[Any] = prompts or [prompt]
        requests = [
            self.request(text, seeded, Live.NOTHING, add_special_tokens=add_special_tokens)
            for text in texts
            for seeded in with_seeds(params, n)
        ]
        return requests, n is None and not prompts

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        chat_template: str | Path | None = None,
        **settings: Any,
    ) -> GenerationResult:
        """Like `generate`, for the next message of a conversation. The tokenizer's end token ends it, too.

        The result's `message` has the answer, calls of `tools` and what the model thought, each for itself; `text` has
        all of it.

        Args:
            messages: dictionaries with a "role" (such as system, user, assistant or tool) and a "content", oldest
                first, or objects of openai's client. Their other fields go to the template unchanged.
            params: see `generate`.
            chat_template: a Jinja template or a file that holds one; None is the tokenizer's own.
            settings: see `generate`; also `TemplateOptions` and `ReplyOptions` by name.

        Raises:
            ValueError: if there is no template, or it does not take these messages or tools.
        """
        turn, requests, alone = self.chat_requests(messages, params, chat_template, settings)
        results = [turn.answered(result) for result in self._results(requests)]
        return results[0] if alone else results  # type: ignore[return-value]

    def chat_requests(
        self,
        messages: Messages,
        params: SamplingParams | None,
        chat_template: str | Path | None,
        settings: dict[str, Any],
    ) -> tuple[ChatTurn, list[Generation], bool]:
        """What `chat` asks with these arguments: the turn, its checked requests, and whether it gives one result."""
        turn = self.chat_turn(messages, template_of(chat_template), options_of(settings), *reply_options(settings))
        n = settings.pop("n", None)
        params = self.chat_params(sampling_from(params, settings), turn)
        requests = [
            self.request(turn.prompt, seeded, Live.NOTHING, False, turn.shown) for seeded in with_seeds(params, n)
        ]
        return turn, requests, n is None

    def chat_turn(
        self,
        messages: Messages,
        template: str | None,
        options: TemplateOptions,
        use: ToolUse,
        formats: ReplyFormats,
    ) -> ChatTurn:
        """A conversation's next message: its prompt, and how the reply is read; `template` is a template's text."""
        return chat_turn(messages, self.tokenizer, template, options, use, formats)

    def chat_prompt(
        self, messages: Messages, chat_template: str | Path | None = None, **options: "Unpack[TemplateOptions]"
    ) -> str:
        """The text in which a model reads a conversation, with its special tokens (`add_special_tokens=False`)."""
        return chat_text(messages, self.tokenizer, template_of(chat_template), options)

    def chat_params(self, params: SamplingParams, turn: ChatTurn | None = None) -> SamplingParams:
        """The settings for a conversation's next message: the tokenizer's end token ends it, as the model's own do.

        Templates end messages with it, and configurations often name another token, which ends texts of other kinds.
        """
        if turn is not None and turn.reading is not None:
            params = turn.reading.params(params)
        end = self.tokenizer.eos_token_id
        if end is None or end >= self.info.vocab_size or end in params.eos_token_ids:
            return params
        return replace(params, eos_token_ids=(*params.eos_token_ids, end))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        boundaries: bool = False,
        passes: bool = False,
        **settings: Any,
    ) -> Generation:
        """Like `generate`, but gives each token as soon as it is certain; read the result after the last.

        `boundaries`: with stages, the events' `news` tell which boundary foresaw each token. `passes`: that, and what
        every process computes.
        """
        live = Live.PASSES if passes else Live.BOUNDARIES if boundaries else Live.TOKENS
        return self.request(prompt, sampling_from(params, settings), live, add_special_tokens)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        live: int = Live.TOKENS,
        add_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Generation:
        """Check a request; it begins when its first event is asked for.

        `live` is what its events tell; the text has the special tokens `shown` as they are written.
        """
        params = self.settled(params)
        return Generation(self, self._prompt_ids(prompt, params, add_special_tokens), params, live, shown)

    def settled(self, params: SamplingParams) -> SamplingParams:
        """The settings that a request runs with: the given ones, else the model's own, and a seed.

        A text that has to look like something ends at the tokenizer's end token if the model names none.
        """
        params = params.settled(self.defaults.params)
        return params if params.form is None or self.info.eos_token_ids else self.chat_params(params)

    def prompt_ids(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids; ValueError if it is no prompt."""
        return token_ids_of(prompt, self.tokenizer, self.info.vocab_size, add_special_tokens)

    def encoded(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each of several texts, which may be none; raises ValueError as `prompt_ids` does."""
        return encoded_all(texts, self.tokenizer, self.info.vocab_size, add_special_tokens)

    def cancel(self) -> None:
        """End the running requests, from any thread: each finishes with the reason "cancelled" and its text so far.

        Calls that wait for their turn are not touched. Where nothing is running, nothing happens.
        """
        self.queue.cancel_running()

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool = True) -> list[int]:
        token_ids = self.prompt_ids(prompt, add_special_tokens)
        self._check_params(params, len(token_ids))
        return token_ids

    def _check_params(self, params: SamplingParams, prompt_size: int) -> None:
        """Raise ValueError for settings that do not fit the model, or for the prompt's size."""
        check_tokens(params, self.info.vocab_size)
        constraint_of(self.info, params, prompt_size)
        if params.num_generated > prompt_size:
            raise ValueError(f"num_generated={params.num_generated}: the prompt has {prompt_size} tokens")
        wanted = prompt_size + params.max_new_tokens
        bounds = (self.info.max_positions, "the model's {} positions"), (self.queue.most_tokens, "max_cache_tokens={}")
        for most, bound in bounds:
            if most is not None and wanted > most:
                raise ValueError(
                    f"{prompt_size} prompt tokens and max_new_tokens={params.max_new_tokens} make {wanted}, more than "
                    f"{bound.format(most)}: shorten the prompt or ask for fewer tokens"
                )
