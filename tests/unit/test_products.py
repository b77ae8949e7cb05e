"""Products of a few tokens' states: the numbers that the plain product gives, whatever the shapes."""

import pytest
import torch

from ppd_runtime.models import products
from ppd_runtime.models.products import few_rows_linear


@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 2, 16), (1, 7, 16), (3, 2, 16), (16,), (5, 16)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("most", [0, 2**20], ids=["too large to be done twice", "small"])
def test_as_linear(shape: tuple[int, ...], biased: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "TWICE", most)
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(shape, generator=generator), torch.randn(24, 16, generator=generator)
    bias = torch.randn(24, generator=generator) if biased else None
    found = few_rows_linear(states, weight, bias)
    expected = torch.nn.functional.linear(states, weight, bias)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)
