"""A grammar's masks: equal to brute force over a tiny vocabulary, and the same however the texts are walked through."""

import gc
import itertools
import json
import random
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from models_for_tests import END_ID, VOCAB_SIZE, build_tokenizer
from tokenizers import AddedToken, Tokenizer

from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.constraint import Constraint, Place
from ppd_runtime.sampling.grammar import in_library_form, limits
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.text import Pieces

PROMPT = [70, 71, 72]
TOKENIZER = build_tokenizer()
BYTES = [Pieces(TOKENIZER).of(token).content if token != END_ID else b"" for token in range(VOCAB_SIZE)]
LANGUAGES = {
    "choice": {"choice": ["yes", "yesterday", "no", "not now", "dog", "日本"]},
    "regex": {"regex": "(ab|a|ba){1,3}c?"},
    "schema": {"schema": {"enum": [True, "the fox", 12, 125, None, ["a", 1]]}},
    "grammar": {"grammar": 'start: "the " noun ("," " " noun)?\nnoun: "dog" | "fox" | "dogs"'},
}


def language(name: str) -> set[bytes]:
    """Every text of a form, by other means than a grammar."""
    if name == "choice":
        return {text.encode() for text in LANGUAGES[name]["choice"]}
    if name == "regex":
        words = ("".join(parts) for n in (1, 2, 3) for parts in itertools.product(("ab", "a", "ba"), repeat=n))
        return {(word + end).encode() for word in words for end in ("", "c")}
    if name == "grammar":
        nouns = "dog", "fox", "dogs"
        return {f"the {a}{b}".encode() for a in nouns for b in ("", *(f", {noun}" for noun in nouns))}
    texts = {json.dumps(value, separators=(",", ":")) for value in LANGUAGES[name]["schema"]["enum"]}
    spaces = ("", " ")
    listed = {f'[{a}"a"{b},{c}1{d}]' for a, b, c, d in itertools.product(spaces, repeat=4)}
    return {text.encode() for text in texts | listed}


def tokens_of() -> LLTokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken("<|grammar's|>", special=True)])
    return LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE + 1, eos_token=VOCAB_SIZE)


TOKENS = tokens_of()


def constraint(start: int = len(PROMPT), ends: Sequence[int] = (END_ID,), **form: object) -> Constraint:
    found = SamplingParams(**form).form
    assert found is not None
    return constraint_with(in_library_form(found), limits(), start, ends)


def constraint_with(
    grammar: str, bounds: LLParserLimits, start: int = len(PROMPT), ends: Sequence[int] = (END_ID,)
) -> Constraint:
    def matcher() -> LLMatcher:
        return LLMatcher(TOKENS, grammar, log_level=0, limits=bounds)

    first = matcher()
    assert not first.is_error(), first.get_error()
    return Constraint(first, matcher, TOKENS.eos_token, ends, VOCAB_SIZE, start)


def allowed(found: Constraint, place: Place) -> set[int]:
    try:
        return set(np.flatnonzero(found.allowed(place)).tolist())
    except RequestError:
        return set()


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_equal_brute_force(name: str) -> None:
    """Walk all texts of a finite language; at each place try every token of the vocabulary."""
    form, texts = LANGUAGES[name], language(name)
    found = constraint(**form)
    waiting, seen, forced = [(found.root, b"")], set[bytes](), 0
    while waiting:
        place, text = waiting.pop()
        seen.add(text)
        right = {
            token
            for token, content in enumerate(BYTES)
            if content and any(whole.startswith(text + content) for whole in texts)
        }
        right |= {END_ID} if text in texts else set()
        mask = allowed(found, place)
        if mask != right and name == "schema" and text[:1] == b"[":
            assert right <= mask  # of white space the grammar has more
        elif mask != right:  # where the text goes on in one way, the tokenizer's own token is the only one
            (only,) = mask
            assert only == found.forced(place)
            assert only in right
            assert all(BYTES[only].startswith(BYTES[one]) or BYTES[one].startswith(BYTES[only]) for one in right)
            forced += 1
        waiting += [
            (found.after(place, token), text + BYTES[token])
            for token in mask & right
            if token != END_ID and text + BYTES[token] not in seen
        ]
    assert texts & seen
    assert forced or name == "regex"


