"""The suffix automaton knows what a search through all texts finds."""

import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import SEED

from ppd_runtime.pipeline.staged.suffix_automaton import LONGEST, SuffixAutomaton

TOKENS = st.integers(0, 2)
TEXTS = st.lists(st.lists(TOKENS, min_size=1, max_size=24), min_size=1, max_size=4)
GUESSED = st.lists(TOKENS, max_size=8)
LIMITS = st.sampled_from([1, 2, 3, 5, LONGEST])
examples = settings(max_examples=300, derandomize=True, deadline=None)


def followed(texts, ending):
    """What last followed an ending; None if nothing did."""
    size = len(ending)
    for text in reversed(texts):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == ending:
                return text[place]
    return None


def searched(texts, context, longest):
    """What `guess` should say."""
    for size in range(min(len(context), longest), 0, -1):
        if (token := followed(texts, context[-size:])) is not None:
            return token, size
    return None


def grown(texts, longest=LONGEST):
    """An automaton with its texts so far, after each token."""
    automaton, known = SuffixAutomaton(longest), []
    for text in texts:
        automaton.begin_text()
        known.append([])
        for token in text:
            automaton.add(token)
            known[-1].append(token)
            yield automaton, known


@examples
@given(TEXTS, GUESSED, LIMITS)
def test_guesses_are_what_a_search_finds(texts, guessed, longest):
    for automaton, known in grown(texts, longest):
        context, cursor = known[-1][:], automaton.newest
        assert automaton.guess(cursor) == searched(known, context, longest)
        for token in guessed:
            cursor = automaton.advance(cursor, token)
            context.append(token)
            assert automaton.guess(cursor) == searched(known, context, longest)


@examples
@given(TEXTS, GUESSED, LIMITS)
def test_cursors_stay_valid_as_texts_grow(texts, guessed, longest):
    cursors = []
    for automaton, known in grown(texts, longest):
        for context, cursor, size in cursors:
            found = automaton.guess(cursor)
            assert size <= (found[1] if found else 0)
            for ending, guess in (
                (context, found),
                ([*context, 0], automaton.guess(automaton.advance(cursor, 0))),
            ):
                assert guess is None or guess[0] == followed(known, ending[-guess[1] :])
        context, cursor = known[-1][:], automaton.newest
        for token in guessed:
            cursor = automaton.advance(cursor, token)
            context.append(token)
        found = automaton.guess(cursor)
        cursors.append((context, cursor, found[1] if found else 0))


def texts_of(size):
    drawn = Random(SEED)
    yield "one token", [5] * size
    yield "two in turn", [5, 6] * (size // 2)
    yield "most states", [5, *[6] * (size - 1)]
    yield "most transitions", [5, *[6] * (size - 2), 7]
    yield "random", [drawn.randrange(4) for _ in range(size)]
    words = [drawn.choices(range(2000), k=drawn.randrange(1, 9)) for _ in range(size // 20)]
    yield "words", [token for _ in range(size // 4) for token in drawn.choice(words)][:size]


@pytest.mark.parametrize(("name", "text"), [*texts_of(4000)])
def test_memory_is_linear_and_told(name, text):
    tracemalloc.start()
    try:
        automaton = SuffixAutomaton()
        for token in text:
            automaton.add(token)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(automaton._length) <= 2 * len(text)
    assert automaton.num_bytes < 800 * len(text)
    assert 0.6 < automaton.num_bytes / taken < 1.6


def test_a_text_that_is_known_takes_no_memory():
    *_, (_, text) = texts_of(1000)
    *_, (automaton, known) = grown([text, text[300:700]])
    states = len(automaton._length)
    automaton.begin_text()
    for token in text:
        automaton.add(token)
    automaton.begin_text()
    for token in [*text, 1, 2, 3]:
        automaton.add(token)
    assert len(automaton._length) <= states + 2 * 3
    assert automaton.guess(automaton.newest) == searched([*known, text, [*text, 1, 2, 3]], [*text, 1, 2, 3], LONGEST)
