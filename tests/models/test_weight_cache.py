"""A copy of weights in another dtype holds the same numbers, is made once, and is what every process computes with."""

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from damage import WAYS, clear
from disks import disk, read_only
from grids import pairs_first
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ppd_runtime.launch.startup
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.files import checksummed
from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint import weight_cache
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.weight_cache import kept_copies, map_tensors
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native.products import in_tiles, same_numbers
from ppd_runtime.models.pass_kinds import PassKind

pytestmark = pytest.mark.filterwarnings("error")


WIDE, NARROW = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _everything_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(weight_cache, "SETTLED_S", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, **changes: float) -> dict[str, torch.Tensor]:
    """A file with odd sizes, one of its tensors larger than what is written at once, and one empty."""
    torch.manual_seed(0)
    shapes = {"b": (3, 5), "large": (3000, 2000), "a": (7,), "none": (0, 4)}
    tensors = {name: torch.randn(shape) + changes.get(name, 0) for name, shape in shapes.items()}
    kinds = {"b": torch.float16, "large": NARROW, "a": WIDE}
    tensors = {name: tensor.to(kinds.get(name, NARROW)) for name, tensor in tensors.items()}
    save_file(tensors, path)
    return tensors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file in three dtypes, see `write`."""
    write(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def copy_of(path: Path, dtype: torch.dtype = WIDE, **settings: object) -> Path | None:
    return kept_copies([path], dtype, **settings).get(path)


def test_a_copy_holds_the_same_numbers(path: Path) -> None:
    original, copy = load_file(path), copy_of(path)
    mapped = dict(map_tensors(copy))
    assert mapped.keys() == original.keys()
    for name, tensor in load_file(copy).items():  # any reader of such files reads it
        assert tensor.dtype == WIDE
        assert torch.equal(tensor.to(original[name].dtype), original[name])
        assert torch.equal(mapped[name], tensor)
    first = min(tensor.data_ptr() for tensor in mapped.values() if tensor.numel())
    assert first % 64 == 0
    mapped["a"].zero_()  # training writes to its weights: to its own
    assert torch.equal(dict(map_tensors(copy))["a"], original["a"])


def test_a_copy_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bfloat16.safetensors"
    numbers = {"a": torch.ones(2**20, dtype=NARROW), "matrix": torch.arange(96.0).view(8, 12).to(NARROW)}
    save_file(numbers, path)
    assert copy_of(path, NARROW) is None
    copy = copy_of(path, NARROW, tiled=True)
    assert torch.equal(load_file(copy)["a"], numbers["a"])
    assert torch.equal(load_file(copy)["matrix"], in_tiles(numbers["matrix"]))
    assert copy_of(path, WIDE, tiled=True) is None
    assert copy_of(path, WIDE) is not None
    assert copy.stat().st_size % 2**21 == 0, "whole pages"


def test_nothing_is_rounded_unasked(path: Path, tmp_path: Path) -> None:
    for dtype in (NARROW, torch.float16, torch.float64):
        assert not kept_copies([path], dtype)
    save_file({"a": torch.arange(9)}, tmp_path / "numbers.safetensors")
    assert not kept_copies([tmp_path / "numbers.safetensors"], WIDE)
    assert not (tmp_path / "cache").exists()


def test_rounded_copies(path: Path) -> None:
    copy = copy_of(path, NARROW, may_round=lambda: True)
    assert torch.equal(dict(map_tensors(copy))["a"], load_file(path)["a"].to(NARROW))
    assert copy != copy_of(path)


@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    pairs_first(["llama", "gemma2", "glm4_moe", "gpt_oss"], ["float32", "bfloat16"], [NARROW, torch.float16, WIDE]),
)
def test_a_model_has_the_numbers_that_the_library_gives_it(
    family: str, stored: str, dtype: torch.dtype, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Some architectures want a few of their tensors in float32 whatever the dtype."""
    usual = family in ("llama", "gemma2")
    path = model_folder(family, dtype=stored) if usual else _unusual(family, stored, tmp_path / "model")
    info = describe(str(path))
    loaded = load_layers(info, info.num_layers, dtype, "cpu").state_dict()
    given = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name
    kept = list(cache_folder().glob("*.safetensors"))
    if usual:
        assert len(kept) == (str(dtype) != f"torch.{stored}")


