"""Attention over slots, without a GPU in Triton's interpreter: a row's numbers, and its bits whatever is beside it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_for_tests import load_stage
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.stage import row_probe
from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.row_attention import ROWS, RunningRows, attention_of
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.models.stage.trees import TextRows

pytest.importorskip("triton", reason="needs Triton, as `make nightly-kernels` has it")

from ppd_runtime.models.stage.slot_attention import SPLIT
from ppd_runtime.models.stage.slot_rows import slot_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BORDERS = [1, 2, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1]
"""Entries that rows see, around those of a block and of a split."""
MORE_BORDERS = [2 * SPLIT - 1, 2 * SPLIT, 2 * SPLIT + 1]
SHAPES = [(2, 2, 64, 64), (8, 2, 32, 32), (3, 1, 80, 80), (6, 2, 24, 16)]
"""Heads, key heads, and numbers of a key and of a value."""


def texts_with(lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype, window: int | None) -> list[TextRows]:
    """A text for each length, with one row; every other one's newest entries do not lie at their positions."""
    generator, texts = torch.Generator().manual_seed(0), []
    _, heads, *dims = shape
    for number, length in enumerate(lengths):
        elsewhere = min(number % 3, length)
        cache = StageCache([None, window], length + elsewhere)
        for layer in cache.layers:
            layer.lazy_initialization(*(torch.empty(1, heads, 1, dim, dtype=dtype, device=DEVICE) for dim in dims))
        cache.fill(generator)
        path = tuple(range(elsewhere, 2 * elsewhere)) or (0,)
        texts.append(TextRows(cache, length - len(path), [path]))
    return texts


def attended(
    texts: list[TextRows], shape: tuple[int, ...], dtype: torch.dtype, layer: int, gathers: bool, cap: float = 0.0
) -> Tensor:
    """`[rows, heads, value_dim]`: what rows read, whose own numbers depend on their lengths alone."""
    heads, key_heads, dim, value_dim = shape
    inputs = []
    for of, size in ((heads, dim), (key_heads, dim), (key_heads, value_dim)):
        rows = [torch.Generator().manual_seed(size + text.kept + len(text.paths[0])) for text in texts]
        drawn = [torch.randn(1, of, 1, size, generator=row).to(dtype) for row in rows]
        inputs.append(torch.cat([*drawn, torch.ones(1, of, ROWS - len(texts), size, dtype=dtype)], dim=2).to(DEVICE))
    tables = slot_tables(texts, (0, 1), ROWS)
    rows: Any = RunningRows(texts, torch.device(DEVICE)) if gathers else tables.rows(tables.table.to(DEVICE))
    query, *entries = inputs
    module: Any = SimpleNamespace(num_key_value_groups=heads // key_heads, training=False)
    named = {"softcap": cap} if cap else {}
    found = rows.attend(capped if cap else LIBRARY, module, query, *rows.append(layer, *entries), **named)[0]
    return found[0, : len(texts)]


LIBRARY = attention_of(torch.nn.Module(), "sdpa")


def capped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, softcap: float, **_: Any
) -> tuple[Tensor, None]:
    """Gemma 2's."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (key, value))
    scores = softcap * torch.tanh(query @ key.mT * query.shape[3] ** -0.5 / softcap)
    return (scores.float().softmax(-1).to(value.dtype) @ value).transpose(1, 2), None


@pytest.mark.parametrize(("shape", "lengths"), [*((shape, BORDERS) for shape in SHAPES), (SHAPES[2], MORE_BORDERS)])
def test_lengths_around_every_border(shape: tuple[int, ...], lengths: list[int]) -> None:
    """Fewer texts than rows are padded."""
    texts = texts_with(lengths, shape, torch.float32, None)
    ours, theirs = (attended(texts, shape, torch.float32, 0, gathers) for gathers in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 64, 100, SPLIT])
def test_windows(window: int) -> None:
    shape, lengths = SHAPES[1], [1, 3, 64, 65, 100, 101, SPLIT + 1, SPLIT + 100]
    texts = texts_with(lengths, shape, torch.float32, window)
    ours, theirs = (attended(texts, shape, torch.float32, 1, gathers) for gathers in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_number_formats(dtype: torch.dtype) -> None:
    texts = texts_with(BORDERS, SHAPES[1], dtype, None)
    ours, theirs = (attended(texts, SHAPES[1], dtype, 0, gathers).float() for gathers in (False, True))
    assert (ours - theirs).norm() < torch.finfo(dtype).eps * theirs.norm()


def test_soft_caps() -> None:
    texts = texts_with(BORDERS, SHAPES[1], torch.float32, None)
    ours, theirs = (attended(texts, SHAPES[1], torch.float32, 0, gathers, 0.5) for gathers in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_company(dtype: torch.dtype) -> None:
    """Nor on its place, nor on its entries' slots, nor on how many splits others have."""
    lengths = [1, 65, 500, SPLIT + 1]
    texts = texts_with(lengths, SHAPES[1], dtype, None)
    together = attended(texts, SHAPES[1], dtype, 0, False)
    for row, text in enumerate(texts):
        assert attended([text], SHAPES[1], dtype, 0, False)[0].equal(together[row])
    assert attended(texts[::-1], SHAPES[1], dtype, 0, False).equal(together.flip(0))
    moved = [text._replace(cache=in_place(text), paths=[range_of(text)]) for text in texts]
    assert attended(moved, SHAPES[1], dtype, 0, False).equal(together)


