"""A copy of weights in another dtype holds the same numbers, is made once, and is what every process computes with."""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from compilers import needs_compiler
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ppd_runtime.models import kept_weights
from ppd_runtime.models.artifacts import cache_folder
from ppd_runtime.models.kept_weights import in_large_pages, kept_copy, map_tensors
from ppd_runtime.models.loading import HEAD, compile_ahead, describe, load_layers, load_stage

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _everything_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept_weights, "SMALLEST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with odd sizes, one of its tensors larger than what is written at once, and one empty."""
    torch.manual_seed(0)
    shapes = {"b": (3, 5), "large": (1500, 2000), "a": (7,), "none": (0, 4)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_holds_the_same_numbers(path: Path, dtype: torch.dtype) -> None:
    original, copy = load_file(path), kept_copy(path, dtype)
    mapped = dict(map_tensors(copy))
    assert mapped.keys() == original.keys()
    for name, tensor in load_file(copy).items():  # any reader of such files reads it
        assert tensor.dtype == dtype
        assert torch.equal(tensor, original[name].to(dtype))
        assert torch.equal(mapped[name], tensor)
    first = min(tensor.data_ptr() for tensor in mapped.values() if tensor.numel())
    assert first % 64 == 0
    mapped["a"].zero_()  # training writes to its weights: to its own
    assert torch.equal(dict(map_tensors(copy))["a"], original["a"].to(dtype))


def test_a_copy_is_made_once_however_many_ask(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], kept_weights._make
    monkeypatch.setattr(kept_weights, "_make", lambda *arguments: (made.append(1), make(*arguments)))
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(lambda _: kept_copy(path, torch.bfloat16), range(16)))
    assert len(copies) == len(made) == 1


def test_another_version_of_a_file_has_another_copy_and_the_old_one_goes(path: Path) -> None:
    old, other_dtype = kept_copy(path, torch.bfloat16), kept_copy(path, torch.float16)
    tensors = dict(map_tensors(old))
    before = tensors["a"].clone()
    times = path.stat()
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if it had been put there with its old time
    new = kept_copy(path, torch.bfloat16)
    assert new != old
    assert torch.equal(dict(map_tensors(new))["a"], load_file(path)["a"].to(torch.bfloat16))
    assert not old.exists()
    assert other_dtype.exists()
    assert torch.equal(tensors["a"], before), "who has mapped it keeps it"


def test_where_a_copy_is_of_no_use_there_is_none(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * sum(tensor.numel() for tensor in load_file(path).values())
    assert kept_copy(path, torch.bfloat16, most_bytes=size - 1) is None
    assert kept_copy(path, torch.float64) is None
    numbers = tmp_path / "numbers.safetensors"
    save_file({"a": torch.arange(9)}, numbers)
    assert kept_copy(numbers, torch.bfloat16) is None
    monkeypatch.setattr(kept_weights, "SMALLEST_BYTES", size + 1)
    assert kept_copy(path, torch.bfloat16) is None
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(kept_weights, "SMALLEST_BYTES", size)
    assert kept_copy(path, torch.bfloat16, most_bytes=size)


def test_without_room_each_process_converts_for_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(kept_weights.shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    assert kept_copy(path, torch.bfloat16) is None
    assert "0.0 GB would leave too little of the 0.0 GB that are free" in caplog.text
    assert not list(cache_folder().glob("*.safetensors"))


def test_without_a_folder_each_process_converts_for_itself(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert kept_copy(path, torch.bfloat16) is None
    assert "no copy can be kept: cache folder" in caplog.text
    model = load_layers(describe("demo"), 1, torch.float32, "cpu")
    assert model.dtype == torch.float32


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{"])
def test_a_damaged_copy_is_named(tmp_path: Path, content: bytes) -> None:
    damaged = tmp_path / "kept.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"kept\.safetensors is damaged, remove it to have it made anew"):
        list(map_tensors(damaged))


def test_a_copy_that_was_cut_short_is_named(path: Path) -> None:
    copy = kept_copy(path, torch.bfloat16)
    os.truncate(copy, copy.stat().st_size - 100)
    with pytest.raises(ValueError, match="is damaged"):
        list(map_tensors(copy))


def _mapped_at(place: int) -> str:
    """The file that lies at a place in this process' memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, *_, name = f"{line} ".split(" ", 5)
        first, end = (int(number, 16) for number in area.split("-"))
        if first <= place < end:
            return name.strip()
    return ""


def _own(tensors: Iterator[torch.Tensor], files: set[str]) -> int:
    """Bytes of tensors that no file holds."""
    return sum(t.numel() * t.element_size() for t in tensors if _mapped_at(t.data_ptr()) not in files)


needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell")


@needs_maps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_holds_no_copy_of_its_own(dtype: torch.dtype) -> None:
    model = load_layers(describe("demo"), 6, dtype, "cpu")
    copies = {str(copy) for copy in cache_folder().glob("*.safetensors")} if dtype == torch.float32 else set()
    assert len(copies) == (dtype == torch.float32)
    assert _own(model.parameters(), copies or {str(describe("demo").folder / "model.safetensors")}) == 0


@needs_maps
@needs_compiler
@pytest.mark.parametrize("in_large", [True, False])
def test_compiled_code_reads_what_all_processes_share(in_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd_runtime.models.compiled.in_large_pages", lambda _: in_large)
    info = describe("demo")
    code = {HEAD: compile_ahead(info, torch.float32, "cpu", ())[HEAD]}  # the quickest to make
    stage = load_stage(info, 2, torch.float32, "cpu", code)
    (half,) = stage._compiled._halves.values()
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.float(), stage.model.lm_head.weight)
    copies = {str(copy) for copy in cache_folder().glob("*.safetensors")}
    assert len(copies) == 2
    assert (_mapped_at(half.data_ptr()) in copies) == in_large
    monkeypatch.setattr("ppd_runtime.models.compiled.MOST_IN_OWN_PAGES", 0)
    stage = load_stage(info, 2, torch.float32, "cpu", code)
    (half,) = stage._compiled._halves.values()
    assert _mapped_at(half.data_ptr()) in copies, "a large model is shared whatever its pages"


def test_tensors_stand_in_the_order_in_which_they_are_read(path: Path) -> None:
    copy = kept_copy(path, torch.bfloat16, lambda: ["large", "none", "unknown", "a"])
    assert list(dict(map_tensors(copy))) == ["large", "none", "a", "b"]
    places = [tensor.data_ptr() for tensor in dict(map_tensors(copy)).values() if tensor.numel()]
    assert places == sorted(places)


@needs_maps
def test_large_pages_are_told_from_small_ones(path: Path) -> None:
    tensor = dict(map_tensors(kept_copy(path, torch.float32)))["large"]
    float(tensor.sum())
    counts = [m for m in psutil.Process().memory_maps(grouped=False) if m.path.startswith(str(cache_folder()))]
    assert counts
    assert isinstance(in_large_pages(tensor), bool)
    assert not in_large_pages(torch.zeros(10))


def test_the_header_says_what_it_was_made_of(path: Path) -> None:
    copy = kept_copy(path, torch.bfloat16)
    with safe_open(copy, "pt") as file:
        assert file.metadata() == {"made_of": str(path), "dtype": "torch.bfloat16"}
    header = copy.read_bytes()[8 : 8 + int.from_bytes(copy.read_bytes()[:8], "little")]
    assert json.loads(header)["large"]["shape"] == [1500, 2000]