def _unusual(family: str, stored: str, folder: Path) -> Path:
    """A small model of an architecture that the other tests do not have, a few of its tensors in float32."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4}
    others = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 300, "first_k_dense_replace": 1}
    config = CONFIG_MAPPING[family](**sizes, **heads, **others, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, stored))
    model.save_pretrained(folder)
    file = next(folder.glob("*.safetensors"))
    tensors = {n: t.float() if t.dim() == 1 else t for n, t in load_file(file).items()}
    save_file({name: torch.randn_like(t) for name, t in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def test_a_copy_is_made_once_however_many_ask(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], weight_cache._make
    monkeypatch.setattr(weight_cache, "_make", lambda *arguments: made.append(1) or make(*arguments))
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(lambda _: copy_of(path), range(16)))
    assert len(copies) == len(made) == 1


def test_another_version_of_a_file_has_another_copy(path: Path) -> None:
    old = copy_of(path)
    tensors = dict(map_tensors(old))
    times = path.stat()
    new_numbers = write(path, a=1.0)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if it had been put there with its old time
    new = copy_of(path)
    assert new != old
    assert torch.equal(dict(map_tensors(new))["a"], new_numbers["a"])
    assert torch.equal(tensors["a"] + 1, new_numbers["a"]), "who has mapped the old one keeps it"


def test_a_file_that_changes_while_it_is_copied_has_no_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def order(names: Iterable[str]) -> list[str]:
        write(path, a=1.0)
        return list(names)

    assert copy_of(path, order=order) is None
    assert "has changed meanwhile" in caplog.text
    assert not [kept for kept in cache_folder().iterdir() if "safetensors" in kept.name]
    monkeypatch.setattr(weight_cache, "SETTLED_S", 2.0)
    assert copy_of(path) is None, "it was written a moment ago"
    os.utime(path, (0, 0))
    assert copy_of(path)


def test_what_nobody_uses_any_more_goes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("unused", "used", "gone", "changed", "elsewhere")
    files = {name: tmp_path / f"{name}.safetensors" for name in names}
    copies = {}
    for name, file in files.items():
        write(file)
        with monkeypatch.context() as patch:
            if name == "elsewhere":
                patch.setattr(weight_cache.platform, "node", lambda: "another host")
            copies[name] = copy_of(file)
    for name in names:
        os.utime(copies[name], (time.time() - (15 * 86400 if name in ("used", "unused") else 700),) * 2)
    assert copy_of(files["used"]) == copies["used"], "asking for it counts"
    files["gone"].unlink()
    files["elsewhere"].unlink()
    write(files["changed"], a=1.0)
    for left, age in (("killed", 700), ("at-work", 10)):
        unfinished = cache_folder() / f"{left}.safetensors.unfinished"
        unfinished.touch()
        os.utime(unfinished, (time.time() - age,) * 2)
    there = copy_of(path)
    assert set(cache_folder().glob("*.safetensors*")) == {
        *(copies["used"], copies["elsewhere"], there),
        cache_folder() / "at-work.safetensors.unfinished",
    }


def test_makers_that_no_lock_keeps_apart_make_whole_copies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two hosts on some networks' file systems."""

    def no_locks(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(checksummed.FileLock, "acquire", no_locks)
    meeting = threading.Barrier(2)

    def order(names: Iterable[str]) -> list[str]:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(5)
        return list(names)

    with ThreadPoolExecutor(2) as pool:
        copies = list(pool.map(lambda _: copy_of(path, order=order), range(2)))
    assert copies[0] == copies[1]
    assert torch.equal(dict(map_tensors(copies[0]))["large"], load_file(path)["large"].to(WIDE))
    assert list(cache_folder().glob("*.safetensors*")) == copies[:1]


def test_a_start_without_a_home_needs_no_copies(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert copy_of(path) is None


def test_the_runtime_has_copies_made_before_its_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    events, make, workers = [], weight_cache._make, ppd_runtime.launch.startup.LocalWorkers
    monkeypatch.setattr(weight_cache, "_make", lambda *given: events.append("a copy") or make(*given))
    monkeypatch.setattr(
        ppd_runtime.launch.startup, "LocalWorkers", lambda *given: events.append("workers") or workers(*given)
    )
    with PPDRuntime("demo", k=1, transport="local", dtype="float32") as runtime:
        runtime.generate([5], max_new_tokens=2)
    assert events == ["a copy", "workers"]


def test_where_copies_are_of_no_use_there_are_none(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * sum(tensor.numel() for tensor in load_file(path).values())
    other = tmp_path / "other.safetensors"
    write(other)
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 2 * size + 1)
    assert not kept_copies([path, other], WIDE)
    assert not kept_copies([path, tmp_path / "nothing"], WIDE)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 2 * size)
    assert len(set(kept_copies([path, other], WIDE).values())) == 2


def test_without_room_each_process_converts_for_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda _: usage._replace(free=10**7))
    assert copy_of(path) is None
    assert re.search(r" [\d.]*[1-9] MB would leave too little of the 10 MB that are free", caplog.text)
    assert not list(cache_folder().iterdir())


