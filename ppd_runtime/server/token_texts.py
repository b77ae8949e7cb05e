"""Tokens as OpenAI's clients are told them: names and bytes that are the text together, and log-probabilities."""

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppd_runtime.sampling.logprobs import TokenLogprobs
from ppd_runtime.text import Pieces


class TokenTexts:
    """The tokens of one text, in order.

    A token is named by the characters that it adds where it stands. One without whole characters is `bytes:` with its
    bytes, as OpenAI names it. A special token is named as it is written, even if the text leaves it out.

    Args:
        tokenizer: the model's.
        offset: where the text begins in what the client gets.
        prompt: the text itself, if it is a prompt, which may show special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, offset: int = 0, prompt: str = "") -> None:
        self._pieces = Pieces(tokenizer)
        self._characters = self._pieces.characters()
        self._offset, self._prompt = offset, prompt
        self._text: list[str] = []
        self._size = 0

    def old_logprobs(self, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """Add tokens; `logprobs` of `/v1/completions`. A prompt's first token has none."""
        found: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for token, noted in tokens:
            logprobs = {**dict(noted.top), token: noted.logprob} if noted else {}
            told = {one: self._told(one) for one in (token, *logprobs)}
            names = _different_names({one: name for one, (name, _) in told.items()})
            found["tokens"].append(names[token])
            found["token_logprobs"].append(noted and noted.logprob)
            found["top_logprobs"].append({names[one]: logprob for one, logprob in logprobs.items()} if noted else None)
            found["text_offset"].append(self._offset + self._push(token, told[token][1]))
        return found

    def chat_logprobs(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Add tokens; `logprobs` of `/v1/chat/completions`."""
        entries = []
        for noted in tokens:
            name, content = self._told(noted.token_id)
            top = [_entry(*self._told(token), logprob) for token, logprob in noted.top]
            entries.append({**_entry(name, content, noted.logprob), "top_logprobs": top})
            self._push(noted.token_id, content)
        return {"content": entries, "refusal": None}

    def finish(self) -> str:
        """The whole text, with a partial last character as the tokenizer shows it."""
        self._add(b"", last=True)
        return "".join(self._text)

    def _told(self, token: int) -> tuple[str, bytes]:
        """A token's name where it would stand next, and what it would add to the text there."""
        content, shown = self._pieces.of(token)
        if not (content or shown):
            return f"token_id:{token}", b""
        if shown or self._prompt.startswith(content.decode(), self._begins(content)):
            return _name(content), content
        return _name(content), b""

    def _push(self, token: int, content: bytes) -> int:
        """Add a token; returns its first offset."""
        self._pieces.push(token)
        begins = self._begins(content)
        self._add(content)
        return begins

    def _begins(self, content: bytes) -> int:
        """Where the next bytes would begin: inside a partial character, at this character's beginning."""
        begun, _ = self._characters.getstate()
        try:
            codecs.utf_8_decode(begun + content[:1], "strict", False)
        except UnicodeDecodeError:
            return self._size + len(begun.decode(errors=self._characters.errors))
        return self._size

    def _add(self, content: bytes, last: bool = False) -> None:
        self._text.append(self._characters.decode(content, last))
        self._size += len(self._text[-1])


def _different_names(names: Mapping[int, str]) -> dict[int, str]:
    """Names without doubles: the first token keeps a shared name, the others get their ids' names, as in vLLM."""
    found: dict[str, int] = {}
    for token, name in names.items():
        found[f"token_id:{token}" if name in found else name] = token
    return {token: name for name, token in found.items()}


def text_of(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """A text with its special tokens as they are written."""
    pieces = Pieces(tokenizer)
    characters = pieces.characters()
    return "".join([*(characters.decode(pieces.push(token).content) for token in tokens), characters.decode(b"", True)])


def _entry(name: str, content: bytes, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(content)}


def _name(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(map(_escaped, content))


def _escaped(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and chr(byte) != "\\" else f"\\x{byte:02x}"
