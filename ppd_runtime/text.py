"""Tokens → text while they arrive, and the rules that end a generation."""

import codecs
import re
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from ppd_runtime.sampling.params import SamplingParams

_INCOMPLETE = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A byte as SentencePiece's vocabularies write it."""
_EACH_BYTE = "ppd_runtime.each_byte"
_MOST_EMPTY = 8
"""Most kept tokens without text, such as spaces that show only before a word; with more, some are lost."""


def _bytes_by_letter() -> dict[str, int]:
    """Byte-level vocabularies' letters: themselves where Latin-1 shows them, the others from U+0100 on in order."""
    letters = sorted(ByteLevel.alphabet())
    shown = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in shown.values())
    return shown | dict(zip(letters[len(shown) :], others, strict=True))


_LETTERS = _bytes_by_letter()


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """An error handler for `codecs`: "replace" shows several bytes that began a character as one U+FFFD."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _INCOMPLETE * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each)


class Piece(NamedTuple):
    """What a token adds to a text."""

    content: bytes
    """In UTF-8; perhaps a part of a character. A special token has its spelling."""
    shown: bool
    """Whether it is part of the text, which special tokens are not."""


class Pieces:
    """The tokens of a growing text as pieces; joined, the shown ones are the text that the tokenizer gives."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers' spaces depend on the token before: on the newest one that gave text.
        self._before: list[int] = []
        self._text_before = ""

    def of(self, token_id: int) -> Piece:
        """What a token would add here."""
        text = self._decode([*self._before, token_id])[len(self._text_before) :]
        written = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if text and _INCOMPLETE not in self._text_before[-1:] + text and not _BYTE.fullmatch(written):
            return Piece(text.encode(), shown=True)
        alone = self._decode([token_id])
        if not alone and (not written or self._decode([token_id], skip_special_tokens=False)):
            return Piece(written.encode(), shown=False)
        content = _bytes_of(written, alone)
        if content is None or not (self._before or _INCOMPLETE in alone):  # a text's first space may be left out
            content = text.encode()
        return Piece(content, shown=True)

    def push(self, token_id: int) -> Piece:
        """Add a token; what it adds."""
        piece = self.of(token_id)
        if piece.shown:
            empty = [] if piece.content else self._before[:_MOST_EMPTY]
            self._before = [*empty, token_id]
            self._text_before = self._decode(self._before)
        return piece

    def characters(self) -> codecs.IncrementalDecoder:
        """Decodes shown pieces to characters; bytes that belong to none are U+FFFD, as in the tokenizer."""
        number = self._tokenizer.convert_tokens_to_ids("<0xF0>")
        has_bytes = number is not None and self._decode([number]) == _INCOMPLETE
        return codecs.getincrementaldecoder("utf-8")(_EACH_BYTE if has_bytes else "replace")

    def _decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        # Cleaning up would remove spaces that were already given.
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )


class TextStream:
    """The text of a growing sequence; holds back incomplete characters and what may become a stop text.

    Stop texts are looked for in the text with special tokens as written, and in the shown text without them. `shown`
    special tokens are part of the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        self._pieces, self._shown = Pieces(tokenizer), shown
        self._characters = self._pieces.characters()
        self._searches = [_StopSearch(stop)] if stop else []  # one, until a special token comes
        self._waiting = ""  # complete text that may be the beginning of a stop text

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return any(search.found for search in self._searches)

    def push(self, token_id: int) -> str:
        """Add a token; gives the now certain text."""
        piece = self._pieces.push(token_id)
        if piece.shown:
            return self._release(self._characters.decode(piece.content))
        if token_id in self._shown:
            return self._release(self._characters.decode(b"", True) + piece.content.decode())
        return self._pass_over(piece.content.decode()) if piece.content and self._searches else ""

    def finish(self) -> str:
        """The rest of the text, incomplete characters as the tokenizer shows them."""
        return self._release(self._characters.decode(b"", True), last=True)

    def _release(self, new: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        for search in self._searches:
            search.push(new, shown=True)
        self._waiting += new
        return self._certain(last)

    def _pass_over(self, special: str) -> str:
        """A special token ends a begun character only in the search for stop texts."""
        if self.stopped:
            return ""
        if len(self._searches) == 1:
            self._searches.append(copy(self._searches[0]))
        begun = self._characters.getstate()[0].decode(errors=self._characters.errors)
        found = self._searches[0].push(begun + special, shown=False)
        return self._certain() + (begun if found and found <= len(special) else "")

    def _certain(self, last: bool = False) -> str:
        counted = [search for search in self._searches if search.found or not (self.stopped or last)]
        certain = len(self._waiting) - max((search.held for search in counted), default=0)
        text, self._waiting = self._waiting[:certain], self._waiting[certain:]
        return text


class _StopSearch:
    """Looks for stop texts in a text that grows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = 0
        """Characters from where a stop text begins; 0: none has come."""
        self._stops = stops
        self._end = ""  # the text's end that may begin a stop text
        self._shown: list[bool] = []

    @property
    def held(self) -> int:
        """Shown characters that may be or are part of a stop text, with what follows."""
        return sum(self._shown)

    def push(self, new: str, shown: bool) -> int:
        """Add text, shown or not; returns `found`."""
        text, marks = self._end + new, self._shown + [shown] * len(new)
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        begins = min(places) if places else len(text) - overlap(text, self._stops)
        self._end, self._shown = text[begins:], marks[begins:]
        self.found = len(self._end) if places else 0
        return self.found


class StopRule:
    """Says after each token whether the generation ends there, and why.

    The last `params.num_generated` of `prompt_ids` belong to the text that is searched for stop texts.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._left = params.max_new_tokens
        self._eos = frozenset() if params.ignore_eos else eos_token_ids.union(params.eos_token_ids)
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


def _bytes_of(written: str, alone: str) -> bytes | None:
    """Bytes of a token that stands for bytes, by its spelling and by its text alone; None for a token of characters."""
    if (byte := _BYTE.fullmatch(written)) and alone != written:
        return bytes.fromhex(byte[1])
    if _INCOMPLETE in alone and not set(written) - _LETTERS.keys():
        found = bytes(_LETTERS[letter] for letter in written)
        return found if found.decode(errors="replace") == alone else None
    return None


def overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
