"""Rejection sampling follows the law of the model's own logits, whatever adapts to what became of earlier drafts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from joint_laws import (
    LONELY,
    MOST_TOKENS,
    PROMPT,
    VOCABULARY,
    KeyedByPosition,
    Rule,
    counts,
    law,
    memoryless_for_swift,
    memoryless_model,
    p_value,
    rejection,
    same_numbers,
    text_of,
)
from models_for_tests import build_model
from remembered_stage import RememberedStage
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.methods.drafts import Draft, Proposal
from ppd_runtime.methods.kangaroo import Kangaroo
from ppd_runtime.methods.layer_search import LayerSearch, SearchSettings
from ppd_runtime.methods.layerskip import AdaSpeedSettings, LayerSkip
from ppd_runtime.methods.speculation import SpeculativeMethod
from ppd_runtime.methods.stopping import Adaptation, Stopping
from ppd_runtime.methods.swift import Swift
from ppd_runtime.methods.verification import RejectionSampling
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.adapter import new_adapter
from ppd_runtime.models.trained.probe import Probe
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.noise import Draws, gumbel_noise
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler

NUM_LAYERS, EXIT_LAYER, HIDDEN_SIZE = 3, 1, 16
STEEP = Adaptation(target_rate=0.22, step=1.0, rate_memory=0, threshold_memory=0)
"""After each draft the threshold is at one of its ends."""
HIGHEST = 1 - 2.0**-53
FILTERED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}


def samples(few: int) -> list[object]:
    """Seeds of a test, and of the same one in the night."""
    return [few, pytest.param(100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)], id="many")]


@dataclass
class Parts:
    """A small random model, parts for it, and a stage of it."""

    model: PreTrainedModel
    adapter: PreTrainedModel
    probe: Probe
    stage: LayerRange


@pytest.fixture(scope="module")
def parts() -> Parts:
    model = build_model("llama", num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE, vocab_size=VOCABULARY, tied=False)
    model.lm_head.weight.data.mul_(0.6)  # so that no token is rare
    probe = Probe(HIDDEN_SIZE).requires_grad_(False)
    probe.direction.normal_(generator=torch.Generator().manual_seed(0))
    adapter = new_adapter(model, EXIT_LAYER).eval().requires_grad_(False)
    return Parts(model, adapter, probe, RememberedStage(model))


def stopping(rule: str, threshold: float = 0.5) -> Stopping:
    return Stopping(rule, 5, threshold, STEEP)


def swift(stage: LayerRange, rule: Stopping, bayes_interval: int = 0, widest: int = 10) -> Swift:
    """One that begins to search behind the first token."""
    settings = SearchSettings(skip_ratio=0.2, steps=6, bayes_interval=bayes_interval, seed=1)
    return Swift(stage, LayerSearch(NUM_LAYERS, settings), rule, window=1, widest=widest)


METHODS: dict[str, Callable[[LayerRange, Parts], SpeculativeMethod]] = {
    "layerskip": lambda stage, _: LayerSkip(stage, EXIT_LAYER, stopping("constant")),
    "adaspeed, product": lambda stage, _: LayerSkip(stage, EXIT_LAYER, stopping("product", 0.2)),
    "adaspeed, confidence": lambda stage, _: LayerSkip(stage, EXIT_LAYER, stopping("confidence")),
    "adaspeed, probe": lambda stage, p: LayerSkip(stage, EXIT_LAYER, stopping("probe", 0.2), p.probe),
    "kangaroo": lambda stage, p: Kangaroo(stage, p.adapter, EXIT_LAYER, stopping("confidence")),
    "kangaroo, probe": lambda stage, p: Kangaroo(stage, p.adapter, EXIT_LAYER, stopping("probe", 0.2), p.probe),
    "swift, trees": lambda stage, _: swift(stage, stopping("confidence")),
    "swift, chains": lambda stage, _: swift(stage, stopping("product", 0.2), widest=1),
}
BY_DAY = ("layerskip", "adaspeed, product", "kangaroo, probe", "swift, trees")
"""Each method once, and each rule that adapts once."""
CHECKS = 2 * len(METHODS) + 5
"""Tests that ask whether samples follow their law: by so many their chances are corrected."""


def asked(seed: int = 0, **others: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": MOST_TOKENS, "seed": seed} | others)


def follows(found: np.ndarray, chances: np.ndarray) -> bool:
    return p_value(found, chances) > LONELY / CHECKS


@pytest.mark.parametrize("number", samples(400))
@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in METHODS]
)
def test_joint_law_of_five_tokens(parts: Parts, name: str, number: int) -> None:
    """With all that adapts: the threshold after each draft, the widths of trees, the search before each."""
    stage, make = parts.stage, METHODS[name]
    found = counts(text_of(make(stage, parts), stage, asked(seed)) for seed in range(number))
    assert follows(found, law(LayerRange(parts.model), asked()))


@pytest.mark.parametrize("number", samples(400))
def test_joint_law_of_what_filters_keep(parts: Parts, number: int) -> None:
    stage, make = parts.stage, METHODS["adaspeed, product"]
    found = counts(text_of(make(stage, parts), stage, asked(seed, **FILTERED)) for seed in range(number))
    assert follows(found, law(LayerRange(parts.model), asked(**FILTERED)))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*METHODS, "swift, Bayesian"])
def test_joint_law_without_a_memory(parts: Parts, name: str) -> None:
    """Every pass is run, by the stage that users have."""
    stage = LayerRange(parts.model)
    make = METHODS.get(name, lambda stage, _: swift(stage, stopping("product", 0.2), bayes_interval=2, widest=1))
    found = counts(text_of(make(stage, parts), stage, asked(seed)) for seed in range(3000))
    assert follows(found, law(stage, asked()))


@pytest.fixture(scope="module")
def memoryless() -> LayerRange:
    return RememberedStage(memoryless_model((0.3, 0.3, 0.4), (0.59, 0.01, 0.4)))


def trial(stage: LayerRange, rule: Rule, number: int) -> np.ndarray:
    """AdaSPEED whose threshold moves by 0.11 with each draft's acceptance."""
    adaptation = Adaptation(target_rate=0.22, step=0.11, rate_memory=0, threshold_memory=0)
    settings = AdaSpeedSettings(stopping="confidence", num_speculations=5, threshold=0.55, adaptation=adaptation)
    method = LayerSkip(stage, 1, settings.rule)
    return counts(text_of(method, stage, asked(seed), rule) for seed in range(number))


