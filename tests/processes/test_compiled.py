"""Compiled one-token passes: bits that do not depend on the cut, numbers that are the library's, files kept on disk."""

import gc
import itertools
import os
import shutil
import weakref
import zipfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from grids import nightly
from models_for_tests import load_stage as load_eager
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.files.cache_folder import artifact, cache_folder
from ppd_runtime.methods.swift import sparse_subset
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiled import passes as compiled
from ppd_runtime.models.compiled.aoti_passes import LaunchedPasses
from ppd_runtime.models.compiled.export import compile_head, compile_layers
from ppd_runtime.models.compiled.passes import CompiledHead, CompiledLayers
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native import layers
from ppd_runtime.models.native.layers import NativeCode
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage import chunks
from ppd_runtime.models.stage.caches import ATTENDED_ROWS
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSet
from ppd_runtime.models.stage.tree_range import TreeRange

PROMPT = [40, 7, 291, 65, 133]
LENGTH = ATTENDED_ROWS + 8
ModelFolder = Callable[..., Path]


on_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def kept() -> Path:
    """The cache folder."""
    return cache_folder()


def without_compiler() -> AbstractContextManager[None]:
    return torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})


def compiled_layers(model: PreTrainedModel) -> CompiledLayers:
    return CompiledLayers(model, {1: compile_layers(model.config, model.dtype, model.device)})


def compiled_twin(stage: LayerRange) -> LayerRange:
    return LayerRange(stage.model, compiled_layers(stage.model))


def forced(stage: LayerRange, bounds: Sequence[int], prompt: Sequence[int] = PROMPT) -> list[Tensor]:
    """Hidden states of the prompt's pass and of one pass for each later token, past a step of the attended rows."""
    stage.begin(LENGTH)
    states = []
    for position in [0, *range(len(prompt), LENGTH)]:
        hidden: list[int] | Tensor = [position] if position else list(prompt)
        for first, last in itertools.pairwise(bounds):
            hidden = stage.run(first, last, hidden, position)
        states.append(hidden.clone())
    return states


def all_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_every_cut_gives_the_same_bits(model_folder: ModelFolder, kept: Path, dtype: str, device: str) -> None:
    info = describe(str(model_folder("llama")))
    code = compile_ahead(info, getattr(torch, dtype), device)
    stage = load_stage(info, 4, getattr(torch, dtype), device, code)
    whole = forced(stage, [0, 4])
    assert len({tuple(state.flatten().tolist()) for state in whole}) == len(whole)
    for bounds in ([0, 1, 4], [0, 2, 4], [0, 3, 4], [0, 1, 2, 3, 4]):
        assert all_equal(forced(stage, bounds), whole), bounds
    sub = load_stage(info, 2, getattr(torch, dtype), device, code)
    assert all_equal(forced(sub, [0, 2]), forced(stage, [0, 2])), "a model with the first layers only"


@needs_compiler
@pytest.mark.parametrize("family", ["mistral", pytest.param("gemma2", marks=nightly)])
def test_compiled_layers_compute_what_the_librarys_do(model_folder: ModelFolder, kept: Path, family: str) -> None:
    """In float32, with windows that roll; the rounding differs, so does how far it grows from here."""
    stage = load_eager(model_folder(family))
    for ours, theirs in zip(forced(compiled_twin(stage), [0, 4]), forced(stage, [0, 4]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@needs_compiler
@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=nightly)])
def test_compiled_siblings_are_what_the_librarys_tokens_are(model_folder: ModelFolder, kept: Path, family: str) -> None:
    """With a window that rolls and without, on both sides of a step of the attended rows."""
    stage, tokens = load_eager(model_folder(family)), (5, 9, 200)
    code = {3: compile_layers(stage.model.config, stage.model.dtype, stage.model.device, 3)}
    twin = LayerRange(stage.model, CompiledLayers(stage.model, code))
    for position in (3, ATTENDED_ROWS - 1, ATTENDED_ROWS + 5):
        for each in (stage, twin):
            each.begin(position + 3)
            each.run(0, 4, list(range(40, 40 + position)), 0)
        expected = []
        for token in tokens:
            expected.append(stage.run(0, 4, [token], position))
            stage.truncate(position)
        got, theirs = twin.run_candidates(tokens, position), torch.cat(expected, dim=1)
        assert torch.allclose(got, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
        stage.run(0, 4, [tokens[2]], position)
        twin.keep_candidate(position, 2)
        kept_entry, expected_entry = (each.export_entries(position, position + 1, 4) for each in (twin, stage))
        assert torch.allclose(kept_entry, expected_entry, rtol=1e-3, atol=1e-3 * float(expected_entry.abs().max()))


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "mistral", pytest.param("qwen3", marks=nightly)])
def test_a_chains_bits_are_those_of_its_tokens_alone(family: str, model_folder: ModelFolder, kept: Path) -> None:
    """So one pass over drafts says what ordinary decoding would, to the last bit; windows roll here, too."""
    model = load_eager(model_folder(family)).model
    files = {kind: compile_layers(model.config, model.dtype, model.device, kind) for kind in (1, PassKind.SEVERAL)}
    stage = LayerRange(model, CompiledLayers(model, files))
    for position in (3, ATTENDED_ROWS - 2, ATTENDED_ROWS + 5):
        stage.begin(position + 9)
        stage.run(0, 4, list(range(40, 40 + position)), 0)
        for tokens in ([9, 10], [9, 10, 11], list(range(9, 18))):
            together = stage.run(0, 4, tokens, position)
            stage.truncate(position)
            alone = [stage.run(0, 4, [token], position + i) for i, token in enumerate(tokens)]
            stage.truncate(position)
            assert torch.equal(together, torch.cat(alone, dim=1))


