"""SmolLM2 by every layout and method, in processes: each answer is ordinary decoding's."""

import pytest
from grids import nightly
from smollm2 import QUESTIONS, asked, needs_smollm2

from ppd_runtime import OrdinaryDecoding, open_method
from ppd_runtime.models.checkpoint.packages import SMOLLM2
from ppd_runtime.results import GenerationResult

pytestmark = [nightly, needs_smollm2, pytest.mark.processes]
SAMPLINGS = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7})
WAYS = [
    ("ppd", {"k": 1}),
    ("ppd", {"k": 3}),
    ("ppd", {"stages": 2}),
    ("ppd", {"stages": 3, "guess_vocab": 4096}),
    ("layerskip", {}),
    ("adaspeed", {}),
    ("swift", {"search_steps": 4}),
]
"""Kangaroo needs an adapter, which nobody has trained for this model."""


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], GenerationResult]:
    """Ordinary decoding's answers."""
    ordinary = OrdinaryDecoding(SMOLLM2)
    return {
        (question, number): ordinary.chat(asked(question), max_new_tokens=48, **sampling)
        for question in QUESTIONS
        for number, sampling in enumerate(SAMPLINGS)
    }


@pytest.mark.parametrize(("method", "settings"), WAYS)
def test_answers_are_ordinary_decodings(
    expected: dict[tuple[str, int], GenerationResult], method: str, settings: dict[str, object]
) -> None:
    with open_method(SMOLLM2, method, **settings) as generator:
        for (question, number), answer in expected.items():
            found = generator.chat(asked(question), max_new_tokens=48, **SAMPLINGS[number])
            assert (found.token_ids, found.finish_reason) == (answer.token_ids, answer.finish_reason)
