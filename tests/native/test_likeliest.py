"""The likeliest of some logits, by native code."""

import math

import pytest
import torch

from ppd_runtime.models.native.drafter import likeliest


@pytest.mark.parametrize("count", [3, 16, 37, 1000])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_the_likeliest_are_those_of_pytorch(count: int, scale: float) -> None:
    scores = 5 * torch.randn(4, count, generator=torch.Generator().manual_seed(0))
    scores[0, :2] = 50.0
    scores[1, 1:] = -math.inf
    for row, named in zip(scores, likeliest(scores, 3, scale), strict=True):
        places, chances = zip(*named, strict=True)
        expected = row.sort(descending=True, stable=True)
        assert [*places] == expected.indices[:3].tolist()
        torch.testing.assert_close(torch.tensor(chances), (scale * row).softmax(-1)[[*places]], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_no_number_has_no_chance(odd: float) -> None:
    scores = torch.arange(40.0)[None]
    scores[0, 7] = odd
    (named,) = likeliest(scores, 3, 1.0)
    assert named == [(7, 0.0), (39, 0.0), (38, 0.0)]
    (named,) = likeliest(torch.full((1, 5), -math.inf), 5, 1.0)
    assert sorted(named) == [(place, 0.0) for place in range(5)]