@pytest.mark.parametrize("number", samples(3000))
def test_a_threshold_that_moves_leaves_the_law(memoryless: LayerRange, number: int) -> None:
    chances = law(memoryless, asked())
    assert chances[0, 1, 2, 0, 2] == pytest.approx(0.3 * 0.3 * 0.4 * 0.3 * 0.4, rel=1e-4)
    assert follows(trial(memoryless, rejection, number), chances)


@pytest.mark.nightly
def test_numbers_that_a_thrown_away_draft_knew_are_found(memoryless: LayerRange) -> None:
    """The test above can fail."""
    assert not follows(trial(memoryless, KeyedByPosition, 6000), law(memoryless, asked()))


@pytest.fixture(scope="module")
def for_swift() -> LayerRange:
    return RememberedStage(memoryless_for_swift((0.2, 0.6, 0.2), (0.01, 0.98, 0.01), (0.98, 0.01, 0.01)))


def second_texts(stage: LayerRange, rule: Rule, number: int) -> np.ndarray:
    """What SWIFT says when it is asked for the same again, with the same seed, and has gone on searching."""
    found = []
    for seed in range(number):
        method = swift(stage, Stopping("constant", 1), widest=1)
        text_of(method, stage, asked(seed), rule)
        found.append(text_of(method, stage, asked(seed), rule))
    return counts(found)


@pytest.mark.parametrize("number", samples(300))
def test_joint_law_of_a_second_request(for_swift: LayerRange, number: int) -> None:
    assert follows(second_texts(for_swift, rejection, number), law(for_swift, asked()))


@pytest.mark.nightly
def test_numbers_that_steered_the_search_before_are_found(for_swift: LayerRange) -> None:
    assert not follows(second_texts(for_swift, same_numbers, 600), law(for_swift, asked()))


def continued_texts(parts: Parts, rule: Rule, number: int) -> np.ndarray:
    """Two tokens, and three more behind them by another request with the same seed."""
    method, found = METHODS["adaspeed, product"](parts.stage, parts), []
    for seed in range(number):
        two = text_of(method, parts.stage, asked(seed, max_new_tokens=2), rule)
        more = text_of(method, parts.stage, asked(seed, max_new_tokens=3), rule, (*PROMPT, *two))
        found.append((*two, *more))
    return counts(found)