@needs_compiler
def test_compiled_sparse_layers_are_the_librarys(model_folder: ModelFolder, kept: Path) -> None:
    """With a window that rolls, on both sides of a step of the attended rows."""
    stage = load_eager(model_folder("mistral"))
    twin, left_out = compiled_twin(stage), LayerSet((1, 2), (2,))  # layers without MLP are compiled below, as adapters
    twin.compile_for(PassKind.WITHOUT_ATTENTION)
    for position in (3, ATTENDED_ROWS - 1, ATTENDED_ROWS + 5):
        passes = []
        for each in (stage, twin):
            each.begin(position + 1)
            each.run(0, 4, list(range(40, 40 + position)), 0)
            passes.append(each.run_subset(sparse_subset(each, left_out), [7], position))
            assert [each.length(i) for i in range(4)] == [position + (i not in left_out.attention) for i in range(4)]
        theirs, ours = passes
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
        assert not torch.equal(ours, theirs), "the library's code ran"


@needs_compiler
def test_bits_depend_neither_on_the_capacity_nor_on_dropped_tokens(model_folder: ModelFolder, kept: Path) -> None:
    stage = compiled_twin(load_eager(model_folder("llama")))
    expected = forced(stage, [0, 4])[1:4]
    stage.begin(400)
    stage.run(0, 4, PROMPT, 0)
    for position in range(len(PROMPT), 3 * ATTENDED_ROWS):
        stage.run(0, 4, [position + 1], position)
    stage.truncate(len(PROMPT))
    again = [stage.run(0, 4, [position], position) for position in range(len(PROMPT), len(PROMPT) + 3)]
    assert all_equal(again, expected)


@needs_compiler
def test_entries_of_compiled_passes_travel(model_folder: ModelFolder, kept: Path) -> None:
    winner, loser = (compiled_twin(load_eager(model_folder("llama"), last=2)) for _ in range(2))
    for stage in (winner, loser):
        stage.begin(LENGTH)
        stage.run(0, 2, PROMPT, 0)
    for position in range(len(PROMPT), len(PROMPT) + 4):
        winner.run(0, 2, [position], position)
        loser.run(0, 2, [position + 1], position)
        loser.truncate(position)
        loser.import_entries([winner.export_entries(position, position + 1, 2)[0]])
    last = len(PROMPT) + 4
    assert torch.equal(winner.run(0, 2, [9], last), loser.run(0, 2, [9], last))


@needs_compiler
def test_a_prompt_of_one_token_and_a_full_cache(model_folder: ModelFolder, kept: Path) -> None:
    stage = load_eager(model_folder("llama"))
    ours, theirs = forced(compiled_twin(stage), [0, 4], [3]), forced(stage, [0, 4], [3])
    assert torch.equal(ours[0], theirs[0]), "the library runs prompts"
    assert torch.allclose(ours[1], theirs[1], rtol=1e-3, atol=1e-3 * float(theirs[1].abs().max()))
    full = compiled_twin(stage)
    forced(full, [0, 4])
    with pytest.raises(IndexError, match=f"a cache for {LENGTH} tokens cannot hold {LENGTH + 1}"):
        full.run(0, 4, [1], LENGTH)


