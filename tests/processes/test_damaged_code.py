"""Compiled code that has been damaged since is found out before it is loaded, and made again: never a crash, an error
that stays, or another token."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from damage import clear, cut, flip
from disks import disk, read_only
from grids import nightly
from transformers import PretrainedConfig

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.files.checksummed import is_whole
from ppd_runtime.models.compiled import passes as compiled
from ppd_runtime.models.compiled.aoti_passes import LaunchedPasses
from ppd_runtime.models.compiled.export import compile_head, compile_layers
from ppd_runtime.models.compiled.passes import CompiledLayers
from ppd_runtime.models.native import library

pytestmark = needs_compiler
PROMPT, LENGTH = [40, 7, 291], 12


@pytest.fixture(scope="module")
def model(model_folder: Callable[..., Path]) -> str:
    return str(model_folder("llama", num_layers=2))


@pytest.fixture(scope="module")
def made(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """A cache folder with the model's code, and ordinary decoding's tokens with it; the code is all tests'."""
    base = tmp_path_factory.mktemp("made")
    folder = base / "ppd_runtime"
    folder.mkdir()
    for path in [Path(library.load()._name), *_packages(model), _head(model)]:
        shutil.copy(path, folder)
    library._loaded.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base))
        tokens = generated(model)
    yield folder, tokens
    library._loaded.cache_clear()


@pytest.fixture
def cache(made: tuple[Path, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's own copy of the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(shutil.copytree(made[0], tmp_path / "ppd_runtime"))


def generated(model: str) -> tuple[int, ...]:
    decoding = OrdinaryDecoding(model, compile=True, dtype="float32")
    return decoding.generate(PROMPT, max_new_tokens=LENGTH).token_ids


def unpacked(cache: Path) -> list[Path]:
    """The libraries of layers and head, which are named after the package and their own checksum."""
    return [path for path in cache.glob("*.so") if path.stem.count("-") == 2]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@nightly
@pytest.mark.parametrize("damage", [flip, clear, cut])
def test_libraries_of_layers(
    damage: Callable[[Path], None], model: str, made: tuple, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = unpacked(cache)
    assert len(paths) == 2
    for path in paths:
        damage(path)
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert generated(model) == made[1]
    assert sorted(warnings_of(caplog)) == [f"{p} is damaged, so it is removed and made again" for p in sorted(paths)]
    assert all(map(is_whole, paths))


@nightly
def test_our_own_library(model: str, made: tuple, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (own,) = set(cache.glob("*.so")) - set(unpacked(cache))
    clear(own)
    library._loaded.cache_clear()
    assert generated(model) == made[1]
    assert warnings_of(caplog) == [f"{own} is damaged, so it is removed and made again"]
    assert is_whole(own)


def test_a_package_behind_a_workers_back(
    model: str, made: tuple, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that takes a dead one's place is told of files that were whole when the first one started."""
    with PPDRuntime(model, k=1, transport="local", compile=True, dtype="float32") as runtime:
        assert runtime.generate(PROMPT, max_new_tokens=LENGTH).token_ids == made[1]
        (package,) = _packages(model)
        clear(package)
        stage = OrdinaryDecoding(model, dtype="float32").stage
        CompiledLayers(stage.model, {1: [package] * 2})
        assert warnings_of(caplog) == [f"{package} is damaged, so it is removed and made again"]
    assert generated(model) == made[1]
    (whole,) = _packages(model)
    whole.unlink()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ValueError, match="compiler"):
        CompiledLayers(stage.model, {1: [whole] * 2})


def _packages(model: str) -> set[Path]:
    return set(compile_layers(_config(model), torch.float32, torch.device("cpu")))


def _head(model: str) -> Path:
    return compile_head(_config(model), torch.float32, torch.device("cpu"))


def _config(model: str) -> PretrainedConfig:
    return OrdinaryDecoding(model, dtype="float32").stage.model.config


@nightly
def test_packages_of_code_that_is_launched(
    model: str, made: tuple, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As GPUs have it: PyTorch loads it, and would end the process."""
    monkeypatch.setattr(compiled, "calls_python", lambda path: True)
    decoding = OrdinaryDecoding(model, compile=True, dtype="float32")
    assert isinstance(decoding.stage._compiled._passes, LaunchedPasses)
    (package,) = _packages(model)
    clear(package)
    assert generated(model) == made[1]
    assert warnings_of(caplog) == [f"{package} is damaged, so it is removed and made again"]
    assert len(list(cache.glob("*.pt2"))) == 2


@nightly
def test_a_folder_that_can_be_read_only(
    model: str, made: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is there is used; what is not is compiled into a temporary folder, and stays there for the next start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with disk(tmp_path / "disk", 20_000) as base:
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        cache = Path(shutil.copytree(made[0], base / "ppd_runtime"))
        head = min(cache.glob("*.pt2"), key=lambda path: path.stat().st_size)
        head.unlink()
        for path in unpacked(cache):
            path.unlink()
        read_only(base)
        for starts in (1, 2):
            assert generated(model) == made[1], starts
            (line,) = [line for line in warnings_of(caplog) if "compiled code" in line]
            assert "set XDG_CACHE_HOME to a folder that can be written" in line
