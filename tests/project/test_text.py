"""Text arrives whole: no half characters, no stop texts, nothing lost; and generations end for the right reason."""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models_for_tests import END_ID, VOCAB_SIZE, build_tokenizer
from tokenizer_kinds import FIRST_BYTE, FIRST_WORD, KINDS, has_bytes, whole_words, word_pieces
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.text import StopRule, TextStream

HALF = "\ufffd"
BYTE_LEVEL = build_tokenizer()
A, B, C = (BYTE_LEVEL.convert_tokens_to_ids(letter) for letter in "abc")
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


SENTENCEPIECES = [tokenizer for tokenizer in KINDS.values() if has_bytes(tokenizer)]


class Counting:
    """A tokenizer that notes how many token ids each call decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.sizes = tokenizer, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        self.sizes.append(len(token_ids))
        return self.tokenizer.decode(token_ids, **options)


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """What each token adds, and at last what `finish` does."""
    stream = TextStream(tokenizer, stop)
    return [*(stream.push(token) for token in token_ids), stream.finish()]


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(texts)
@example("a🦊é́\u200dz東京")
@example("\ufffd\ufffdx\ufffd")
@example("👩\u200d👩\u200d👧\u200d👦 e\u0301")
def test_a_text_comes_back_whole_and_without_half_characters(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    pieces = pieces_of(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == text
    if HALF not in text:
        assert not any(HALF in piece for piece in pieces)
        assert pieces[-1] == "", "a complete text needs no finish"


@settings(max_examples=100, derandomize=True, deadline=None)
@given(token_lists)
@example([END_ID])
@example([A, END_ID, END_ID, B])
@example([])
def test_any_tokens_give_what_decoding_them_at_once_does(token_ids: list[int]) -> None:
    pieces = pieces_of(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == decoded(BYTE_LEVEL, token_ids)
    for length in range(len(token_ids) + 1):
        so_far = decoded(BYTE_LEVEL, token_ids[:length])
        released = "".join(pieces[:length])
        assert so_far.startswith(released)
        if not so_far.endswith(HALF):
            assert released == so_far, "complete text is not held back"


def test_tokens_beyond_the_tokenizers_vocabulary_add_nothing() -> None:
    """Models pad their vocabularies; random weights may choose such a token."""
    token_ids = [A, VOCAB_SIZE + 5, B, VOCAB_SIZE + 6]
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == decoded(BYTE_LEVEL, token_ids) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_gives_what_decoding_at_once_does(kind: str) -> None:
    tokenizer = KINDS[kind]
    numbers = st.integers(0, len(tokenizer) - 1)
    if has_bytes(tokenizer):
        some = [FIRST_BYTE + byte for byte in "aé€ ".encode()]
        numbers = st.one_of(st.integers(0, 2), st.sampled_from(some), st.integers(FIRST_WORD, len(tokenizer) - 1))

    @settings(max_examples=100, derandomize=True, deadline=None)
    @given(st.lists(numbers, max_size=10))
    def check(token_ids: list[int]) -> None:
        if not has_mixed_bytes(tokenizer, token_ids):
            assert "".join(pieces_of(tokenizer, token_ids)) == decoded(tokenizer, token_ids)

    check()


def has_mixed_bytes(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> bool:
    """Whether bytes in a row are partly characters: at once, the library takes these for none too."""
    if not has_bytes(tokenizer):
        return False
    seen = [token for token in token_ids if token >= FIRST_BYTE]
    for are_bytes, tokens in groupby(seen, key=lambda token: token < FIRST_WORD):
        text = bytes(token - FIRST_BYTE for token in tokens).decode(errors="replace") if are_bytes else ""
        if HALF in text and text.strip(HALF):
            return True
    return False


@pytest.mark.parametrize("tokenizer", SENTENCEPIECES)
def test_of_bytes_in_a_row_whole_characters_are_told_and_each_other_byte_is_one_mark(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    row = [FIRST_BYTE + byte for byte in "é".encode() + "🦊".encode()[:3] + b"A"]
    pieces = pieces_of(tokenizer, [*row, FIRST_WORD + 8, *row[2:5]])
    assert pieces == ["", "é", "", "", "", f"{HALF * 3}A", " do", "", "", "", HALF * 3]


def test_spaces_stay_where_the_library_would_clean_up_behind_the_text() -> None:
    """It would take back what is told already."""
    for make in (word_pieces, whole_words):
        cleaning, plain = make(cleans_up=True), make()
        for word in ("n't", ".", "'", "?"):
            token_ids = plain.convert_tokens_to_ids(["dog", word, "dog"])
            assert "".join(pieces_of(cleaning, token_ids)) == decoded(plain, token_ids) == f"dog {word} dog"


def byte_tokens(tokenizer: PreTrainedTokenizerBase, content: bytes) -> list[int]:
    """A token for each byte."""
    if has_bytes(tokenizer):
        return [FIRST_BYTE + byte for byte in content]
    return [tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in content]


def a_word(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token that has text of its own."""
    return FIRST_WORD + 3 if has_bytes(tokenizer) else 5


