"""The types of fields on the wire, each with the range of values that is let through.

Numbers and texts stand in the header as they are. Lists of numbers are bytes, eight a number, little-endian; a record's
lists are JSON. So no array in a header is long, however its writer nests them.
"""

import dataclasses
import json
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor

from ppd_runtime.sampling_params import MOST_STOP_CHARACTERS, MOST_STOPS

MOST_TEXT, MOST_TEXTS = MOST_STOP_CHARACTERS, MOST_STOPS
"""Characters of a text, texts of a list."""
_MOST_RANK = 2**20
_MOST_DESCRIPTION = 64
_MOST_JSON = 2**22
_MOST = sys.float_info.max


class WireError(ValueError):
    """Bytes that are no message of this version, or a message that this version cannot encode."""


@dataclass(frozen=True)
class Within:
    """The least and greatest value of a number or of each number in a list; the greatest length of a list."""

    low: float
    high: float
    most: int = 0


@dataclass(frozen=True)
class AsRecord:
    """Marks a field whose dataclass checks its own plain values; a header holds it as a list of values."""

    stays: tuple[str, ...] = ()
    """Fields that are not sent; the reader uses their defaults."""
    functions: tuple[str, ...] = ()
    """Fields that cannot be encoded; they must be empty."""


Rank = Annotated[int, Within(-1, _MOST_RANK)]
Request = Annotated[int, Within(0, 2**63 - 1)]
Position = Annotated[int, Within(0, 2**32)]
TokenId = Annotated[int, Within(0, 2**31 - 1)]
TokenIds = Annotated[list[int], Within(0, 2**31 - 1, 2**21)]
Candidates = Annotated[tuple[int, ...], Within(0, 2**31 - 1, 2**20)]
Numbers = Annotated[tuple[int, ...], Within(0, 2**63 - 1, 2**16)]
Logprobs = Annotated[tuple[float, ...], Within(-1e4, 0, 2**20)]
Millionths = Annotated[tuple[int, ...], Within(0, 10**6, 2**20)]
Winners = Annotated[list[int], Within(-1, _MOST_RANK, 2**21)]
Ranks = Annotated[list[int], Within(-1, _MOST_RANK, MOST_TEXTS)]
Int64s = Annotated[list[int], Within(-(2**63), 2**63 - 1, 2**16)]
Int64 = Annotated[int, Within(-(2**63), 2**63 - 1)]
Count = Annotated[int, Within(0, 2**63 - 1)]
TensorBytes = Annotated[int, Within(1, 2**31)]
Bytes = Annotated[bytes, Within(0, 255, 2**20)]
Limit = Annotated[int, Within(0, 2**31 - 1)]
Finite = Annotated[float, Within(-_MOST, _MOST)]

Reader = Callable[[Any], Any]
"""Turns what a header holds into a field's value; raises WireError for anything else."""
Writer = Callable[[Any], Any]
"""Turns a field's value into what a header holds."""


def is_tensor(hint: object) -> bool:
    """Whether a field of this type holds a tensor, or may."""
    return hint in (Tensor, Tensor | None)


def is_packed(hint: object) -> bool:
    """Whether a field of this type is a list of numbers, which stands in a header as bytes."""
    return get_origin(hint) is Annotated and get_args(hint)[0] in (list[int], tuple[int, ...], tuple[float, ...])


def pack_numbers(numbers: list[int] | tuple[int, ...]) -> bytes:
    """Whole numbers of 64 bits as bytes; raises OverflowError for others."""
    return array("q", numbers).tobytes()


def _pack_floats(numbers: tuple[float, ...]) -> bytes:
    return array("d", numbers).tobytes()


def is_number(hint: object) -> bool:
    """Whether a field of this type is one number."""
    return get_origin(hint) is Annotated and get_args(hint)[0] in (int, float)


def reader(name: str, hint: object) -> Reader:
    """How to read the field `name`, which is not a number.

    For a tensor the header holds a description that is not checked yet; see `tensors`.
    """
    if get_origin(hint) is Annotated:
        base, within = get_args(hint)
        if isinstance(within, AsRecord):
            return _record_reader(name, base, within)
        if is_packed(hint):
            return _packed_reader(name, within, base)
        return _checked_reader(name, lambda value: type(value) is bytes and len(value) <= within.most)
    checks: dict[object, Callable[[Any], bool]] = {
        bool: lambda value: type(value) is bool,
        str: lambda value: type(value) is str and len(value) <= MOST_TEXT,
        list[str]: _are_texts,
        Tensor: _is_description,
        Tensor | None: lambda value: value is None or _is_description(value),
    }
    return _checked_reader(name, checks[hint])


def _checked_reader(name: str, good: Callable[[Any], bool]) -> Reader:
    def read(value: Any) -> Any:
        if good(value):
            return value
        raise WireError(f"{name} of the wrong type or length")

    return read


class Range(NamedTuple):
    """What a field that is one number may hold."""

    place: int
    name: str
    types: tuple[type, ...]
    low: float
    high: float


@dataclass(frozen=True)
class FieldPlan:
    """How to write and read a kind of message; places index its header."""

    number: int
    num_fields: int
    values: Callable[[Any], tuple[Any, ...]]
    ranges: tuple[Range, ...]
    readers: tuple[tuple[int, Reader], ...]
    """For fields other than numbers."""
    writers: tuple[tuple[int, Writer], ...]
    """For fields that a header holds in another form: lists of numbers, and records."""
    tensor: int
    """Place of its tensor; 0 if it has none."""

    def read(self, header: list[Any]) -> None:
        """Decode a header of the right length in place, into the message's values; WireError for bad contents."""
        for place, name, types, low, high in self.ranges:
            if type(header[place]) not in types or not low <= header[place] <= high:
                raise WireError(f"{name} of the wrong type or out of range")
        for place, read in self.readers:
            header[place] = read(header[place])


