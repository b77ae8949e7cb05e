"""Text arrives whole: no half characters, no stop texts, nothing lost; and generations end for the right reason."""

import random
from collections.abc import Iterator, Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from models_for_tests import END_ID, VOCAB_SIZE, build_tokenizer
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.text import StopRule, TextStream

HALF = "\ufffd"
BYTE_LEVEL = build_tokenizer()
A, B, C = (BYTE_LEVEL.convert_tokens_to_ids(letter) for letter in "abc")
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have: spaces at the beginning of tokens, the text's first dropped, bytes for the rest."""
    words = ["▁", "▁the", "▁dog", "▁a", "n", "'", "t", "do", "▁do", "e", ".", "▁▁", ",", "ing"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(word, -3.0) for word in words]
    tokenizer = Tokenizer(tokenizer_models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SENTENCEPIECE = sentencepiece_like()
FIRST_WORD = 3 + 256


def pieces_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    """What each token adds, and at last what `finish` does."""
    stream = TextStream(tokenizer, stop)
    return [*(stream.push(token) for token in token_ids), stream.finish()]


def decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=300, derandomize=True, deadline=None)
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


@settings(max_examples=300, derandomize=True, deadline=None)
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


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(["é", "€", "🦊", "x", "\n", 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]), max_size=8))
def test_sentencepiece_words_and_bytes(parts: list[str | int]) -> None:
    token_ids: list[int] = []
    for part in parts:
        token_ids += [3 + byte for byte in part.encode()] if isinstance(part, str) else [FIRST_WORD + part]
    pieces = pieces_of(SENTENCEPIECE, token_ids)
    assert "".join(pieces) == decoded(SENTENCEPIECE, token_ids)
    assert not any(HALF in piece for piece in pieces)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.just(2), st.integers(FIRST_WORD, FIRST_WORD + 13)), max_size=8))
@example([FIRST_WORD + 2, 2, FIRST_WORD + 8])
def test_a_special_token_between_words_swallows_no_space(token_ids: list[int]) -> None:
    """With `ignore_eos` a text goes on after its end: `▁dog </s> ▁do` is "dog do"."""
    assert "".join(pieces_of(SENTENCEPIECE, token_ids)) == decoded(SENTENCEPIECE, token_ids)


def test_half_a_character_at_the_end_is_shown_by_finish() -> None:
    token_ids = BYTE_LEVEL.encode("ab🦊")[:-1]
    pieces = pieces_of(BYTE_LEVEL, token_ids)
    assert "".join(pieces[:-1]) == "ab"
    assert set(pieces[-1]) == {HALF}
    assert "".join(pieces) == decoded(BYTE_LEVEL, token_ids)


def test_a_long_text_costs_the_same_at_every_step() -> None:
    sizes: list[int] = []

    class Recorder:
        def decode(self, token_ids: Sequence[int], **options: bool) -> str:
            sizes.append(len(token_ids))
            return BYTE_LEVEL.decode(token_ids, **options)

    token_ids = BYTE_LEVEL.encode("the dog and the fox 🦊 wait. " * 30)
    assert "".join(pieces_of(Recorder(), token_ids)) == decoded(BYTE_LEVEL, token_ids)
    assert max(sizes) <= 10


@st.composite
def texts_with_a_stop(draw: st.DrawFn) -> tuple[str, str]:
    """A text over few letters, and a stop text that is often part of it and often across its tokens."""
    text = draw(st.text("ab e🦊é", min_size=1, max_size=30))
    if draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        return text, text[start : start + draw(st.integers(1, 6))]
    return text, draw(st.text("ab e🦊é", min_size=1, max_size=5))


@settings(max_examples=500, derandomize=True, deadline=None)
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


@settings(max_examples=300, derandomize=True, deadline=None)
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


def test_nothing_comes_after_a_stop_text() -> None:
    stream = TextStream(BYTE_LEVEL, ["b"])
    assert [stream.push(token) for token in (A, B, C, A)] == ["a", "", "", ""]
    assert stream.finish() == ""
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
    ignoring = SamplingParams(max_new_tokens=3, ignore_eos=True)
    assert list(reasons(ignoring, [B, C, B], eos)) == [None, None, "length"]


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