LONG = 1000
HALVES = (b"\xf0", b"\x9f", b"\xf0\x9f", b"\xf0\x9f\xa6", b"\xe6\x97")


@pytest.mark.parametrize("stop", [(), ("</s>x", "<|end|>x", f"x{HALF}", "never said")], ids=["no stop", "stops"])
@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece with bytes"])
def test_halves_of_characters_are_told_within_four_tokens_at_the_same_cost(kind: str, stop: tuple[str, ...]) -> None:
    for half in HALVES:
        token_ids = byte_tokens(KINDS[kind], half) * (LONG // len(half))
        pieces = pieces_of_bounded_cost(KINDS[kind], token_ids, stop)
        assert all("".join(pieces[at : at + 4]) for at in range(len(token_ids) - 4))
        assert "".join(pieces) == decoded(KINDS[kind], token_ids)


@pytest.mark.parametrize("stop", [(), ("</s>x", "dog </s>x", "dogx")], ids=["no stop", "stops"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_cost_the_same_at_every_step(kind: str, stop: tuple[str, ...]) -> None:
    tokenizer = KINDS[kind]
    token_ids = [a_word(tokenizer), *[tokenizer.eos_token_id] * LONG]
    assert "".join(pieces_of_bounded_cost(tokenizer, token_ids, stop)) == decoded(tokenizer, token_ids)


def pieces_of_bounded_cost(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop: Sequence[str] = ()
) -> list[str]:
    counting = Counting(tokenizer)
    pieces = pieces_of(counting, token_ids, stop)
    assert max(counting.sizes) <= 11
    assert sum(counting.sizes) <= 22 * len(token_ids)
    return pieces


@st.composite
def texts_with_a_stop(draw: st.DrawFn) -> tuple[str, str]:
    """A text over few letters, and a stop text that is often part of it and often across its tokens."""
    text = draw(st.text("ab e🦊é", min_size=1, max_size=30))
    if draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        return text, text[start : start + draw(st.integers(1, 6))]
    return text, draw(st.text("ab e🦊é", min_size=1, max_size=5))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(texts_with_a_stop())
@example(("aab", "ab"))
@example(("aaab", "aab"))
@example(("abab", "abb"))
@example(("the the dog", "the dog"))
def test_a_stop_text_ends_the_text_before_its_first_place(case: tuple[str, str]) -> None:
    text, stop = case
    stream = TextStream(BYTE_LEVEL, [stop])
    released = ""
    for token in BYTE_LEVEL.encode(text):
        released += stream.push(token)
        assert text.partition(stop)[0].startswith(released)
    assert released + stream.finish() == text.partition(stop)[0]
    assert stream.stopped == (stop in text)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.text("abc ", max_size=30), st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3))
@example("wait for the dog", ["he", "th"])
@example("wait for the dog", ["th", "he"])
def test_of_several_stop_texts_none_is_in_the_text(text: str, stops: list[str]) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    stream = TextStream(BYTE_LEVEL, stops)
    released = ""
    for length, token in enumerate(token_ids, 1):
        released += stream.push(token)
        seen = decoded(BYTE_LEVEL, token_ids[:length])
        found = [seen.index(stop) for stop in stops if stop in seen]
        assert stream.stopped == bool(found)
        if found:
            assert released == seen[: min(found)]
            return
    assert released + stream.finish() == text


STOPS_OF_SPECIAL_TOKENS = {
    "alone": (["b", None, "c"], ["<|end|>"], "b", 2),
    "behind text": (["a", "b", None, "c"], ["b<|end|>"], "a", 3),
    "before text": (["a", None, "c", "b"], ["<|end|>cb"], "a", 4),
    "several": (["a", None, None, "b"], ["a<|end|><|end|>b"], "", 4),
    "a part of one": (["a", None, "b"], ["end"], "a", 2),
    "not that one": (["a", None, "b"], ["<|end|>c", "a<|end|><|end|>"], "ab", None),
    "one between": (["a", None, "b", "c"], ["abc"], "", 4),
    "one between that another stop begins with": (["a", None, "b", "c"], ["<|end|>bb", "bc"], "a", 4),
    "what is shown begins earlier": (["a", "b", None, "c"], ["abc", "<|end|>c"], "", 4),
}
"""Letters, None for the special token; stop texts; what is shown before them, and after how many tokens it is known."""


@pytest.mark.parametrize("name", STOPS_OF_SPECIAL_TOKENS)
def test_a_stop_text_matches_special_tokens_as_they_are_written(name: str) -> None:
    letters, stops, expected, at = STOPS_OF_SPECIAL_TOKENS[name]
    token_ids = [END_ID if one is None else BYTE_LEVEL.convert_tokens_to_ids(one) for one in letters]
    stream, told = TextStream(BYTE_LEVEL, stops), ""
    for number, token in enumerate(token_ids, 1):
        told += stream.push(token)
        assert expected.startswith(told), "what may become a stop text is held back"
        assert stream.stopped == (at is not None and number >= at)
    assert told + stream.finish() == expected
    ends = [None] * len(letters) if at is None else [None] * (at - 1) + ["stop"] * (len(letters) - at + 1)
    assert list(reasons(SamplingParams(stop=tuple(stops)), token_ids))[:at] == ends[:at]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_matched_with_every_kind_of_tokenizer(kind: str) -> None:
    tokenizer = KINDS[kind]
    end = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
    stream = TextStream(tokenizer, [f"{end}{end}"])
    word = a_word(tokenizer)
    told = [stream.push(token) for token in (word, tokenizer.eos_token_id, word, *[tokenizer.eos_token_id] * 2)]
    assert stream.stopped
    assert "".join(told) == decoded(tokenizer, [word, word])


@pytest.mark.parametrize(("stop", "expected"), [("<|end|>", f"a{HALF}"), (f"a{HALF}<|end|>", ""), ("a<|end|>", None)])
def test_half_a_character_before_a_special_token_is_between_it_and_what_comes_before(
    stop: str, expected: str | None
) -> None:
    first, second = BYTE_LEVEL.encode("a🦊")[:2]
    stream = TextStream(BYTE_LEVEL, [stop])
    told = "".join(map(stream.push, (first, second, END_ID)))
    assert stream.stopped == (expected is not None)
    rest = BYTE_LEVEL.encode("a🦊")[2:]
    assert told + "".join(map(stream.push, rest)) + stream.finish() == ("a🦊" if expected is None else expected)


def test_a_special_token_is_matched_by_the_letters_of_its_name() -> None:
    """Decoders would make other letters of some, as of DeepSeek's."""
    tokenizer = build_tokenizer()
    for name in ("<｜end▁of▁text｜>", "<é>"):
        tokenizer.add_special_tokens({"additional_special_tokens": [name]})
        token = tokenizer.convert_tokens_to_ids(name)
        stream = TextStream(tokenizer, [f"a{name}b"])
        assert [stream.push(token) for token in (C, A, token, B)] == ["c", "", "", ""]
        assert stream.stopped


def test_what_may_become_a_stop_text_is_held_until_it_cannot() -> None:
    stream = TextStream(BYTE_LEVEL, ["abc"])
    assert [stream.push(token) for token in (A, B, A, B, B)] == ["", "", "ab", "", "abb"]
    assert [stream.push(token) for token in (A, B)] == ["", ""]
    assert stream.finish() == "ab"
    assert not stream.stopped


def reasons(
    params: SamplingParams, token_ids: Sequence[int], eos: frozenset[int] = frozenset()
) -> Iterator[str | None]:
    rule = StopRule(params, eos, BYTE_LEVEL)
    for token in token_ids:
        yield rule.finish_reason(token)


def test_the_length_ends_a_generation() -> None:
    assert list(reasons(SamplingParams(max_new_tokens=3), [A, A, A])) == [None, None, "length"]
    assert list(reasons(SamplingParams(max_new_tokens=1), [A])) == ["length"]


def test_an_end_token_ends_a_generation_unless_ignored() -> None:
    eos = frozenset([B, C])
    assert list(reasons(SamplingParams(), [A, C], eos)) == [None, "eos"]
    assert list(reasons(SamplingParams(max_new_tokens=2), [A, B], eos)) == [None, "eos"]
    ignoring = SamplingParams(max_new_tokens=3, ignore_eos=True, eos_token_ids=(A,))
    assert list(reasons(ignoring, [A, C, B], eos)) == [None, None, "length"]
    assert list(reasons(SamplingParams(eos_token_ids=(A, END_ID)), [B, A, C], frozenset([C]))) == [None, "eos", "eos"]


def test_a_stop_text_ends_a_generation_even_with_the_last_token() -> None:
    assert list(reasons(SamplingParams(stop=("ab",)), [B, A, B])) == [None, None, "stop"]
    assert list(reasons(SamplingParams(stop=("ab",), max_new_tokens=2), [A, B])) == [None, "stop"]


def test_last_allowed_says_that_the_next_token_is_the_last() -> None:
    rule = StopRule(SamplingParams(max_new_tokens=3), frozenset(), BYTE_LEVEL)
    seen = []
    for _ in range(3):
        seen.append(rule.last_allowed)
        rule.finish_reason(A)
    assert seen == [False, False, True]


def test_the_rule_and_the_stream_see_a_stop_text_at_the_same_token() -> None:
    rng = random.Random(0)
    stopped = 0
    for _ in range(300):
        token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
        stops = tuple(chr(rng.randrange(97, 123)) + rng.choice(["", "e", " "]) for _ in range(3))
        stream = TextStream(BYTE_LEVEL, stops)
        for token, reason in zip(token_ids, reasons(SamplingParams(stop=stops), token_ids), strict=True):
            stream.push(token)
            assert (reason == "stop") == stream.stopped
            if reason:
                stopped += 1
                break
    assert 50 < stopped < 300
