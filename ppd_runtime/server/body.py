"""A request's JSON object: its known fields, and which values count as an absent field."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

_MOST_FIELDS = 200
"""Objects are counted first: a fault of each field would take half a minute."""
_MOST_EXACT = 2.0**53
_LEVELS_OF_IDS = 2
_MOST_LEVELS = 64  # of what an answer repeats


class Body(BaseModel):
    """A JSON object of known fields; null is as if a field was not there, and 16.0 is 16."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values that count as an absent field."""

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > _MOST_FIELDS:
            raise ValueError(f"{len(given)} fields: an object has {_MOST_FIELDS} at the most, leave some out")
        return {
            name: _whole(value) if name in cls.model_fields else value
            for name, value in given.items()
            if value is not None and not cls._is_nothing(name, value)
        }

    @classmethod
    def _is_nothing(cls, name: str, value: object) -> bool:
        """Whether a value asks for nothing, as an unknown field's empty one does; 1.0 is 1, but true is not."""
        if value in ("", []) and name not in cls.model_fields and cls.model_config.get("extra") == "forbid":
            return True
        truth = isinstance(value, bool)
        return any(truth is isinstance(one, bool) and value == one for one in cls.asks_for_nothing.get(name, ()))


def can_be_repeated(value: Any) -> bool:
    """Whether an answer can hold a value of a request: its numbers are finite and its levels few; NaN is no JSON."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        if any(isinstance(one, float) and not math.isfinite(one) for one in level):
            return False
        within = [one for one in level if isinstance(one, dict | list)]
        level = [part for one in within for part in (one.values() if isinstance(one, dict) else one)]
    return not level


def _whole(given: Any, levels: int = _LEVELS_OF_IDS) -> Any:
    """Whole numbers that are written as 16.0 as ints, also in lists; all else unchanged, for the check to name."""
    if type(given) is float:
        return int(given) if given.is_integer() and abs(given) <= _MOST_EXACT else given
    if type(given) is list and levels and any(type(one) in (float, list) for one in given):
        return [_whole(one, levels - 1) for one in given]
    return given
