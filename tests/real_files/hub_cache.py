"""A hub cache as huggingface_hub lays it out, filled with the files that some program wanted."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

OLD, NEW = "0" * 39 + "1", "f" * 40
"""Commits."""


def fill(
    cache: Path,
    name: str,
    files: Mapping[str, Path],
    commit: str = NEW,
    refs: Iterable[str] = ("main",),
    others: Iterable[str] | None = (),
) -> Path:
    """Put a repository's files into a cache, as programs do that download them one by one; the snapshot's folder.

    Args:
        cache: the cache's folder, which may hold other commits of this repository.
        name: the repository's.
        files: where the files come from, by their paths there.
        commit: they are this commit's.
        refs: branches and tags that stand at the commit.
        others: files that the repository has and nobody fetched; None: the cache has no listing of the repository, as
            after programs that asked for single files alone.
    """
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    entries = {}
    for path, source in files.items():
        entries[path] = entry = _entry(source)
        blob = repository / "blobs" / (entry.lfs_sha256 or entry.blob_id)
        blob.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, blob)
        link = snapshot / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        place = repository / "refs" / ref
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(commit)
    if others is not None:
        entries |= {path: TreeCacheEntry(size=2, blob_id="0" * 40) for path in others}
        write_tree_cache(str(repository), commit, entries)
    return snapshot


def _entry(file: Path) -> TreeCacheEntry:
    """What a hub lists of a file: weights are large ones, and known by another hash."""
    content = file.read_bytes()
    blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if file.suffix != ".safetensors":
        return TreeCacheEntry(size=len(content), blob_id=blob_id)
    sha256 = hashlib.sha256(content).hexdigest()
    return TreeCacheEntry(size=len(content), blob_id=blob_id, lfs_sha256=sha256, lfs_size=len(content))


def of_folder(folder: Path, *without: str) -> dict[str, Path]:
    """A model folder's files by their names, but some."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.name not in without}
