"""The results of a batch of prompts: a JSON line for each, written for good when it has ended, whatever else runs."""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_BEGINNING = b'{"index": '
_WAY_OUT = "run it with those settings and prompts, or give another --out"


def fingerprint(prompt: str, settings: Mapping[str, Any]) -> str:
    """What a prompt and the settings that it is answered with have for an identity."""
    return hashlib.sha256(json.dumps([prompt, settings], sort_keys=True).encode()).hexdigest()


class ResultsFile:
    """Results that outlive their writer's end, however it comes; one writer at a time, for as long as it is open.

    Args:
        path: the file; what it holds of this batch is kept, and a last line that was cut short is taken off.
        prompts: all prompts, in their order.
        settings: what the results depend on, in JSON values; a prompt's own seed comes on top of them.

    Raises:
        ValueError: the file is another batch's, or no results at all, or somebody else writes it.
    """

    def __init__(self, path: Path, prompts: list[str], settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, json.loads(json.dumps(settings))
        self._ids = [fingerprint(prompt, self._settings) for prompt in prompts]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"--out {path}: {error.strerror}; give a file that can be written") from error
        try:
            self._lock()
            self.done = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def append(self, index: int, result: Mapping[str, Any]) -> None:
        """Write a prompt's result, and return when it is on the disk."""
        row = {"index": index, "id": self._ids[index], **result, "settings": self._settings}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(index)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--out {self.path}: another job writes it; wait for its end, or give another") from error

    def _read(self) -> set[int]:
        """The prompts that are done; the file ends with a whole line then."""
        self._file.seek(0)
        *lines, cut = self._file.read().split(b"\n")
        done = {self._index(number, line) for number, line in enumerate(lines, start=1)}
        if not (cut.startswith(_BEGINNING) or _BEGINNING.startswith(cut)):
            raise ValueError(f"--out {self.path}, line {len(lines) + 1}: no result of a job; give another file")
        if cut:
            self._file.truncate(self._file.tell() - len(cut))
        return done

    def _index(self, number: int, line: bytes) -> int:
        place = f"--out {self.path}, line {number}"
        try:
            row = json.loads(line)
            index, identity, settings = row["index"], row["id"], row["settings"]
            known = self._ids[index] if index >= 0 else None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{place}: no result of a job; give another file") from error
        except IndexError:
            known = None
        if not isinstance(settings, dict):
            raise ValueError(f"{place}: no result of a job; give another file")
        if settings != self._settings:
            raise ValueError(f"{place}: was made with {self._other(settings)}; {_WAY_OUT}")
        if identity != known:
            raise ValueError(f"{place}: is the result of another prompt {index}; {_WAY_OUT}")
        return int(index)

    def _other(self, settings: Mapping[str, Any]) -> str:
        names = sorted({*settings, *self._settings})
        name = next(name for name in names if settings.get(name) != self._settings.get(name))
        return f"{name}={settings.get(name)!r}, not {self._settings.get(name)!r}"