def range_of(text: TextRows) -> tuple[int, ...]:
    return tuple(range(len(text.paths[0])))


def in_place(text: TextRows) -> StageCache:
    """The text's cache, its newest entries at their positions."""
    cache = StageCache([None, None], text.cache.capacity)
    for ours, theirs in zip(cache.layers, text.cache.layers, strict=True):
        ours.lazy_initialization(theirs.keys, theirs.values)
        for part, other in zip(ours.rows, theirs.rows, strict=True):
            part.copy_(other)
            part[text.kept : text.kept + len(text.paths[0])] = other[[text.kept + row for row in text.paths[0]]]
    return cache


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Padded passes take the kernel here, too."""
    monkeypatch.setattr(row_probe, "has_kernels", lambda device: True)
    row_probe._kernel_agrees.cache_clear()
    yield
    row_probe._kernel_agrees.cache_clear()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padded_passes_over_slots(family: str, model_folder: Callable[..., Path]) -> None:
    """A tree's rows have the bits of their own passes, in the entries too, and up to rounding the library's numbers."""
    stage, parents, position = small_range(family, model_folder), [-1, 0, 0, 2, -1, 4, 3, 1, 0], 63
    assert stage.reads_slots
    stage.begin(position + len(parents))
    stage.run(0, 2, list(range(40, 40 + position)), 0)
    together = stage.run_tree(range(9, 9 + len(parents)), parents, position)
    library = LayerRange(small_model(family, model_folder))
    for node in (3, 5, 7, 8):
        path, parent = [node], parents[node]
        while parent >= 0:
            path, parent = [parent, *path], parents[parent]
        stage.truncate(position)
        alone = [stage.run(0, 2, [9 + each], position + i) for i, each in enumerate(path)]
        assert together[:, path].equal(torch.cat(alone, dim=1))
    library.begin(position + len(path))
    library.run(0, 2, list(range(40, 40 + position)), 0)
    expected = library.run(0, 2, [9 + each for each in path], position)
    torch.testing.assert_close(together[:, path], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_cpu")
def test_texts_that_share_passes(model_folder: Callable[..., Path]) -> None:
    """Two texts in one pass have the states and the entries that each has alone."""
    stage, found = small_range("llama", model_folder), list[list[Tensor]]()
    for joined in (True, False):
        texts = list[TextRows]()
        for prompt in (5, 66):
            stage.begin(prompt + 3)
            stage.run(0, 2, list(range(40, 40 + prompt)), 0)
            texts.append(TextRows(stage.cache, prompt, [(0,), (1,), (0, 2)]))
        passes = [texts] if joined else [[text] for text in texts]
        ids = ([7, 8, 9] * len(some) for some in passes)
        states = [stage.run_rows([(given, 0, some)], 0, 0, 2) for given, some in zip(ids, passes, strict=True)]
        entries = [part for text in texts for layer in text.cache.layers for part in layer.rows]
        found.append([torch.cat(states, dim=1), *entries])
    assert all(map(torch.equal, *found))


def small_range(family: str, model_folder: Callable[..., Path]) -> RowsRange:
    return RowsRange(small_model(family, model_folder))


def small_model(family: str, model_folder: Callable[..., Path]) -> PreTrainedModel:
    return load_stage(model_folder(family, vocab_size=320, num_layers=2)).model.to(DEVICE)


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_computes_something_else_is_not_used(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model's own attention may do what the kernel does not know."""
    model = small_model("llama", model_folder)

    def other(module: Any, query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
        return LIBRARY(module, 1.01 * query, key, *rest, **named)

    monkeypatch.setattr(row_probe, "attention_of", lambda module, name: other)
    assert not row_probe.attends_to_slots(model)
    assert "gathers what each row sees, because the kernel does not compute what the model's attention" in caplog.text


def test_where_kernels_run(model_folder: Callable[..., Path]) -> None:
    assert not row_probe.has_kernels(torch.device("cpu"))
    assert row_probe.has_kernels(torch.device("cuda", 0))
    assert small_range("llama", model_folder).reads_slots == (DEVICE == "cuda")


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code of two generations, by a process of its own, since this one has the interpreter's kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).parents[1] / "compiled_kernels.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    kernels = ("_append", "_attend_split", "_join_splits")
    assert found.stdout.splitlines() == [f"{kernel} {target}" for target in (90, 80) for kernel in kernels]