@needs_compiler
@pytest.mark.parametrize("tail", [1, 3])
def test_a_prompts_last_chunk_has_the_librarys_bits(
    model_folder: ModelFolder, kept: Path, monkeypatch: pytest.MonkeyPatch, tail: int
) -> None:
    """However short it is, and whatever there is code for: that differs from layout to layout."""
    monkeypatch.setattr(chunks, "ONE_PASS", 4)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (4, 4))
    info, prompt = describe(str(model_folder("llama"))), list(range(2, 10 + tail))
    code = compile_ahead(info, torch.float32, "cpu", [PassKind.ONE, PassKind.SEVERAL])
    stages = [load_stage(info, 4, torch.float32, "cpu", each) for each in (code, None)]
    states = []
    for stage in stages:
        stage.begin(LENGTH)
        states.append(stage.run(0, 4, prompt, 0))
    rows = TreeRange(stages[0], 8)
    rows.begin(LENGTH)
    parts = [
        rows.run_prompt(prompt[chunk.start : chunk.stop], chunk.start) for chunk in rows.prompt_chunks(len(prompt))
    ]
    assert len(parts) == 3
    assert all_equal([states[0], torch.cat(parts, dim=1)], [states[1]] * 2)


@needs_compiler
def test_layers_of_one_kind_are_compiled_once_and_kept(model_folder: ModelFolder, kept: Path) -> None:
    files = compile_ahead(describe(str(model_folder("llama"))), torch.float32, "cpu")[1]
    assert len(files) == 4
    assert len(set(files)) == 1
    compiled_layers(load_eager(model_folder("llama")).model)  # unpacks them
    name = files[0].name.partition("-")[0]
    before = {path: path.stat().st_mtime_ns for path in kept.glob(f"{name}*")}
    assert all(path.suffix in (".pt2", ".so", ".lock") for path in before), "nothing half-written is left"
    with without_compiler():
        compiled_layers(load_eager(model_folder("llama", seed=5)).model)
        compiled_layers(load_eager(model_folder("llama"), last=1).model)
    assert {path: path.stat().st_mtime_ns for path in kept.glob(f"{name}*")} == before


