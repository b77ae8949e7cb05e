"""Where the sockets between workers are: a folder that can be written, with a path that leaves room for their names."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ppd_runtime import PPDRuntime
from ppd_runtime.launch import socket_folder
from ppd_runtime.launch.socket_folder import SocketFolder

UNWRITABLE = "/proc"
"""No folder can be made there, by root either."""
RAYS = 69


@pytest.fixture
def short() -> "Callable[[], Path]":
    """Makes folders with short paths."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as within:
        yield lambda: Path(tempfile.mkdtemp(prefix="", dir=within))


@pytest.fixture(autouse=True)
def no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of the usual ones can be written; pytest has its own by then."""
    monkeypatch.setattr(socket_folder, "_USUAL", UNWRITABLE)
    monkeypatch.setattr(tempfile, "tempdir", UNWRITABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", UNWRITABLE)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def long(tmp_path: Path) -> Path:
    """A folder that can be written, and leaves no room for sockets."""
    folder = tmp_path / ("d" * 60) / ("d" * 60)
    folder.mkdir(parents=True)
    return folder


def place_of(longest_name: int = 11) -> Path:
    """Where a new one is; nothing else may be left there."""
    with SocketFolder(longest_name) as folder:
        path = Path(folder.path)
        assert path.stat().st_mode & 0o777 == 0o700
        assert not list(path.iterdir())
        assert list(path.parent.iterdir()) == [path]
    assert not path.exists()
    return path.parent


def test_it_is_in_the_temporary_folder_where_that_will_do(
    short: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, usual, runtime = short(), short(), short()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(socket_folder, "_USUAL", str(usual))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert place_of() == temporary


def test_a_temporary_folder_may_be_long_for_our_names_and_too_long_for_rays(
    short: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, usual = short() / ("d" * 30), short()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(socket_folder, "_USUAL", str(usual))
    assert place_of() == temporary
    assert place_of(RAYS) == usual
    assert not list(temporary.iterdir())


def test_where_the_temporary_one_is_too_long_and_tmp_cannot_be_written_it_is_elsewhere(
    short: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, runtime, cache = long(tmp_path), short(), short()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert place_of() == cache / "ppd_runtime"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert place_of() == runtime
    assert place_of(RAYS) == runtime
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert place_of() == cache / "ppd_runtime"
    assert not list(temporary.iterdir())


def test_without_any_a_line_says_why_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = long(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/sys")
    with pytest.raises(
        ValueError, match=r"^there is no folder for sockets \(.*\): set TMPDIR to a short one"
    ) as caught:
        SocketFolder()
    for place, why in ((temporary, "AF_UNIX path too long"), (UNWRITABLE, os.strerror(2)), ("/sys", "")):
        assert f"{place}: {why}" in str(caught.value)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("launcher", ["processes", "ray"])
def test_a_runtime_is_refused_before_anything_is_started(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    runtime = PPDRuntime(model_folder("llama", num_layers=4), k=1, launcher=launcher, compile=False)
    with pytest.raises(ValueError, match="there is no folder for sockets"):
        runtime.start()


def test_a_link_leads_to_where_the_sockets_are(short: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who clears up looks for open files by their real paths."""
    temporary, link = short(), short() / "link"
    link.symlink_to(temporary)
    monkeypatch.setattr(tempfile, "tempdir", str(link))
    assert place_of() == temporary
