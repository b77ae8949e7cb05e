"""What a stage does with passes that are recorded: which it records, what times tell, and where passes are cut."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_for_tests import build_model
from recorded_passes import SIZE, attention, caches_in, states
from torch import Tensor
from transformers import PreTrainedModel
from two_gpus import TwoGpus, two_gpus

from ppd_runtime.models.compiled import aoti_passes
from ppd_runtime.models.compiled.aoti_passes import LaunchedPasses
from ppd_runtime.models.stage.caches import ATTENDED_ROWS, PreallocatedLayer
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.tree_range import TreeRange


@pytest.fixture
def gpus() -> Iterator[TwoGpus]:
    with two_gpus() as both:
        yield both


@pytest.mark.parametrize("large", [False, True])
def test_passes_of_large_layers_are_not_recorded(gpus: TwoGpus, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching takes no longer than they do; a recording holds for 64 tokens of one cache alone."""
    monkeypatch.setattr(aoti_passes, "_LARGEST_RECORDED", 100)
    passes = LaunchedPasses(torch.device("cuda", 1))
    layer = attention(gpus, False)
    run = layer.code.run
    code: Any = SimpleNamespace(run=lambda inputs: run(inputs[:4]), reads_mask=True)
    parts = [passes.part(code, [torch.zeros(25 + large)])]  # 100 or 104 bytes
    caches = caches_in(torch.randn(1, 2, ATTENDED_ROWS, 1, SIZE), 9)
    for position in (9, 10):
        passes.run("it", parts, [0], states(1, position), caches)
    assert len(gpus.graphs) == (0 if large else 1)
    assert passes.num_recorded == len(gpus.graphs)


class _Compiled:
    """A stage's layers as `LaunchedPasses` runs them, without the head."""

    head, reads_lists, joins_texts = None, False, False

    def __init__(self, gpus: TwoGpus, num_layers: int) -> None:
        self._passes = LaunchedPasses(torch.device("cuda", 1))
        self._parts = [attention(gpus, False) for _ in range(num_layers)]

    def runs_tree(self, tokens: int) -> bool:
        return False

    @property
    def num_recorded(self) -> int:
        return self._passes.num_recorded

    def forget(self) -> None:
        self._passes.forget()

    def run(self, first: int, last: int, hidden: Tensor, caches: list[PreallocatedLayer]) -> Tensor:
        return self._passes.run((1, first, last), self._parts[first:last], range(first, last), hidden, caches)


@pytest.fixture
def on_second_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TwoGpus, LayerRange]]:
    """A stage of 16 layers that says that its weights are there."""
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda _: torch.device("cuda", 1)))
    monkeypatch.setattr(LayerRange, "_here", lambda stage, hidden: hidden)
    with two_gpus() as gpus:
        compiled: Any = _Compiled(gpus, 16)
        yield gpus, LayerRange(build_model("llama", num_layers=16), compiled)


def test_a_pass_that_records_tells_no_layers_time(on_second_gpu: tuple[TwoGpus, LayerRange]) -> None:
    gpus, stage = on_second_gpu
    stage.begin(100)
    for cache, own in zip(stage.cache.layers, caches_in(torch.randn(16, 2, 100, 1, SIZE), 9), strict=True):
        cache.rows, cache.length = own.rows, own.length
    stage.run_pass(0, 16, states(1), 9)
    assert (len(gpus.graphs), stage.layer_seconds) == (1, 0)
    stage.run_pass(0, 16, states(1), 10)
    assert len(gpus.graphs) == 1
    assert (known := stage.layer_seconds) > 0
    stage.run_pass(0, 8, states(1), 11)
    assert (len(gpus.graphs), stage.layer_seconds) == (2, known)


def test_passes_are_cut_in_the_same_places_whatever_a_layer_takes(on_second_gpu: tuple[TwoGpus, LayerRange]) -> None:
    """Each piece is recorded by itself: pieces that follow the times would be recorded again and again."""
    _, stage = on_second_gpu
    rows, found = TreeRange(stage, 8), set()
    for stage.layer_seconds in (0.0, 1e-5, 2e-4, 3e-4, 1e-2):
        found.add(rows.layers_at_once)
    assert found == {8}