def make_plan(number: int, kind: type) -> FieldPlan:
    """The plan of a dataclass whose fields all have types of this module; at most one is a tensor."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    fields = [(place, f"{kind.__name__}.{name}", hints[name]) for place, name in enumerate(names, 2)]
    tensors = [place for place, _, hint in fields if is_tensor(hint)]
    assert len(tensors) <= 1, "a message has room for one tensor"
    return FieldPlan(
        number=number,
        num_fields=len(fields),
        values=attrgetter(*names),
        ranges=tuple(_range(place, name, hint) for place, name, hint in fields if is_number(hint)),
        readers=tuple((place, reader(name, hint)) for place, name, hint in fields if not is_number(hint)),
        writers=tuple((place, write) for place, name, hint in fields if (write := writer(name, hint))),
        tensor=tensors[0] if tensors else 0,
    )


def _range(place: int, name: str, hint: object) -> Range:
    base, within = get_args(hint)
    return Range(place, name, (int,) if base is int else (float, int), within.low, within.high)


def _packed_reader(name: str, within: Within, base: object) -> Reader:
    low, high, most = within.low, within.high, 8 * within.most
    floats, as_tuple = base == tuple[float, ...], base != list[int]

    def read(value: Any) -> Any:
        if type(value) is not bytes or len(value) > most or len(value) % 8:
            raise WireError(f"{name} of the wrong type or length")
        numbers = array("d" if floats else "q", value)
        if numbers and not (low <= min(numbers) and max(numbers) <= high and not (floats and any(map(isnan, numbers)))):
            raise WireError(f"{name} out of range")
        return tuple(numbers) if as_tuple else numbers.tolist()

    return read


def writer(name: str, hint: object) -> Writer | None:
    """How to write the field `name`; None: as it is."""
    if is_packed(hint):
        return _pack_floats if get_args(hint)[0] == tuple[float, ...] else pack_numbers
    if get_origin(hint) is Annotated and isinstance(get_args(hint)[1], AsRecord):
        return _record_writer(name, *get_args(hint))
    return None


def _record_writer(name: str, kind: type, form: AsRecord) -> Writer:
    hints = _record_hints(kind, form)
    inner = {field: writes for field, hint in hints.items() if (writes := _value_writer(field, hint))}

    def write(record: Any) -> list[Any]:
        if any(getattr(record, function) for function in form.functions):
            raise WireError(f"{name} with functions, which are not sent")
        values = {field: getattr(record, field) for field in hints}
        return [inner[field](value) if field in inner else value for field, value in values.items()]

    return write


def _record_reader(name: str, kind: type, form: AsRecord) -> Reader:
    hints = _record_hints(kind, form)
    readers = [(field, _value_reader(f"{name}.{field}", hint)) for field, hint in hints.items()]

    def read(values: Any) -> Any:
        if type(values) is not list or len(values) != len(readers):
            raise WireError(f"{name} of the wrong type or length")
        given = {field: take(value) for (field, take), value in zip(readers, values, strict=True)}
        try:
            return kind(**given)
        except ValueError as error:
            raise WireError(f"{name}: {error}") from error

    return read


def _record_hints(kind: type, form: AsRecord) -> dict[str, Any]:
    """Types of the sent fields."""
    hints = get_type_hints(kind, localns={"Tensor": Tensor})  # settings do not import Tensor
    stay = {*form.stays, *form.functions}
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.name not in stay}


def _is_record(hint: object) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


_SCALARS: dict[object, Callable[[Any], bool]] = {
    bool: lambda value: type(value) is bool,
    int: lambda value: type(value) is int,
    float: lambda value: type(value) in (int, float) and abs(value) <= _MOST,
}


def _value_reader(name: str, hint: Any) -> Reader:
    """How to read a record's field."""
    if _is_record(hint):
        return _record_reader(name, hint, AsRecord())
    if hint == tuple[str, ...]:
        read = _checked_reader(name, _are_texts)
        return lambda value: tuple(read(value))
    if (scalar := _scalar(hint)) is None:
        return _lists_reader(name)
    good, may_lack = _SCALARS[scalar], type(None) in get_args(hint)
    return _checked_reader(name, lambda value: (may_lack and value is None) or good(value))


def _value_writer(name: str, hint: Any) -> Writer | None:
    """How to write a record's field; None: as it is."""
    if _is_record(hint):
        return _record_writer(name, hint, AsRecord())
    if hint == tuple[str, ...] or _scalar(hint) is not None:
        return None
    return lambda value: json.dumps(value).encode()


def _scalar(hint: Any) -> object | None:
    """The type of a field that is one number or bool, and may be None; None for any other field."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in _SCALARS else None


def _lists_reader(name: str) -> Reader:
    """Reader of lists of numbers, nested or not. They may be long, so a header holds them as JSON bytes."""

    def read(value: Any) -> Any:
        if type(value) is not bytes or len(value) > _MOST_JSON:
            raise WireError(f"{name} of the wrong type or length")
        try:
            return _as_tuples(json.loads(value))
        except (ValueError, RecursionError) as error:
            raise WireError(f"{name}: no lists of numbers") from error

    return read


def _as_tuples(value: Any) -> Any:
    if type(value) is list:
        return tuple(map(_as_tuples, value))
    if value is None or type(value) in (int, float):
        return value
    raise ValueError("neither a number nor a list")


def _are_texts(value: object) -> bool:
    if type(value) is not list or len(value) > MOST_TEXTS:
        return False
    return all(type(text) is str and len(text) <= MOST_TEXT for text in value)


def _is_description(value: object) -> bool:
    return type(value) is bytes and len(value) <= _MOST_DESCRIPTION and not len(value) % 8
