"""Tokens → text while they arrive, and the rules that end a generation."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ppd_runtime.sampling_params import SamplingParams

_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of a growing sequence; holds back incomplete characters and what may become a stop text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._token_ids: list[int] = []
        self._window_start = 0  # tokens before are final; decoding a window keeps a step's cost constant
        self._window_text = ""  # what the window's tokens before the newest complete character gave
        self._pending = ""  # complete text that may be the beginning of a stop text
        self._settled = 0

    def push(self, token_id: int) -> str:
        """Add a token; the text that is now certain."""
        self._token_ids.append(token_id)
        return self._release(self._complete_text(), last=False)

    def finish(self) -> str:
        """The rest of the text, incomplete characters as the tokenizer shows them."""
        rest = self._decode(self._token_ids[self._window_start :])[len(self._window_text) :]
        return self._release(rest, last=True)

    def _complete_text(self) -> str:
        text = self._decode(self._token_ids[self._window_start :])
        if text.endswith(_INCOMPLETE):
            return ""
        new = text[len(self._window_text) :]
        if not new:  # a special token: the context must stay one that shows, or the next piece's space is lost
            return ""
        # The next window keeps the newest piece as context: some tokenizers' spaces depend on the token before.
        self._window_start = self._settled
        self._settled = len(self._token_ids)
        self._window_text = self._decode(self._token_ids[self._window_start :])
        return new

    def _release(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._pending + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._pending = True, ""
            return text[: min(found)]
        held = 0 if last else _overlap(text, self._stop)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopRule:
    """Says after each token whether the generation ends there, and why.

    Of `prompt_ids` the last `params.num_generated` belong to the text in which stop texts are looked for.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._left = params.max_new_tokens
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._text = TextStream(tokenizer, params.stop) if params.stop and tokenizer else None
        if self._text:
            for token in prompt_ids[len(prompt_ids) - params.num_generated :]:
                self._text.push(token)

    @property
    def last_allowed(self) -> bool:
        """Whether the next token ends the generation whatever it is."""
        return self._left == 1

    def finish_reason(self, token_id: int) -> str | None:
        """Count a token; None, or why nothing follows it: eos, stop or length."""
        self._left -= 1
        if token_id in self._eos:
            return "eos"
        if token_id in self._stop_token_ids:
            return "stop"
        if self._text:
            self._text.push(token_id)
            if self._text.stopped:
                return "stop"
        return "length" if self._left == 0 else None


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
