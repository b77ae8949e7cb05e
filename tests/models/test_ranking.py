"""Guesses ranked in one native call are those that PyTorch's operators rank."""

import math

import pytest
import torch

from ppd_runtime.models.native.ranking import likeliest
from ppd_runtime.pipeline.staged.chances import GuessRecord, in_millionths
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams

INFINITE, NONE = math.inf, math.nan


@pytest.mark.parametrize("size", [3, 63, 64, 65, 2048, 5001])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}], ids=str)
def test_they_are_pytorchs(size: int, rows: int, settings: dict[str, float]) -> None:
    scores = 4 * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    sampler, texts = Sampler(SamplingParams(seed=3, **settings)), [[1] * (5 + row) for row in range(rows)]
    for k in (1, 3):
        expected, found = sampler.guesses(scores, texts, k), sampler.guesses(scores, texts, k, likeliest)
        assert [[token for token, _ in row] for row in found] == [[token for token, _ in row] for row in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert [chance for _, chance in ours] == pytest.approx([chance for _, chance in theirs], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "places"),
    [
        ([1.0, 3.0, 3.0, 2.0], [1, 2, 3]),
        ([0.0, -0.0, 0.0, -1.0], [0, 1, 2]),
        ([1.0, NONE, 2.0, NONE], [1, 3, 2]),
        ([-INFINITE] * 4, [0, 1, 2]),
        ([5.0, INFINITE, 6.0, INFINITE], [1, 3, 2]),
        ([NONE] * 4, [0, 1, 2]),
    ],
)
def test_the_first_among_equals_comes_first(scores: list[float], places: list[int]) -> None:
    """Behind others in a row of 200, too. Where scores are no numbers, no chance is above 0."""
    for before in (0, 197):
        row = torch.tensor([[-INFINITE] * before + scores])
        ((*found,),) = likeliest(row, 3, 1.0) or [[]]
        low = scores == [-INFINITE] * 4
        assert [token for token, _ in found] == ([0, 1, 2] if low else [before + place for place in places])
        assert all(0 <= chance <= 1 for _, chance in found)
        if NONE in scores or INFINITE in scores or low:
            assert {chance for _, chance in found} == {0.0}


def test_scores_of_another_kind_are_left_to_pytorch() -> None:
    assert likeliest(torch.randn(2, 8, dtype=torch.float64), 3, 1.0) is None
    assert likeliest(torch.randn(8, 2).t(), 3, 1.0) is None
    assert likeliest(torch.randn(2, 8, dtype=torch.bfloat16), 3, 1.0) is None


def test_more_are_asked_for_than_there_are() -> None:
    ((*found,),) = likeliest(torch.tensor([[0.0, 1.0]]), 5, 1.0) or [[]]
    assert [token for token, _ in found] == [1, 0]
    assert sum(chance for _, chance in found) == pytest.approx(1)


@pytest.mark.parametrize("ranking", [None, likeliest])
def test_scores_that_are_no_numbers_give_guesses_without_a_chance(ranking: object) -> None:
    """A stage goes on with them: a broken model's tokens are ordinary decoding's, too."""
    logits = torch.full((2, 40), NONE)
    for row in Sampler(SamplingParams()).guesses(logits, [[1], [2]], 3, ranking):  # type: ignore[arg-type]
        assert len({token for token, _ in row}) == 3
        assert {chance for _, chance in row} == {0.0}
        assert in_millionths(row) == (0, 0, 0)
        assert GuessRecord().chance(1, 0, row[0][1]) == 0
