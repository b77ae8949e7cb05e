"""The folder of an unfinished training: what it was told, the time that it has taken, and whole lines of files."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file

Progress = Callable[[str], None]
"""Is told in a line what is being done, and how far it is."""
_SAVE_EVERY_S = 5.0
_DIGESTS = {"sources_sha256": "other prompts or texts", "model_fingerprint": "a model of other weights"}
"""What differs if one of these settings does, whose values tell nobody anything."""


class WorkFolder:
    """Keeps what one run has done for the next one with the same settings.

    Args:
        folder: made if need be.
        settings: JSON values that decide the result.

    Raises:
        ValueError: if what is there was made with other settings, or nothing can be written there.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        settings, file = json.loads(json.dumps(settings)), folder / "settings.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else settings
        except OSError as error:
            raise ValueError(f"{folder}: no unfinished training can be kept there ({error})") from error
        except ValueError as error:
            raise damaged(file) from error
        if not isinstance(before, dict):
            raise damaged(file)
        for name, value in settings.items():
            if before.get(name) != value:
                other = _DIGESTS.get(name) or f"{name}={before.get(name)!r:.80}, not {value!r:.80}"
                raise ValueError(
                    f"{folder} is an unfinished training with {other}: go on with the same settings, or delete it"
                )
        write_json(file, settings)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name


class Clock:
    """Seconds that all runs of an adaptation took together, against the minutes that it was given."""

    def __init__(self, folder: WorkFolder, minutes: float) -> None:
        self._file, self.seconds = folder / "spent.json", 60 * minutes
        self._before = read_seconds(self._file) if self._file.exists() else 0.0
        self._began = self._saved = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds until now; kept for the next run every few seconds."""
        now = time.monotonic()
        spent = self._before + now - self._began
        if now - self._saved >= _SAVE_EVERY_S:
            write_json(self._file, spent)
            self._saved = now
        return spent

    def left(self, share: float) -> float:
        """Seconds until this share of the time is over, not below 0."""
        return max(0.0, share * self.seconds - self.spent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file; ValueError if it cannot be written."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps(value) + "\n", encoding="utf-8")


def damaged(path: Path) -> ValueError:
    """The error of a file that no run wrote so."""
    return ValueError(f"{path}: is damaged; delete {path.parent} to begin again")


def read_seconds(path: Path) -> float:
    """The number that a file holds; ValueError if it is damaged."""
    try:
        return float(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path) from error


def whole_lines(path: Path, length: int) -> list[Any]:
    """The lists, of so many values each, of a file's lines of JSON; an unfinished last line is cut off the file, for
    more to be appended. ValueError if another one is damaged.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise damaged(path) from error
    if not all(isinstance(line, list) and len(line) == length for line in lines):
        raise damaged(path)
    return lines


def in_words(seconds: float) -> str:
    """A time that is left."""
    return f"{seconds:.0f} s left" if seconds < 90 else f"{seconds / 60:.0f} min left"
