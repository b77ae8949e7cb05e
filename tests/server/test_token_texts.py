"""Tokens as clients are told them: together they are the text, each begins where it says, and no two have one name."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import END, END_ID, build_tokenizer
from tokenizer_kinds import FIRST_BYTE, FIRST_WORD, KINDS, has_bytes
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ppd_runtime.sampling.logprobs import TokenLogprobs
from ppd_runtime.server.token_texts import TokenTexts, text_of
from ppd_runtime.text import TextStream

HALF = "\ufffd"
FOX = "🦊"
BEFORE = 7  # characters before a text


def content_of(name: str) -> bytes:
    """The bytes that a name stands for."""
    if not name.startswith("bytes:"):
        return name.encode()
    letters = re.findall(r"\\x(..)|(.)", name.removeprefix("bytes:"))
    return bytes(int(code, 16) if code else ord(letter) for code, letter in letters)


def shown(content: bytes) -> str:
    """Bytes as text, with one mark where some can be no characters: how many there are is the tokenizer's matter."""
    return re.sub(f"{HALF}+", HALF, content.decode(errors="replace"))


def text_from(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join([*map(stream.push, token_ids), stream.finish()])


def noted_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], most: int = 4) -> list[TokenLogprobs]:
    """Log-probabilities whose likeliest tokens are the next ones of the vocabulary."""
    return [
        TokenLogprobs(
            token, -9.0, tuple(((token + place) % len(tokenizer), -place / 2) for place in range(1, most + 1))
        )
        for token in token_ids
    ]


def old_logprobs(texts: TokenTexts, noted: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
    return texts.old_logprobs((one.token_id, one) for one in noted)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_text_together(kind: str) -> None:
    tokenizer = KINDS[kind]

    @settings(max_examples=100, derandomize=True, deadline=None)
    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=8))
    def check(token_ids: list[int]) -> None:
        text, noted = text_from(tokenizer, token_ids), noted_of(tokenizer, token_ids)
        chat = TokenTexts(tokenizer).chat_logprobs(noted)["content"]
        assert shown(b"".join(bytes(entry["bytes"]) for entry in chat)) == shown(text.encode())
        told = old_logprobs(TokenTexts(tokenizer, offset=BEFORE), noted)
        assert told["tokens"] == [entry["token"] for entry in chat]
        parts = [b"" if token in tokenizer.all_special_ids else content_of(name) for token, name in named(told, noted)]
        assert shown(b"".join(parts)) == shown(text.encode())
        for part, offset in zip(parts, told["text_offset"], strict=True):
            if HALF not in part.decode(errors="replace"):
                assert text[offset - BEFORE :].startswith(part.decode())

    check()


