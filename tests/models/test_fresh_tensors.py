"""Tensors that are made several at a time: each is nobody else's, whoever asks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ppd_runtime.models.stage.fresh_tensors import FreshTensors, joined


@pytest.mark.parametrize("shape", [(1, 1, 256), (1, 3, 100), (2048,), (), (1, 0, 8), (50_000,), (1, 1, 10**6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_has_memory_of_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fresh, kept = FreshTensors(shape, dtype), []
    for number in range(70):
        tensor, place = fresh.take()
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert place % 64 == 0, "as PyTorch aligns what it makes"
        assert place == tensor.data_ptr() or not tensor.numel()
        kept.append(tensor.fill_(number))
        if len(kept) * tensor.nbytes > 2**26:
            break
    for number, tensor in enumerate(kept):
        assert bool((tensor == number).all())


def test_threads_share_none() -> None:
    fresh = FreshTensors((1, 1, 8), torch.float32)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: [fresh.take() for _ in range(500)], range(8)))
    places = [place for some in taken for _, place in some]
    assert len(set(places)) == len(places) == 4000


def test_those_made_during_inference_are_ordinary_tensors() -> None:
    with torch.inference_mode():
        tensor, _ = FreshTensors((1, 1, 8), torch.float32).take()
    assert not tensor.is_inference()
    weight = torch.ones(8, requires_grad=True)
    (tensor.fill_(1.0) * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_joined_in_their_order(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    states = [torch.randn(1, size, 24).to(dtype) for size in sizes]
    assert joined(states).equal(torch.cat(states, dim=1))
    rows = torch.randn(1, 4, 24)[:, ::2]
    assert joined([rows, rows]).equal(torch.cat([rows, rows], dim=1))