@pytest.mark.parametrize("number", samples(200))
def test_joint_law_of_a_text_that_is_continued(parts: Parts, number: int) -> None:
    assert follows(continued_texts(parts, rejection, number), law(LayerRange(parts.model), asked()))


def test_numbers_that_made_the_prompt_are_found(parts: Parts) -> None:
    assert not follows(continued_texts(parts, same_numbers, 200), law(LayerRange(parts.model), asked()))


def test_once_the_search_is_over_requests_repeat(parts: Parts) -> None:
    method = METHODS["swift, chains"](parts.stage, parts)
    assert method.steered_by == 0
    while not method.search.finished:
        before = method.steered_by
        text_of(method, parts.stage, asked(5, max_new_tokens=20))
        assert method.steered_by == before + 1
    assert text_of(method, parts.stage, asked(5)) == text_of(method, parts.stage, asked(5))
    assert method.steered_by == before + 1


class Given(Draws):
    """Numbers that are chosen."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def uniform(self) -> float:
        return self._numbers.pop(0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(any), st.sampled_from([0.0, 0.5, HIGHEST]))
def test_what_is_impossible_is_never_drawn(chances: list[float], number: float) -> None:
    assert chances[Given(number).token(torch.tensor(chances, dtype=torch.float64))] > 0


@given(st.floats(1e-300, 1))
def test_a_draft_as_likely_as_the_model_finds_it_stays(chance: float) -> None:
    assert HIGHEST * chance < chance


def drafted(token: int, drawn_from: Tensor) -> Draft:
    draft = Draft(0)
    draft.add(Proposal(token, 1.0, drawn_from), 0)
    return draft


def test_where_rounding_alone_rejects_the_models_own_chances_count() -> None:
    """No token is likelier than in the draft then; there is no rest to draw from."""
    rule = RejectionSampling(Sampler(asked()), Given(HIGHEST, 0.0))
    logits = torch.tensor([[-torch.inf, 0, 0], [0, 0, 0]])
    chances = Sampler(asked()).distribution(logits[0], [0])
    verdict = rule.judge(drafted(1, chances * (1 + 2.0**-51)), logits, [0])
    assert (verdict.path, verdict.token) == ((0,), 1)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_without_probabilities(wrong: float) -> None:
    """The model's are an error in a line; a draft's are a guess like any other."""
    logits = torch.tensor([[0.0, wrong, 1.0], [0.0, 1.0, 2.0]])
    rule = RejectionSampling(Sampler(asked()), Draws(0, 1))
    (proposal,) = rule.propose(logits[0], [0])
    assert proposal.distribution is None
    assert rule.judge(Draft(0), logits[1:], [0]).token in range(VOCABULARY)
    for judge in (lambda: rule.choose(logits[0], [0]), lambda: rule.judge(Draft(0), logits, [0])):
        with pytest.raises(RequestError, match="logits for position 1 are NaN or infinite"):
            judge()
    with pytest.raises(RequestError, match="NaN or infinite"):
        rule.judge(drafted(1, torch.full((3,), 1 / 3)), logits, [0])
    draft = drafted(1, torch.full((3,), 1 / 3))
    further = rule.judge(draft, logits.flip(0), [0])
    while further.token != 1:  # until it stays
        further = rule.judge(draft, logits.flip(0), [0])
    assert further.path == (0,), "the text may end before the model has no number"


def test_requests_have_numbers_of_their_own() -> None:
    keys = [(seed, length, earlier) for seed in (0, 1, 2**64 - 1) for length in (1, 2, 3) for earlier in (0, 1, 2)]
    rows = [[draws.uniform() for _ in range(2000)] for draws in (Draws(*key) for key in keys)]
    shared = np.exp(-np.exp(-np.stack([gumbel_noise(0, position, 2000) for position in (1, 2, 3)]).astype(np.float64)))
    correlation = np.corrcoef(np.concatenate([rows, shared])) - np.eye(len(keys) + 3)
    assert np.abs(correlation).max() < 5.5 / 2000**0.5
    assert [Draws(7, 8, 9).uniform() for _ in range(2)] == [Draws(7, 8, 9).uniform()] * 2
