"""Files that appear when they are whole."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` at the end, or goes away if something fails before.

    Raises:
        ValueError: if `path` cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
            unfinished = Path(folder) / path.name
            yield unfinished
            unfinished.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; give a file that can be written") from error
