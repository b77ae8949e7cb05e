"""The types of fields on the wire, each with the range of values that msgspec accepts."""

import dataclasses
import sys
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import Meta
from torch import Tensor

from ppd_runtime.sampling.params import MOST_STOP_CHARACTERS, MOST_STOPS

_RANK = Meta(ge=-1, le=2**20)
_TOKEN_ID = Meta(ge=0, le=2**31 - 1)
_COUNT = Meta(ge=0, le=2**63 - 1)

Rank = Annotated[int, _RANK]
Request = Annotated[int, _COUNT]
Position = Annotated[int, Meta(ge=0, le=2**32)]
TokenId = Annotated[int, _TOKEN_ID]
TokenIds = Annotated[list[TokenId], Meta(max_length=2**21)]
Candidates = Annotated[tuple[TokenId, ...], Meta(max_length=2**20)]
Count = Annotated[int, _COUNT]
Numbers = Annotated[tuple[Count, ...], Meta(max_length=2**16)]
Logprobs = Annotated[tuple[Annotated[float, Meta(ge=-1e4, le=0)], ...], Meta(max_length=2**20)]
Millionths = Annotated[tuple[Annotated[int, Meta(ge=0, le=10**6)], ...], Meta(max_length=2**20)]
Winners = Annotated[list[Rank], Meta(max_length=2**21)]
Ranks = Annotated[list[Rank], Meta(max_length=MOST_STOPS)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int64s = Annotated[list[Int64], Meta(max_length=2**16)]
TensorBytes = Annotated[int, Meta(ge=1, le=2**31)]
Bytes = Annotated[bytes, Meta(max_length=2**20)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=MOST_STOP_CHARACTERS)]
Texts = Annotated[list[Text], Meta(max_length=MOST_STOPS)]

_BOUNDED = {float: Finite, str: Text, Tensor: Annotated[bytes, Meta(max_length=64)]}
_STAY = ("timeout_s", "logits_processors")
"""The fields of a record that are not sent; the reader gets their defaults."""


class WireError(ValueError):
    """Bytes that are no message of this version, or a message that this version cannot encode."""


def is_record(hint: object) -> bool:
    """Whether a field of this type is a dataclass, which a header holds as the list of its values."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def in_header(hint: Any) -> Any:
    """The type that a header holds for a field; for a tensor that of its description (see `tensors`)."""
    args = get_args(hint)
    if is_record(hint):
        return tuple[tuple(map(in_header, _sent(hint).values()))]  # type: ignore[misc]
    if hint in _BOUNDED:
        return _BOUNDED[hint]
    if get_origin(hint) is tuple:
        return tuple[tuple(map(in_header, args))]  # type: ignore[misc]
    if get_origin(hint) in (Union, UnionType):  # what is given as a mapping or a class is held otherwise
        return Union[tuple(in_header(arg) for arg in args if get_origin(arg) is not Mapping and arg is not type)]  # noqa: UP007
    return hint


def values_of(record: Any) -> list[Any]:
    """The values that a header holds for a record; raises WireError if the record has functions."""
    if getattr(record, "logits_processors", ()):
        raise WireError("settings with functions, which are not sent")
    values = (getattr(record, name) for name in _sent(record.__class__))
    return [values_of(value) if is_record(type(value)) else value for value in values]


def record_of(kind: type, values: tuple[Any, ...]) -> Any:
    """The record with the values that a header held; raises ValueError if its class does not allow them."""
    given = zip(_sent(kind).items(), values, strict=True)
    return kind(**{name: record_of(hint, value) if is_record(hint) else value for (name, hint), value in given})


@cache
def _sent(kind: Any) -> dict[str, Any]:
    """The types of a record's fields that are sent, by name."""
    hints = get_type_hints(kind, localns={"Tensor": Tensor})  # settings do not import Tensor
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.name not in _STAY}