def random_texts(found: Constraint, rng: random.Random, length: int) -> list[int]:
    """Tokens that the grammar allows one after the other."""
    place, tokens = found.root, list[int]()
    while len(tokens) < length and (may := sorted(allowed(found, place) - {END_ID})):
        tokens.append(rng.choice(may))
        place = found.after(place, tokens[-1])
    return tokens


FORMS = [
    {"schema": {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"},
                "tags": {"type": "array", "items": {"enum": ["the fox", "dog"]}}}, "required": ["name", "n", "tags"]}},
    {"regex": r"([a-f]{2,5} )*(dog|fox)\."},
    {"grammar": 'start: item+\nitem: "(" item* ")" | /[a-z]+/ ";"'},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_masks_do_not_depend_on_the_way_there(form: dict[str, object]) -> None:
    """From text to text in any order, with wrong tokens tried and forced ones asked for, as from the beginning."""
    rng, walked = random.Random(1), constraint(**form)
    longest = random_texts(constraint(**form), rng, 150)
    texts = [longest[:n] for n in (150, 149, 3, 90, 0, 88, 150)]
    for text in list(texts):
        texts.append([*text[: rng.randrange(len(text) + 1)], rng.randrange(1, VOCAB_SIZE)])
        texts.append([*text, *random_texts_behind(constraint(**form), rng, text, 5)])
    rng.shuffle(texts)
    for text in texts:
        place = walked.place([*PROMPT, *text])
        if rng.random() < 0.5:
            walked.forced(place)
        walked.allows(walked.after(place, rng.randrange(VOCAB_SIZE)), 5)
        fresh = constraint(**form)
        assert allowed(walked, place) == allowed(fresh, fresh.place([*PROMPT, *text])), text
        assert walked.forced(place) == fresh.forced(fresh.place([*PROMPT, *text]))


ALIKE = 'start: "{" x "e" | "[" x "o"\nx: "h" | "q"'
"""Behind either bracket the lexer awaits the same, and the texts go on in their own ways."""


def test_a_mask_is_not_that_of_another_branch() -> None:
    walked = constraint(start=0, grammar=ALIKE)
    for text in ("{", "[", "{h", "[q", "{"):
        tokens, right = [BYTES.index(bytes([byte])) for byte in text.encode()], constraint(start=0, grammar=ALIKE)
        assert allowed(walked, walked.place(tokens)) == allowed(right, right.place(tokens)) != set(), text


def random_texts_behind(found: Constraint, rng: random.Random, text: Sequence[int], length: int) -> list[int]:
    place, tokens = found.place([*PROMPT, *text]), list[int]()
    while len(tokens) < length and (may := sorted(allowed(found, place) - {END_ID})):
        tokens.append(rng.choice(may))
        place = found.after(place, tokens[-1])
    return tokens


def test_only_the_end_follows_a_complete_text() -> None:
    found = constraint(ends=(END_ID, 7), choice=["dog"])
    tokens = TOKENIZER.encode("dog")
    place = found.place([*PROMPT, *tokens])
    assert allowed(found, place) == {END_ID, 7}
    assert found.forced(place) is None
    assert allowed(found, found.after(place, END_ID)) == set()
    assert 7 not in allowed(found, found.root)
    assert not found.allows(found.after(found.root, 299), 5)


def test_a_text_that_breaks_the_grammar_ends_the_request() -> None:
    found = constraint(start=1, choice=["dog"])  # two of the prompt's tokens count as generated
    with pytest.raises(RequestError, match="no token of the model's vocabulary continues the text"):
        found.masked(torch.zeros(VOCAB_SIZE), PROMPT)


