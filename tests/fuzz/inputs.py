"""Inputs for the fuzz targets: a stored corpus made of real messages, and its mutations by a seed."""

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import msgpack

CORPUS = Path(__file__).parent / "corpus"
INTERESTING = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    7,
    8,
    255,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**64 - 1,
)
ODD = (
    None,
    True,
    False,
    0.0,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x" * 70,
    b"",
    b"123",
    bytes(8),
    b"\5" + bytes(7),
    [],
    {},
)
_PREFIX = struct.Struct("<4sIQ")


def corpus(target: str) -> list[bytes]:
    """The stored inputs of a target, in a fixed order."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def mutations(target: str, seed: int, count: int) -> Iterator[bytes]:
    """So many inputs, each some changes away from a stored one."""
    generator, stored = random.Random(f"{target} {seed}"), corpus(target)
    for _ in range(count):
        data = bytearray(generator.choice(stored))
        for _ in range(generator.choice((1, 1, 1, 2, 3, 8))):
            change = generator.choice(_CHANGES)
            data = change(data, generator, stored)
        yield bytes(data[:100_000])


def _flip(data: bytearray, generator: random.Random, _: list[bytes]) -> bytearray:
    if data:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return data


def _overwrite(data: bytearray, generator: random.Random, _: list[bytes]) -> bytearray:
    start = generator.randrange(len(data) + 1)
    data[start : start + generator.randrange(9)] = generator.randbytes(generator.randrange(9))
    return data


def _put_number(data: bytearray, generator: random.Random, _: list[bytes]) -> bytearray:
    size = generator.choice((1, 2, 4, 8))
    number = generator.choice(INTERESTING) % 2 ** (8 * size)
    start = generator.randrange(len(data) + 1)
    data[start : start + size] = number.to_bytes(size, generator.choice(("little", "big")))
    return data


def _cut(data: bytearray, generator: random.Random, _: list[bytes]) -> bytearray:
    start = generator.randrange(len(data) + 1)
    del data[start : generator.choice((start + generator.randrange(20), len(data)))]
    return data


def _repeat(data: bytearray, generator: random.Random, _: list[bytes]) -> bytearray:
    start = generator.randrange(len(data) + 1)
    part = data[start : start + generator.randrange(64)]
    data[start:start] = part * generator.randrange(1, 20)
    return data


def _splice(data: bytearray, generator: random.Random, stored: list[bytes]) -> bytearray:
    other = generator.choice(stored)
    return data[: generator.randrange(len(data) + 1)] + other[generator.randrange(len(other) + 1) :]


def _change_field(data: bytearray, generator: random.Random, _: list[bytes]) -> bytearray:
    """Another value in a header, whose lengths are made to fit again."""
    for start, at, size in ((2, 0, "<H"), (1 + _PREFIX.size, 5, "<I")):
        if len(data) > start:
            (length,) = struct.unpack_from(size, data, at)
            try:
                header = msgpack.decode(bytes(data[start : start + length]))
                changed = msgpack.encode(_with_another_value(header, generator))
                struct.pack_into(size, data, at, len(changed))
            except Exception:  # noqa: BLE001 (no header there, whatever msgpack makes of it)
                continue
            data[start : start + length] = changed
            break
    return data


def _with_another_value(value: Any, generator: random.Random) -> Any:
    if isinstance(value, list) and value and generator.random() < 0.9:
        place = generator.randrange(len(value))
        changed = list(value)
        changed[place] = _with_another_value(value[place], generator)
        return changed
    return generator.choice(INTERESTING + ODD + (value, [value], [value, value]))


Change = Callable[[bytearray, random.Random, list[bytes]], bytearray]
_CHANGES: tuple[Change, ...] = (_flip, _overwrite, _put_number, _cut, _repeat, _splice, _change_field, _change_field)
