"""Compiling for GPUs where CUDA came with pip's PyTorch alone: headers in parts, and no driver that `-lcuda` finds."""

import subprocess
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from ppd_runtime.models.compiled import toolkit
from ppd_runtime.models.native.library import cpp_compiler

USES_CUDA = """
#include <cuda.h>
#include <cublas_v2.h>
extern "C" int asks() { return cuDriverGetVersion() + CUBLAS; }
"""


def build(folder: Path, name: str, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A shared library of a source."""
    (folder / "source.cpp").write_text(source)
    command = [cpp_compiler(), "-shared", "-fPIC", "source.cpp", "-o", name, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package `nvidia` of a machine without CUDA_HOME: a folder of headers for each library."""
    package = tmp_path / "site-packages" / "nvidia"
    for library, header, text in (
        ("cuda_runtime", "cuda.h", 'extern "C" int cuDriverGetVersion();'),
        ("cublas", "cublas_v2.h", "#define CUBLAS 1"),
    ):
        (package / library / "include").mkdir(parents=True)
        (package / library / "include" / header).write_text(text)
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    found = {"nvidia": spec, "triton": spec}
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", found.get)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    return package


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver under its full name alone."""
    (tmp_path / "driver").mkdir()
    file = tmp_path / "driver" / "libcuda.so.1"
    made = build(file.parent, file.name, 'extern "C" int cuDriverGetVersion() { return 12; }')
    assert made.returncode == 0, made.stderr
    monkeypatch.setattr(toolkit, "_DRIVER", str(file))
    return file


@pytest.mark.usefixtures("wheels", "driver")
def test_code_compiles_and_links_with_what_came_with_pytorch(tmp_path: Path) -> None:
    toolkit.check_toolkit()
    with toolkit.toolkit():
        includes = [f"-I{path}" for path in cpp_extension.include_paths("cuda", torch_include_dirs=False)]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths("cuda", torch_include_dirs=False)]
        made = build(tmp_path, "code.so", USES_CUDA, *includes, *libraries, "-lcuda", "-Wl,--no-undefined")
    assert made.returncode == 0, made.stderr
    assert cpp_extension.CUDA_HOME is None
    assert build(tmp_path, "code.so", USES_CUDA).returncode != 0, "or the toolkit was no help"


def test_a_toolkit_that_is_installed_is_taken(
    wheels: Path, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    with toolkit.toolkit():
        assert str(tmp_path) == cpp_extension.CUDA_HOME


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda package: (package / "cuda_runtime/include/cuda.h").unlink(), "there is no include/cuda.h in CUDA_HOME"),
        (lambda package: None, "code for GPUs needs the driver's libcuda.so.999: compile where there is one"),
    ],
)
def test_what_is_missing_is_named(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], line: str
) -> None:
    damage(wheels)
    monkeypatch.setattr(toolkit, "_DRIVER", "libcuda.so.999")
    with pytest.raises(ValueError, match=line):
        toolkit.check_toolkit()
