"""The highest scores: the same on GPUs, which are waited for once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from two_gpus import NewTensors, Waits, on_gpu

from ppd_runtime.models.trained.exit_heads import ShortlistSampler
from ppd_runtime.sampling.highest import best, best_of_each
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler


def scores(rows: int, seed: int) -> Tensor:
    """Whole numbers, of which many are equal."""
    return torch.randint(0, 6, (rows, 40), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_gpu_names_what_a_cpu_names_and_is_waited_for_once(k: int) -> None:
    sampler = Sampler(SamplingParams())
    for seed in range(20):
        given = scores(3, seed)
        wanted = sampler.guesses(given, [[1]] * 3, k)
        for call, expected in (
            (lambda there: best(there[0], k), best(given[0], k)),
            (lambda there: best_of_each(there, k), best_of_each(given, k)),
            (lambda there: sampler.guesses(there, [[1]] * 3, k), wanted),
        ):
            there = on_gpu(given, 1)
            with NewTensors(), Waits() as seen:
                found = call(there)
            assert found == expected
            assert (seen.waits, seen.sent) == (1, 0)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.3}])
def test_a_shortlists_guesses_wait_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(SamplingParams(seed=3, **settings))
    among = ShortlistSampler(sampler, range(3, 43), 50)
    given = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))  # native code orders equals its own way
    wanted = among.guesses(given, [[1, 7], [2]], 3)
    there, copies, seen = on_gpu(given, 1), list[Tensor](), Waits()
    monkeypatch.setattr(type(there), "cpu", lambda tensor: copies.append(tensor.as_subclass(Tensor)) or copies[-1])
    with NewTensors(), seen:
        found = among.guesses(there, [[1, 7], [2]], 3)
    assert [[token for token, _ in row] for row in found] == [[token for token, _ in row] for row in wanted]
    assert (seen.waits + len(copies), seen.sent) == (1, 0)