def test_without_a_compiler_there_is_one_clear_line(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with without_compiler(), pytest.raises(ValueError, match="compile: no C\\+\\+ compiler here; install g\\+\\+"):
        compiled_layers(load_eager(model_folder("llama")).model)
    assert list(cache_folder().iterdir()) == []


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ppd_runtime"
    assert cache_folder().stat().st_mode & 0o777 == 0o700
    cache_folder().chmod(0o770)
    with pytest.raises(ValueError, match=f"{tmp_path}/ppd_runtime holds code to run and others may write there.*chmod"):
        cache_folder()
    shutil.rmtree(tmp_path / "ppd_runtime")
    (tmp_path / "ppd_runtime").write_text("")
    with pytest.raises(ValueError, match="File exists.*XDG_CACHE_HOME"):
        cache_folder()


@nightly
def test_what_is_compiled_is_written_where_no_other_process_writes(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch names its files by what they contain: packages had half of what another process was writing again."""
    shared = tmp_path / "shared"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    model = load_eager(model_folder("llama")).model
    for path in compile_layers(model.config, model.dtype, model.device):
        assert NativeCode(path).metadata
    assert not list(shared.rglob("*_metadata.json"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(shared)
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_file_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("in the middle")

    def by_two(path: Path) -> None:
        artifact({"x": 1}, lambda inner: inner.write_text("the other process'"))
        path.write_text("ours")

    with pytest.raises(RuntimeError, match="in the middle"):
        artifact({"x": 1}, fail)
    assert list(cache_folder().iterdir()) == []
    path = artifact({"x": 1}, by_two)
    assert path.read_text() == "the other process'", "which was quicker"
    assert artifact({"x": 1}, fail) == path
    assert artifact({"x": 2}, lambda other: other.write_text("2")) != path


def test_a_broken_file_is_named(model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ppd_runtime.models.compiled.export._compile", lambda *args: args[-1].write_bytes(b"no zip"))
    with pytest.raises(ValueError, match="\\.pt2 cannot be loaded .*remove it to have it made again"):
        compiled_layers(load_eager(model_folder("llama")).model)


@needs_compiler
def test_a_broken_library_is_made_anew(model_folder: ModelFolder, kept: Path, tmp_path: Path) -> None:
    model = load_eager(model_folder("llama")).model
    (package,) = {Path(shutil.copy(path, tmp_path)) for path in compile_layers(model.config, model.dtype, model.device)}
    NativeCode(package)
    (library,) = tmp_path.glob("*.so")
    content = library.read_bytes()
    for number, broken in enumerate((b"", b"no code".ljust(len(content), b"!"))):
        other = Path(shutil.copy(package, tmp_path / f"other{number}.pt2"))
        unpacked = other.with_name(library.name.replace(package.stem, other.stem))
        unpacked.write_bytes(broken)
        assert NativeCode(other).metadata
        assert unpacked.read_bytes() == content


@needs_compiler
def test_tensors_of_our_own_change_no_bit(
    model_folder: ModelFolder, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose code asks us for tensors, others whose code asks PyTorch, and both in turn: one token and three."""
    model = load_eager(model_folder("llama", num_layers=4)).model
    loaded, files = {}, {}
    for whose in ("ours", "pytorchs"):
        if whose == "pytorchs":
            monkeypatch.setattr(layers, "_with_our_tensors", lambda code: code)
        folder = tmp_path / whose
        folder.mkdir()
        for tokens in (1, 3):
            (path,) = set(compile_layers(model.config, model.dtype, model.device, tokens))
            files[whose, tokens] = Path(shutil.copy(path, folder))
            loaded[files[whose, tokens]] = NativeCode(files[whose, tokens])
        assert {"_light" in path.name for path in folder.glob("*.so")} == {whose == "ours"}
    found = []
    for of_layers in (["ours"] * 4, ["pytorchs"] * 4, ["ours", "pytorchs"] * 2):
        code = {tokens: [files[whose, tokens] for whose in of_layers] for tokens in (1, 3)}
        stage = LayerRange(model, CompiledLayers(model, code, loaded=loaded))
        found.append(forced(stage, [0, 4]))
        stage.truncate(LENGTH - 3)
        found[-1].append(stage.run_candidates((5, 9, 200), LENGTH - 3))
    assert all(all_equal(states, found[0]) for states in found)


@needs_compiler
def test_a_package_where_nothing_can_be_written(
    model_folder: ModelFolder, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_eager(model_folder("llama")).model
    (package,) = {Path(shutil.copy(path, tmp_path)) for path in compile_layers(model.config, model.dtype, model.device)}
    monkeypatch.setattr(layers, "keep", lambda *_: (tmp_path / "no such folder" / "file").open("wb"))
    assert NativeCode(package).metadata
    assert not list(tmp_path.glob("*.so"))


@needs_compiler
def test_the_last_sequences_caches_are_let_go(model_folder: ModelFolder, kept: Path) -> None:
    twin = compiled_twin(load_eager(model_folder("llama")))
    forced(twin, [0, 2, 4])
    last = weakref.ref(twin.cache.layers[0])
    twin.begin(LENGTH)
    gc.collect()
    assert last() is None


@needs_compiler
def test_code_that_calls_python_is_launched_from_there(
    model_folder: ModelFolder, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the products of experts; its package says so. The bits are those of passes in one call."""
    with zipfile.ZipFile(tmp_path / "it.pt2", "w") as package:
        package.writestr("it/model.so", b"")
        assert not layers.calls_python(tmp_path / "it.pt2")
        package.writestr("it/model.json", b"{}")
    assert layers.calls_python(tmp_path / "it.pt2")
    stage = load_eager(model_folder("llama"))
    expected = forced(compiled_twin(stage), [0, 2, 4])
    monkeypatch.setattr(compiled, "calls_python", lambda path: True)
    launched = compiled_layers(stage.model)
    assert isinstance(launched._passes, LaunchedPasses)
    assert all_equal(forced(LayerRange(stage.model, launched), [0, 2, 4]), expected)


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_compiled_head_takes_any_states(model_folder: ModelFolder, kept: Path, family: str) -> None:
    info = describe(str(model_folder(family)))
    library = load_stage(info, 1, torch.float32, "cpu")
    head = compile_head(library.model.config, torch.float32, torch.device("cpu"))
    compiled = load_stage(info, 1, torch.float32, "cpu", {PassKind.HEAD: (head,)})
    assert isinstance(compiled.head, CompiledHead)
    states = torch.randn(30, compiled.model.config.hidden_size, generator=torch.manual_seed(0))
    with torch.inference_mode():
        singly = torch.cat([compiled.head(state[None, None]) for state in states], dim=1)
        for given in (states[None], states[None, :7], states[:, None], states[None, ::5]):
            assert torch.allclose(compiled.head(given), library.head(given), atol=1e-5)
        assert torch.equal(compiled.head(states[None, :7]), singly[:, :7])