def test_without_a_folder_each_process_converts_for_itself(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert copy_of(path) is None
    assert "no copy can be kept: cache folder" in caplog.text
    model = load_layers(describe("demo"), 1, WIDE, "cpu")
    assert model.dtype == WIDE


def test_a_copy_that_cannot_be_mapped_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_layers(describe("demo"), 1, WIDE, "cpu")
    (copy,) = cache_folder().glob("*.safetensors")

    def no_memory(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(weight_cache.mmap, "mmap", no_memory)
    assert load_layers(describe("demo"), 1, WIDE, "cpu").dtype == WIDE
    assert "model.safetensors itself, for its copy cannot be: OSError: [Errno 12] Cannot allocate memory" in caplog.text
    assert copy.exists()


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{"])
def test_a_damaged_copy_is_named(tmp_path: Path, content: bytes) -> None:
    damaged = tmp_path / "kept.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"kept\.safetensors is damaged"):
        list(map_tensors(damaged))


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_copy_gives_no_wrong_token(
    way: str, model_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """In ordinary decoding and in a pipeline; the copy is whole afterwards."""
    folder, texts = str(model_folder("llama", dtype="bfloat16")), []
    for damaged in (False, True, True):
        (copy,) = cache_folder().glob("*.safetensors") if texts else (None,)
        if damaged:
            WAYS[way](copy)
        if len(texts) < 2:
            texts.append(OrdinaryDecoding(folder, dtype="float32").generate([5, 9], max_new_tokens=12).token_ids)
        else:
            with PPDRuntime(folder, k=1, transport="local", dtype="float32") as runtime:
                texts.append(runtime.generate([5, 9], max_new_tokens=12).token_ids)
        lines = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
        assert lines == [f"{copy} is damaged, so it is removed and made again"] * damaged
        caplog.clear()
    assert texts == texts[:1] * 3
    assert load_file(copy).keys() == load_file(model_folder("llama", dtype="bfloat16") / "model.safetensors").keys()


def test_a_disk_that_fills_up_while_a_copy_is_made(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path / "disk", 1000) as base:
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        monkeypatch.setattr(weight_cache, "_check_room", lambda num_bytes: None)
        assert copy_of(path) is None
        assert "No space left on device; set XDG_CACHE_HOME to a folder" in caplog.text
        assert [kept.suffix for kept in cache_folder().iterdir()] == [".lock"]


def test_copies_in_a_folder_that_can_be_read_only(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as an administrator's: a whole one is used, for a damaged or a missing one the model itself."""
    with disk(tmp_path / "disk", 100_000) as base:
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        copy = copy_of(path)
        read_only(base)
        assert copy_of(path) == copy
        assert not caplog.records
        assert copy_of(path, NARROW, may_round=lambda: True) is None
        assert "Read-only file system" in caplog.text
        assert caplog.text.count("\n") == caplog.text.count("set XDG_CACHE_HOME to a folder") == 1
    with disk(tmp_path / "other", 100_000) as base:
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        clear(copy_of(path))
        read_only(base)
        assert copy_of(path) is None
        assert "is damaged" in caplog.text


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


@pytest.fixture(scope="module")
def code() -> dict[PassKind, tuple[Path, ...]]:
    """Of the demo model's head, the quickest to make, in the folder that all tests share."""
    made = compile_ahead(describe("demo"), torch.float32, "cpu", ())
    return {PassKind.HEAD: made[PassKind.HEAD]}


@needs_maps
@needs_compiler
def test_compiled_code_reads_what_all_processes_share(code, monkeypatch: pytest.MonkeyPatch) -> None:
    info, passes = describe("demo"), "ppd_runtime.models.compiled.passes"
    for in_large, most_of_its_own, is_shared in ((True, None, True), (False, None, False), (False, 0, True)):
        monkeypatch.setattr(f"{passes}.in_large_pages", lambda _, found=in_large: found)
        if most_of_its_own is not None:  # a large model is shared whatever its pages
            monkeypatch.setattr(f"{passes}.MOST_IN_OWN_PAGES", most_of_its_own)
        stage = load_stage(info, 2, torch.float32, "cpu", code)
        (half,) = stage._compiled._in_bfloat16.values()
        assert half.dtype == torch.bfloat16
        assert same_numbers(half, stage.model.lm_head.weight)
        copies = {str(copy) for copy in cache_folder().glob("*.safetensors")}
        assert len(copies) == 2
        assert (_mapped_at(half.data_ptr()) in copies) == is_shared


def test_tensors_stand_in_the_order_in_which_they_are_read(path: Path) -> None:
    copy = copy_of(path, order=lambda names: sorted(names, key=["large", "none", "a", "b"].index))
    assert list(dict(map_tensors(copy))) == ["large", "none", "a", "b"]
    places = [tensor.data_ptr() for tensor in dict(map_tensors(copy)).values() if tensor.numel()]
    assert places == sorted(places)
