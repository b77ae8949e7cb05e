"""Both acceptance rules are exact samplers, over chains and trees; shared noise gives ordinary decoding's tokens."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from grids import pairs_first
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppd_runtime.methods.choices import ACCEPTANCE_RULES
from ppd_runtime.methods.drafts import Draft
from ppd_runtime.methods.verification import AcceptanceRule, acceptance_rule
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler

VOCABULARY, PROMPT, LENGTH, DRAWS = 7, (3,), 2, 1000
LONELY = 1e-4
"""Below this chance under its own hypothesis a test statistic is taken for a mistake; seeds are fixed."""


def model(seed: int) -> "TableModel":
    return TableModel(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5)


class TableModel:
    """A model whose next token depends on the newest one alone."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def logits(self, history: Sequence[int]) -> Tensor:
        return self.table[history[-1]]

    def mixed_with(self, other: "TableModel", share: float) -> "TableModel":
        return TableModel((1 - share) * self.table + share * other.table)


TARGET = model(0)
DRAFTER = TARGET.mixed_with(model(1), 0.4)


def drafted(rule: AcceptanceRule, history: list[int], depth: int, widths: Sequence[int]) -> Draft:
    """A draft by `DRAFTER`: a chain where every width is 1, else a tree that goes on behind its best token."""
    draft, text, node = Draft(history[-1]), list(history), 0
    for width in widths[:depth]:
        nodes = [draft.add(p, node) for p in rule.propose(DRAFTER.logits(text), text, width)]
        draft.steps += 1
        node = nodes[0]
        text.append(draft.tokens[node])
    return draft


def texts(rule: AcceptanceRule, widths: Sequence[int]) -> tuple[int, ...]:
    """The first `LENGTH` tokens behind the prompt."""
    history = list(PROMPT)
    while len(history) < len(PROMPT) + LENGTH:
        draft = drafted(rule, history, 3, widths)
        logits = torch.stack([TARGET.logits([token]) for token in draft.tokens])
        verdict = rule.judge(draft, logits, history)
        history += [*(draft.tokens[node] for node in verdict.path[1:]), verdict.token]
    return tuple(history[len(PROMPT) : len(PROMPT) + LENGTH])


def chances(params: SamplingParams) -> np.ndarray:
    """The target's distribution of all texts of `LENGTH` tokens."""
    sampler = Sampler(params)
    first = sampler.distribution(TARGET.logits(PROMPT), PROMPT).double()
    second = torch.stack([sampler.distribution(TARGET.logits([t]), [t]).double() for t in range(VOCABULARY)])
    return (first[:, None] * second).flatten().numpy()


def p_value(found: np.ndarray, expected: np.ndarray) -> float:
    """Chi-squared: the chance of counts this far from the expected ones or farther; rare kinds count as one."""
    rare = expected < 5
    found, expected = (np.append(some[~rare], some[rare].sum()) for some in (found, expected))
    statistic = ((found - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 0].sum()
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize(
    ("name", "widths", "top_p", "temperature"),
    pairs_first(tuple(ACCEPTANCE_RULES), [(1, 1, 1), (3, 2, 1), (1, 3, 2)], [0.95, 1.0], [0.6, 1.0]),
)
def test_chi_squared(name: str, widths: tuple[int, ...], top_p: float, temperature: float) -> None:
    counts = Counter(
        texts(acceptance_rule(name, Sampler(SamplingParams(temperature=temperature, top_p=top_p, seed=seed))), widths)
        for seed in range(DRAWS)
    )
    expected = chances(SamplingParams(temperature=temperature, top_p=top_p)) * DRAWS
    found = np.array([counts[a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)])
    assert found[expected == 0].sum() == 0
    assert p_value(found, expected) > LONELY


def test_a_rule_that_is_wrong_is_found() -> None:
    """The test above can fail: what the drafter would say is another distribution."""
    params = SamplingParams(temperature=1.0)
    expected = chances(params)
    drafter = Sampler(params).distribution(DRAFTER.logits(PROMPT), PROMPT).double().numpy()
    first = expected.reshape(VOCABULARY, VOCABULARY).sum(1)
    counts = np.random.default_rng(0).multinomial(DRAWS, drafter / drafter.sum())
    assert p_value(counts, first * DRAWS) < LONELY


@settings(deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.lists(st.integers(1, 4), min_size=0, max_size=4),
    st.sampled_from([1.0, 1.3]),
)
def test_shared_noise_gives_ordinary_decodings_tokens(
    seed: int, temperature: float, widths: list[int], penalty: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, repetition_penalty=penalty, top_k=5)
    sampler = Sampler(params)
    ordinary = list(PROMPT)
    for _ in range(LENGTH):
        ordinary.append(sampler.choose(TARGET.logits(ordinary), ordinary))
    assert texts(acceptance_rule("shared-noise", sampler), widths) == tuple(ordinary[len(PROMPT) :])


@given(st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_greedily_both_rules_are_equality(seed: int, widths: list[int]) -> None:
    rules = [acceptance_rule(name, Sampler(SamplingParams(seed=seed))) for name in ACCEPTANCE_RULES]
    assert texts(rules[0], widths) == texts(rules[1], widths)