def named(told: dict[str, list[Any]], noted: Sequence[TokenLogprobs]) -> list[tuple[int, str]]:
    return [(one.token_id, name) for one, name in zip(noted, told["tokens"], strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_likely_token_has_an_entry_of_its_own(kind: str) -> None:
    """A vocabulary has tokens of one text: `<0x41>` and `A`, those that a text's beginning leaves nothing of."""
    tokenizer = KINDS[kind]
    for noted in noted_of(tokenizer, range(len(tokenizer)), most=20 if len(tokenizer) > 40 else 6):
        for before in ([], [len(tokenizer) - 1]):
            texts = TokenTexts(tokenizer)
            old_logprobs(texts, noted_of(tokenizer, before))
            told = old_logprobs(texts, [noted])
            (name,), (top,) = told["tokens"], told["top_logprobs"]
            assert [*top.values()] == [*(logprob for _, logprob in noted.top), noted.logprob]
            assert top[name] == noted.logprob


def test_a_token_among_the_likeliest_is_there_once() -> None:
    noted = TokenLogprobs(40, -1.0, ((41, -0.5), (40, -1.0), (42, -2.0)))
    assert [*old_logprobs(TokenTexts(KINDS["byte-level"]), [noted])["top_logprobs"][0].values()] == [-0.5, -1.0, -2.0]


def test_tokens_beyond_the_tokenizers_vocabulary_have_their_numbers() -> None:
    """Models pad their vocabularies."""
    tokenizer = KINDS["byte-level"]
    noted = TokenLogprobs(len(tokenizer), -1.0, ((len(tokenizer) + 1, -0.5),))
    told = old_logprobs(TokenTexts(tokenizer), [noted])
    assert told["tokens"] == [f"token_id:{len(tokenizer)}"]
    assert len(told["top_logprobs"][0]) == 2
    assert TokenTexts(tokenizer).chat_logprobs([noted])["content"][0]["bytes"] == []


@pytest.mark.parametrize("tokenizer", [KINDS["byte-level"], KINDS["SentencePiece with bytes"]])
def test_parts_of_a_character_are_named_by_their_bytes_and_begin_where_it_does(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    letters = [token_of_byte(tokenizer, byte) for byte in f"a{FOX}b".encode()]
    told = old_logprobs(TokenTexts(tokenizer), noted_of(tokenizer, letters))
    assert told["tokens"] == ["a", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x8a", "b"]
    assert told["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_what_breaks_a_character_off_begins_behind_its_mark() -> None:
    for tokenizer, marks in ((KINDS["byte-level"], 1), (KINDS["SentencePiece with bytes"], 2)):
        broken = [token_of_byte(tokenizer, byte) for byte in b"\xf0\x9fb\xe6\xe6\x97\xa5"]
        told = old_logprobs(TokenTexts(tokenizer), noted_of(tokenizer, broken))
        assert told["text_offset"] == [0, 0, marks, marks + 1, *[marks + 2] * 3]
        assert text_from(tokenizer, broken) == f"{HALF * marks}b{HALF}日"


def token_of_byte(tokenizer: PreTrainedTokenizerBase, byte: int) -> int:
    if has_bytes(tokenizer):
        return FIRST_BYTE + byte
    token: int = tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte])
    return token


def test_a_name_tells_every_byte() -> None:
    tokenizer = build_tokenizer()
    letters = {"Ġ": " ", "\\": r"\x5c", "Ċ": r"\x0a"}  # as a byte-level vocabulary writes bytes, and as a name does
    for letter, name in letters.items():
        tokenizer.add_tokens(f"{letter}ðŁ")
        told = old_logprobs(TokenTexts(tokenizer), [TokenLogprobs(len(tokenizer) - 1, -1.0)])
        assert told["tokens"] == [rf"bytes:{name}\xf0\x9f"]


def test_special_tokens_have_their_names_and_no_bytes() -> None:
    tokenizer = KINDS["byte-level"]
    noted = noted_of(tokenizer, [*tokenizer.encode("ab"), END_ID])
    told = old_logprobs(TokenTexts(tokenizer), noted)
    assert (told["tokens"][-1], told["text_offset"][-1]) == (END, 2)
    assert [entry["bytes"] for entry in TokenTexts(tokenizer).chat_logprobs(noted)["content"]][-1] == []


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece with bytes", "Metaspace"])
def test_a_prompts_special_tokens_are_in_its_text_where_it_has_them(kind: str) -> None:
    """The tokenizer adds others."""
    tokenizer = KINDS[kind]
    end = tokenizer.eos_token_id
    word = FIRST_WORD + 1 if has_bytes(tokenizer) else 70 if kind == "byte-level" else 4
    text = f"{tokenizer.eos_token}{tokenizer.decode([word])}"
    texts = TokenTexts(tokenizer, prompt=text)
    told = texts.old_logprobs((token, None) for token in (end, end, word, end))
    size = len(tokenizer.eos_token)
    assert texts.finish() == text
    assert told["text_offset"] == [0, size, size, len(text)]
    assert told["top_logprobs"] == told["token_logprobs"] == [None] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_token_ids_is_the_text_that_its_tokens_tell(kind: str) -> None:
    tokenizer = KINDS[kind]
    for token_ids in ([1, 2, 5, 1, 4, 6], [5, 0, 5], [*range(5)], [len(tokenizer) - 1, 1]):
        text = text_of(token_ids, tokenizer)
        texts = TokenTexts(tokenizer, prompt=text)
        names = texts.old_logprobs((token, None) for token in token_ids)["tokens"]
        assert texts.finish() == text
        assert shown(b"".join(map(content_of, names))) == shown(text.encode())


def test_a_prompt_that_the_tokenizer_changes_is_told_as_it_is_read() -> None:
    """Qwen's compose characters, others make letters small."""
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    given_text = "cafe\u0301!"
    texts = TokenTexts(tokenizer, prompt=given_text)
    told = texts.old_logprobs((token, None) for token in tokenizer.encode(given_text))
    assert texts.finish() == b"".join(map(content_of, told["tokens"])).decode() == "caf\u00e9!"
