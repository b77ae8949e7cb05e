"""Boundary 0: drafters name what followed the same tokens before, in this text or in earlier ones."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import SEED

from ppd_runtime.pipeline.staged.drafters import (
    Drafter,
    FromEarlierTexts,
    OwnText,
    Source,
    said,
)
from ppd_runtime.pipeline.staged.earlier_texts import EarlierTexts

OWN, EARLIER = Source.OWN_TEXT, Source.EARLIER_TEXTS


def behind(drafter: Drafter, *tokens: int):
    """What a drafter names behind its text and guessed tokens: the token and the length of the match."""
    cursor = drafter.newest
    for token in tokens:
        cursor = drafter.advance(cursor, token)
    return [(draft.token, draft.length) for draft in drafter.guesses(cursor)]


def drawn(seed: int, size: int) -> list[int]:
    """A text that no other contains."""
    random = Random(f"{SEED} {seed}")
    return [random.randrange(1000) + 1000 * seed for _ in range(size)]


@pytest.mark.parametrize("source", [OWN, EARLIER])
def test_the_longest_match_says_what_follows(source):
    text = [1, 2, 3, 9, 2, 3, 7]
    texts = EarlierTexts(1)
    texts.add(text)
    drafter = OwnText() if source == OWN else FromEarlierTexts(texts)
    drafter.begin([*text, 8, 1])
    assert behind(drafter) == [], "one token is no match"
    drafter.follow(2)
    assert behind(drafter) == [(3, 2)]
    assert behind(drafter, 3) == [(9, 3)]
    assert behind(drafter, 5, 2, 3) == [(7, 2)], "the latest place counts"
    assert behind(drafter, 5) == []
    (draft,) = drafter.guesses(drafter.newest)
    assert (draft.source, draft.said) == (source, said(source, 2))
    drafter.begin([1, 1, 4, 2, 3])
    assert behind(drafter) == ([] if source == OWN else [(7, 2)]), "an earlier text stays, a request's own does not"


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=4))
def test_a_prompt_may_come_at_once_or_by_tokens(text, guessed):
    texts = EarlierTexts(1)
    texts.add(text[::2])
    for drafter in OwnText(), FromEarlierTexts(texts):
        drafter.begin(text)
        at_once = behind(drafter, *guessed)
        drafter.begin(text[:1])
        for token in text[1:]:
            drafter.follow(token)
        assert behind(drafter, *guessed) == at_once


def test_texts_do_not_run_into_each_other():
    texts = EarlierTexts(1)
    texts.add([1, 2, 3])
    texts.add([4, 5, 6])
    drafter = FromEarlierTexts(texts)
    drafter.begin([1, 2, 3])
    assert behind(drafter) == []
    assert behind(drafter, 4, 5) == [(6, 2)]
    texts.add([1, 2])
    assert behind(drafter, 1, 2) == [(3, 2)], "a text that ends where another went on hides nothing"


def test_memory_is_bounded_and_used_texts_stay():
    texts, used = EarlierTexts(0.25), drawn(1, 60)
    texts.add(used)
    texts.add(unused := drawn(2, 60))
    drafter, most = FromEarlierTexts(texts), 0
    for seed in range(3, 60):
        texts.add(used)
        texts.add(drawn(seed, 400))
        most = max(most, texts._young.num_bytes + texts._old.num_bytes)
    assert texts._generation > 2
    assert 0.1 * 2**20 < most < 0.35 * 2**20
    drafter.begin(used[:20])
    assert behind(drafter) == [(used[20], 20)]
    drafter.begin(unused[:20])
    assert behind(drafter) == []


def test_a_long_text_is_forgotten_from_its_beginning():
    texts, text = EarlierTexts(0.1), drawn(1, 5000)
    texts.add(text)
    drafter = FromEarlierTexts(texts)
    drafter.begin(text[:20])
    assert behind(drafter) == []
    drafter.begin(text[-20:-1])
    assert behind(drafter) == [(text[-1], 19)]


def test_of_two_generations_the_longer_match_counts_and_of_equals_the_younger():
    texts = EarlierTexts(0.1)
    texts.add([1, 2, 3, 4])
    seed = 1
    while not texts._generation:
        texts.add(drawn(seed, 100))
        seed += 1
    texts.add([2, 3, 5])
    drafter = FromEarlierTexts(texts)
    drafter.begin([1, 2, 3])
    assert behind(drafter) == [(4, 3)]
    assert behind(drafter, 9, 2, 3) == [(5, 2)]


def test_threads_may_share_earlier_texts():
    texts, known = EarlierTexts(0.1), [drawn(seed, 200) for seed in range(1, 9)]

    def use(number: int) -> None:
        drafter = FromEarlierTexts(texts)
        for turn in range(6):
            text = known[(number + turn) % len(known)]
            texts.add(text)
            drafter.begin(text[:3])
            for place in range(3, len(text)):
                for token, length in behind(drafter):
                    assert token == text[place] or length < 4
                drafter.follow(text[place])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert texts._generation
