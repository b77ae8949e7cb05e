"""The results of an unfinished run over prompts in a JSON Lines file: how it measures, then a line for each result."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ppd_runtime.files.atomic import atomic_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result", bound="DataclassInstance")
"""What a prompt gave, in JSON values."""
Header = Mapping[str, Any]
_FORMAT = 1
_WAY_OUT = "delete the file and measure again"


class PartialResults(Generic[Result]):
    """Results beside the file that they are meant for, `<out>.partial.jsonl`.

    Args:
        out: that file.
        header: how they are measured.
        read: a result from its line's JSON object; TypeError, KeyError or AttributeError if malformed.
    """

    def __init__(self, out: Path, header: Header, read: Callable[[Any], Result]) -> None:
        self._read = read
        self.path = out.with_name(out.name + ".partial.jsonl")
        self._header = json.loads(json.dumps({"format": _FORMAT, **header}))

    def open(self, resume: bool, hashes: Mapping[int, str]) -> dict[int, Result]:
        """Make the file ready to append to, and return its results by their prompts' numbers.

        Args:
            resume: go on from them.
            hashes: prompts' hashes by number; a result has its prompt's `number` and `sha256`.

        Raises:
            ValueError: it holds results and `resume` is off, they were measured otherwise or on other prompts, or it
                cannot be written.
        """
        header, *rows = self._rows() if self.path.exists() else [self._header]
        if rows and not resume:
            raise ValueError(f"{self.path} keeps {len(rows)} prompts of an unfinished run: resume it, or delete it")
        if rows:
            self._check_header(header)
        with atomic_file(self.path) as unfinished:
            unfinished.write_text("".join(map(_line, [self._header, *rows])), encoding="utf-8")
        results: list[Any] = [self._result(row) for row in rows]
        if any(hashes.get(result.number) != result.sha256 for result in results):
            raise ValueError(f"{self.path} was measured on other prompts: resume with the same ones, or delete it")
        return {result.number: result for result in results}

    def append(self, result: Result) -> None:
        """Keep one more result."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(asdict(result)))

    def discard(self) -> None:
        """Remove the file: the run is complete."""
        self.path.unlink(missing_ok=True)

    def _rows(self) -> Iterator[Any]:
        *lines, _ = self.path.read_bytes().split(b"\n")  # a last line without an end was cut short
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: not a result; {_WAY_OUT}") from error

    def _check_header(self, header: Any) -> None:
        known = header if isinstance(header, dict) else {}
        for name, value in self._header.items():
            if known.get(name) != value:
                raise ValueError(
                    f"{self.path} was measured with {name}={known.get(name)!r}, not {value!r}: "
                    "resume with the same settings, or delete it"
                )

    def _result(self, row: Any) -> Result:
        try:
            return self._read(row)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self.path}: a line is not a result; {_WAY_OUT}") from error


def _line(row: Any) -> str:
    return json.dumps(row) + "\n"
