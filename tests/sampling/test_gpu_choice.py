"""Sampled tokens that a GPU chooses are the CPU's, and the GPU is waited for once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from two_gpus import NewTensors, Waits, on_gpu

from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler

FILTERS = ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.05}, {"min_p": 0.05, "top_p": 0.8}, {"top_k": 9, "top_p": 0.9})


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The GPU's tensors that were copied to the CPU."""
    copied = list[Tensor]()
    there = type(on_gpu(torch.empty(0), 1))
    monkeypatch.setattr(there, "cpu", lambda tensor: copied.append(tensor) or tensor.as_subclass(Tensor))
    return copied


def logits_of(seed: int) -> Tensor:
    return 3 * torch.randn(400, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_gpu_chooses_what_a_cpu_chooses(filters: dict[str, Any], temperature: float, copies: list[Tensor]) -> None:
    sampler = Sampler(SamplingParams(seed=5, temperature=temperature, **filters))
    for position in range(1, 40):
        given, history, before = logits_of(position), [7] * position, len(copies)
        expected = sampler.choose(given, history)
        with NewTensors(), Waits() as seen:
            assert sampler.choose(on_gpu(given, 1), history) == expected
        assert seen.waits + len(copies) - before <= 2
    assert len(copies) < 20 or len(filters) == 2, "most choices need no logits on the CPU"
    assert filters or not copies


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(wrong: float) -> None:
    given = logits_of(0)
    given[3] = wrong
    for logits in (given, on_gpu(given, 1)):
        with NewTensors(), pytest.raises(RequestError):
            Sampler(SamplingParams(temperature=1.0, seed=1)).choose(logits, [1])


def test_guesses_stay_there(copies: list[Tensor]) -> None:
    sampler, texts = Sampler(SamplingParams(temperature=0.8, seed=2)), [[1], [1, 2], [3] * 9]
    given = torch.stack([logits_of(seed) for seed in range(3)])
    expected = sampler.guesses(given, texts, 4)
    with NewTensors(), Waits() as seen:
        assert sampler.guesses(on_gpu(given, 1), texts, 4) == expected
    assert (seen.waits, len(copies)) == (1, 0)


def test_the_next_positions_noise_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next pass runs; what is asked for meanwhile has been made."""
    prepared = list[int]()
    sampler = Sampler(SamplingParams(temperature=1.0, seed=2))
    monkeypatch.setattr(sampler._there._noise, "prepare", lambda position, size: prepared.append(position))
    with NewTensors():
        sampler.choose(on_gpu(logits_of(0), 1), [1, 2, 3])
    assert prepared == [4]