def test_a_grammar_that_is_too_hard_at_a_place_fails_there_alone() -> None:
    """A grammar with ever more readings of a text: behind some tokens the bound on a step is reached."""
    form = SamplingParams(grammar='start: "a" | "b" s\ns: s s s | s s | "x"').form
    assert form is not None
    few = LLParserLimits(step_max_items=60, verbose_errors=False)
    found = constraint_with(in_library_form(form), few)
    right = constraint_with(in_library_form(form), limits())
    texts = [[*PROMPT, *TOKENIZER.encode("b" + "x" * number)] for number in range(12)]
    with pytest.raises(RequestError, match="cannot be followed here: .*(limit|items|complex)"):
        for text in texts:
            found.masked(torch.zeros(VOCAB_SIZE), text)
    assert not found.allows(found.place(texts[-1]), BYTES.index(b"x"))
    for text in (texts[1], PROMPT, texts[0]):
        assert allowed(found, found.place(text)) == allowed(right, right.place(text)) != set()


def test_a_lexer_that_others_have_filled_fails_no_request() -> None:
    """Each reading leaves states in the lexer that requests share, until it fails for good, also those under way."""
    form = {"regex": "[ab]*a[ab]{9}"}
    given = SamplingParams(**form).form
    assert given is not None
    grammar, made = in_library_form(given), list[LLMatcher]()

    def fresh() -> LLMatcher:
        made.append(LLMatcher(TOKENS, grammar, log_level=0, limits=limits()))
        return made[-1]

    def request() -> Constraint:
        return Constraint(shared.deep_copy(), fresh, TOKENS.eos_token, (END_ID,), VOCAB_SIZE, 0)

    shared, rng = LLMatcher(TOKENS, grammar, log_level=0, limits=limits(60)), random.Random(2)
    early = request()
    assert allowed(early, early.root)
    for _ in range(4):
        found, right = request(), constraint(start=0, **form)
        text = random_texts(right, rng, 25)
        for size in range(len(text) + 1):
            assert allowed(found, found.place(text[:size])) == allowed(right, right.place(text[:size])) != set()
    assert 0 < len(made) <= 4
    assert allowed(early, early.place(text)) == allowed(right, right.place(text))
    assert allowed(early, early.place([*text[:3], BYTES.index(b"x")])) == set()


def test_masks_are_freed_with_their_branch_and_their_request() -> None:
    """At once: collections that look at old objects are rare, and a mask of a large vocabulary has 30 kB."""
    found = constraint(regex="(ab|a|ba)*")
    ab = TOKENIZER.encode("ab")
    branch, line = found.place([*PROMPT, *TOKENIZER.encode("ba")]), found.place([*PROMPT, *ab])
    assert branch is not line
    masks = []
    for place in (branch, line):
        found.allowed(place)
        masks.append(weakref.ref(place.mask))
    del branch, line, place
    gc.disable()
    try:
        found.place([*PROMPT, *ab * 40])
        found.allowed(newest := found.place([*PROMPT, *ab * 41]))
        masks.append(weakref.ref(newest.mask))
        del newest
        assert [mask() is None for mask in masks] == [True, True, False]
        del found
        assert masks[2]() is None
    finally:
        gc.enable()


SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_choices_are_those_of_masked_scores(settings: dict[str, float]) -> None:
    """Any logits, with all that else changes them, as by transformers' processors with infinitely low scores."""
    form = FORMS[0]
    params = SamplingParams(**form, **settings)
    sampler = Sampler(params, len(PROMPT), (END_ID,), constraint(**form))
    free = Sampler(params.without_form(), len(PROMPT), (END_ID,))
    found, text = constraint(**form), [*PROMPT]
    for position in range(40):
        logits = 3 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(position))
        mask = torch.from_numpy(found.allowed(found.place(text)))
        masked = free.changed(logits[None], [text])[0].masked_fill(~mask, -torch.inf)
        plain = Sampler(SamplingParams(**{k: v for k, v in settings.items() if "penalty" not in k}))
        right = plain.choose(masked, text)
        assert sampler.choose(logits, text) == right
        (named,) = sampler.guesses(logits[None], [text], 3)
        likely = [token for token, chance in named if chance > 0]
        assert all(mask[token] for token in likely)
        if not (settings.keys() & {"top_k", "top_p"}):
            assert named[0][0] == right
        assert sampler.rank(logits, text, 1) == [named[0][0]]
        if params.temperature:
            chances = sampler.distribution(logits, text)
            assert not chances[~mask].any()
            assert chances.sum() == pytest.approx(1)
        if right == END_ID:
            return
        text.append(right)
