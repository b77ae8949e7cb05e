"""Keys of a GGUF file's architecture: each is checked when read, and one that nobody reads is refused by name."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ppd_runtime.models.checkpoint.gguf.reader import GGUF, StoredTensor, Value, shown

OTHER_MODEL = "give the hub name of the model that it was made of, or a folder with its config.json and safetensors"
_MOST = 2**31 - 1
_OF_NO_MEANING = ("tensor_data_layout", "rope.scaling.finetuned")


class Metadata:
    """A file's metadata, and its tensors by name."""

    def __init__(self, gguf: GGUF, architecture: str) -> None:
        self.architecture = architecture
        self.tensors: Mapping[str, StoredTensor] = gguf.tensors
        self._values, self._asked = gguf.metadata, set[str](_OF_NO_MEANING)

    def has(self, key: str) -> bool:
        """Whether the file has the key, and not zero or an empty text."""
        value = self._get(key)
        return value is not None and (isinstance(value, np.ndarray | list) or bool(value))

    def whole(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number from 1 to `most`; if the file has one per layer, the one they share."""
        value = self._one(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self._odd(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, as it was written before it was rounded to float32."""
        value = self._one(key, default)
        with np.errstate(over="ignore"):
            rounded = np.float32(value if isinstance(value, int | float) else math.nan)
        if isinstance(value, bool) or not 0 < rounded < math.inf:
            raise self._odd(key, value)
        return float(str(rounded))

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self._get(key)
        if not isinstance(value, str | None):
            raise self._odd(key, value)
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._get(key)
        if not isinstance(value, bool | None):
            raise self._odd(key, value)
        return default if value is None else value

    def pattern(self, key: str, default: int, layers: int) -> list[bool]:
        """Which layers are of a kind: a truth value for each, or a period in which only the last layer is not."""
        value = self._get(key)
        if isinstance(value, np.ndarray):
            if len(value) != layers or not np.isin(value, (0, 1)).all():
                raise self._odd(key, value)
            return [bool(one) for one in value]
        period = self.whole(key, default)
        return [(layer + 1) % period != 0 for layer in range(layers)]

    def of_some(self, key: str, layers: int) -> tuple[int, list[bool]]:
        """A whole number that some layers share, and which these are: the others have 0."""
        value = self._get(key)
        if not isinstance(value, np.ndarray) or len(value) != layers:
            raise self._odd(key, value)
        found = {int(one) for one in value} - {0}
        if len(found) != 1 or min(found) < 0 or value.dtype.kind not in "iu":
            raise self._odd(key, value)
        return found.pop(), [bool(one) for one in value]

    def expect(self, key: str, expected: float) -> None:
        """Raise ValueError if the file has the key with another value than expected."""
        value = self._get(key)
        if value is not None and (
            isinstance(value, str | list | np.ndarray) or not math.isclose(value, expected, rel_tol=1e-6)
        ):
            raise self._odd(key, value)

    def ignore(self, key: str) -> None:
        """Mark a key that changes nothing as read."""
        self._asked.add(key)

    def check_read(self) -> None:
        """Raise ValueError for a setting of the architecture that was not read, unless it is zero."""
        for key, value in self._values.items():
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and name not in self._asked and not (isinstance(value, int | float) and not value):
                raise ValueError(f"has the setting {shown(key)} ({short(value)}), which is not read; {OTHER_MODEL}")

    def _get(self, key: str) -> Value | None:
        self._asked.add(key)
        return self._values.get(f"{self.architecture}.{key}")

    def _one(self, key: str, default: float | None) -> Value:
        value = self._get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"lacks {self.architecture}.{key}; convert the model again with llama.cpp")
        if not isinstance(value, np.ndarray):
            return value
        if not len(value) or not (value == value[0]).all():
            raise ValueError(f"has layers of different {self.architecture}.{key}, which are not read; {OTHER_MODEL}")
        one: int | float = value[0].item()
        return one

    def _odd(self, key: str, value: Value | None) -> ValueError:
        return ValueError(f"says that {self.architecture}.{key} is {short(value)}; {OTHER_MODEL}")


def short(value: object) -> str:
    """The beginning of a value, for one line of an error."""
    return " ".join(str(value).split())[:40]


Setting: TypeAlias = Callable[[Metadata], Any]
"""Reads a field of the library's configuration."""


def whole(key: str, default: int | None = None) -> Setting:
    """The whole number of a key."""
    return lambda about: about.whole(key, default)


def number(key: str, default: float | None = None) -> Setting:
    """The number of a key."""
    return lambda about: about.number(key, default)


def number_or_none(key: str) -> Setting:
    """The number of a key; None if the file has none, or zero."""
    return lambda about: about.number(key) if about.has(key) else None


def flag(key: str, default: bool) -> Setting:
    """The truth value of a key."""
    return lambda about: about.flag(key, default)


def tensor(name: str) -> Setting:
    """Whether the file has a tensor of this name."""
    return lambda about: name in about.tensors
