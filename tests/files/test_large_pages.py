"""Files in large pages of memory: read that way, and told from small ones."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ppd_runtime.files.checksummed import find, keep
from ppd_runtime.files.large_pages import LARGE_PAGE, in_large_pages, read_in_large_pages

NUM_PAGES = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that has been read in small pages, as a checksum or a copy does it."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(LARGE_PAGE * NUM_PAGES))
    evict(path)
    path.read_bytes()
    return path


def evict(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_in_large_pages(path: Path) -> bool:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    memory.madvise(mmap.MADV_HUGEPAGE)
    content = np.frombuffer(memory, np.uint8)
    content[:: mmap.PAGESIZE].sum()
    return in_large_pages(content.ctypes.data)


@pytest.fixture
def large_pages_are_there(tmp_path: Path) -> None:
    """Skips where a file that is mapped right away does not get them: not every kernel and file system has them."""
    path = tmp_path / "probe"
    path.write_bytes(os.urandom(LARGE_PAGE * NUM_PAGES))
    evict(path)
    if not hasattr(mmap, "MADV_HUGEPAGE") or not is_in_large_pages(path):
        pytest.skip("no large pages for files here")


@pytest.mark.usefixtures("large_pages_are_there")
def test_what_was_read_in_small_pages_is_read_again(path: Path) -> None:
    content = path.read_bytes()
    if is_in_large_pages(path):
        pytest.skip("this system reads into large pages by itself")
    read_in_large_pages(path)
    assert is_in_large_pages(path)
    assert path.read_bytes() == content


@pytest.mark.usefixtures("large_pages_are_there")
def test_a_checked_file_is_in_large_pages(path: Path, tmp_path: Path) -> None:
    kept = keep(path, tmp_path, "name", ".kept")
    for note in tmp_path.glob("*.checked"):
        note.unlink()
    evict(kept)
    assert find(tmp_path, "name", ".kept") == kept
    assert is_in_large_pages(kept)


def test_a_file_larger_than_memory_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd_runtime.files.large_pages.memory_bytes", lambda: LARGE_PAGE * NUM_PAGES)
    monkeypatch.setattr("mmap.mmap", lambda *_, **__: pytest.fail("mapped"))
    read_in_large_pages(path)


@pytest.mark.parametrize(("mapped", "inside", "expected"), [(90, True, True), (40, True, False), (90, False, False)])
def test_large_pages_are_told_from_small_ones(
    mapped: int, inside: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(10)
    first = tensor.data_ptr() - 64 if inside else tensor.data_ptr() + 4096
    text = f"{first:x}-{first + 4096:x} rw-p 00000000 fe:00 1 /a file\nRss: 100 kB\nFilePmdMapped: {mapped} kB\n"
    others = "1000-2000 r--p 00000000 00:00 0\nRss: 4 kB\nFilePmdMapped: {} kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: others.format(4) + text + others.format(0))
    assert in_large_pages(tensor.data_ptr()) is expected
