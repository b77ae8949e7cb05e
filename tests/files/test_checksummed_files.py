"""A file in the cache folder is found whole before it is read, or found damaged, in whichever process."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from damage import WAYS, flip
from disks import disk, read_only

from ppd_runtime.files import cache_folder as artifacts
from ppd_runtime.files import checksummed
from ppd_runtime.files.cache_folder import artifact, cache_folder, temporary_folder
from ppd_runtime.files.checksummed import checksum, find, is_whole, keep, only_one

NAME, SUFFIX = "a" * 32, ".bin"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder; the temporary one is the test's own, too. Blocks are small, and each check is noted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(checksummed, "BLOCK", 1000)
    monkeypatch.setattr(checksummed, "WORTH_NOTING", 1)
    return cache_folder()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that have been read for it."""
    seen, check = [], checksummed.is_whole
    monkeypatch.setattr(checksummed, "is_whole", lambda path: seen.append(path) or check(path))
    return seen


def kept(folder: Path, size: int = 4321, seed: int = 0) -> Path:
    made = folder / "made"
    made.write_bytes(random.Random(seed).randbytes(size))
    path = keep(made, folder, NAME, SUFFIX)
    made.unlink()
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 54_321])
def test_each_byte_counts(folder: Path, size: int) -> None:
    path = kept(folder, size)
    assert is_whole(path)
    content = path.read_bytes()
    for place in sorted({0, size // 3, size // 2, size - 1} & set(range(size))):
        flip(path, place)
        assert not is_whole(path), place
        path.write_bytes(content)
    others = [content + b"\0", content[:-1] + b"\0\0"]
    if size > 1000:
        others += [content[:-1], content[1000:2000] + content[:1000] + content[2000:], content[: size // 2]]
    for other in others:
        path.write_bytes(other)
        assert not is_whole(path)
    path.unlink()
    assert not is_whole(path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("noted", [1, 2**30])
def test_what_is_damaged_is_removed_with_one_line(
    folder: Path, way: str, noted: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checksummed, "WORTH_NOTING", noted)
    path = kept(folder)
    assert find(folder, NAME, SUFFIX) == path
    WAYS[way](path)
    assert find(folder, NAME, SUFFIX) is None
    assert warnings_of(caplog) == [f"{path} is damaged, so it is removed and made again"]
    assert not path.exists()
    assert kept(folder) == path
    assert find(folder, NAME, SUFFIX) == path
    assert len(warnings_of(caplog)) == 1


def test_processes_that_start_together_share_a_check(folder: Path, checks: list[Path]) -> None:
    path = kept(folder)
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: find(folder, NAME, SUFFIX), range(24))) == {path}
    assert len(checks) == 1


@pytest.mark.parametrize("since", ["written", "written with its old time", "long ago", "another host", "a torn note"])
def test_who_starts_later_checks_again(
    since: str, folder: Path, tmp_path: Path, checks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(folder)
    assert find(folder, NAME, SUFFIX) == path
    checks.clear()
    assert find(folder, NAME, SUFFIX) == path
    assert not checks
    about, (note,) = path.stat(), folder.glob("*.checked")
    if since.startswith("written"):
        path.write_bytes(path.read_bytes())
    if since.endswith("old time"):
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    if since == "long ago":
        now = time.time()
        monkeypatch.setattr(checksummed.time, "time", lambda: now + 301)
    if since == "another host":
        (tmp_path / "boot").write_text("another")
        monkeypatch.setattr(checksummed, "_BOOT", tmp_path / "boot")
    if since == "a torn note":
        note.write_text(note.read_text()[:-5])
    assert find(folder, NAME, SUFFIX) == path
    assert checks == [path]


def test_two_that_find_it_damaged_remove_it_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And not what the first of them has made again under the same name."""
    path = kept(folder)
    good = shutil.copy(path, folder / "good")
    flip(path)
    meeting = threading.Barrier(4)

    def anew(_: int) -> Path:
        meeting.wait(10)
        return find(folder, NAME, SUFFIX) or keep(Path(good), folder, NAME, SUFFIX)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(anew, range(4))) == {path}
    assert is_whole(path)
    assert len(warnings_of(caplog)) == 1


def test_a_damaged_one_does_not_hide_a_whole_one(folder: Path) -> None:
    """As two hosts leave them, whose locks do not reach each other."""
    first, second = kept(folder, seed=1), folder / "made"
    second.write_bytes(b"another host's")
    other = folder / f"{NAME}-{checksum(second)}{SUFFIX}"
    second.rename(other)
    flip(first)
    assert find(folder, NAME, SUFFIX) == other
    assert find(folder, NAME, ".other") is None


_HOLDER = """
import sys, time
from pathlib import Path
from ppd_runtime.files.checksummed import only_one, unfinished
with only_one(Path(sys.argv[1]), sys.argv[2]), unfinished(Path(sys.argv[1], "it")) as new:
    new.write_text("half")
    print("holds it", flush=True)
    time.sleep(60)
"""


def test_who_is_killed_in_the_middle_is_not_waited_for(folder: Path) -> None:
    command = [sys.executable, "-c", _HOLDER, str(folder), NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "holds it\n"
        holder.kill()
    began = time.monotonic()
    path = kept(folder)
    assert time.monotonic() - began < 30
    assert find(folder, NAME, SUFFIX) == path


def test_a_folder_that_can_be_read_only(tmp_path: Path, checks: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """Each process checks for itself there; what is damaged is left alone, and named each time."""
    with disk(tmp_path / "disk", 100) as folder:
        path = kept(folder)
        for note in folder.glob("*.checked"):
            note.unlink()
        read_only(folder)
        checks.clear()
        assert [find(folder, NAME, SUFFIX) for _ in range(2)] == [path] * 2
        assert len(checks) == 2
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        flip(path)
        read_only(folder)
        assert [find(folder, NAME, SUFFIX) for _ in range(2)] == [None] * 2
        assert len(warnings_of(caplog)) == 2
        (tmp_path / "made").write_text("anew")
        with pytest.raises(OSError, match="Read-only file system"):
            keep(tmp_path / "made", folder, NAME, SUFFIX)


@pytest.mark.parametrize("state", ["full", "read only", "no folder", "open to others"])
def test_what_cannot_be_kept_is_made_in_a_temporary_folder(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, for all processes of the host; the line names the variable that helps."""
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"code" * 50_000)

    with disk(tmp_path / "disk", 100) as base:
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        if state == "no folder":
            (base / "ppd_runtime").write_text("in the way")
        elif state == "open to others":
            cache_folder().chmod(0o777)
        if state == "read only":
            read_only(base)
        paths = {artifact({"x": 1}, make) for _ in range(3)}
        assert paths == set(temporary_folder().glob("*.pt2"))
        assert len(made) == 1
        (line,) = warnings_of(caplog)
        assert line.startswith(f"compiled code stays in {temporary_folder()} only: ")
        assert "set XDG_CACHE_HOME to " in line
        assert not list(base.rglob("*.unfinished"))
        monkeypatch.setattr(artifacts, "temporary_folder", lambda: base / "nowhere")
        with pytest.raises(ValueError, match="^compile: .*set XDG_CACHE_HOME and TMPDIR to folders that can be writ"):
            artifact({"x": 2}, make)


def test_a_damaged_artifact_is_made_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = []

    def make(path: Path) -> None:
        path.write_text("code" * 100)
        made.append(path)

    path = artifact({"x": 1}, make)
    assert not list(Path(tempfile.gettempdir()).iterdir()), "where the cache folder serves, nothing else is made"
    flip(path)
    assert artifact({"x": 1}, make) == artifact({"x": 1}, make) == path
    assert len(made) == 2
    assert warnings_of(caplog) == [f"{path} is damaged, so it is removed and made again"]


def test_a_link_in_the_place_of_the_temporary_folder_is_refused(tmp_path: Path) -> None:
    """Anybody may put one where all users' temporary files are."""
    (tmp_path / "somebody's").mkdir(mode=0o700)
    Path(tempfile.gettempdir(), f"ppd_runtime-{os.getuid()}").symlink_to(tmp_path / "somebody's")
    with pytest.raises(ValueError, match="is a link; remove it, or set XDG_CACHE_HOME"):
        temporary_folder()


def test_a_lock_is_waited_for_but_not_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksummed, "PATIENCE_S", 0.1)
    with only_one(folder, NAME), pytest.raises(TimeoutError, match="could not be acquired"), only_one(folder, NAME):
        pass
