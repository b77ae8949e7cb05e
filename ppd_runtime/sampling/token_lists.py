"""Checks token ids in lists, in sequences and with biases, and makes tuples of one form of them."""

from collections.abc import Mapping
from typing import Any

from ppd_runtime.settings.checks import check_int, check_range

MOST_LISTED = 2**16
"""Token ids that a setting may name."""
MOST_TOKEN_ID = 2**31 - 1
_MOST_BIAS = 100.0  # OpenAI's range
_MOST_SEQUENCE_BIAS = 1e30  # far from float32's end

TokenIds = tuple[int, ...]


def token_ids(name: str, given: object) -> TokenIds:
    """A list of token ids, or a single one."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = (given,)
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name}={given!r:.200}: give a list of token ids")
    for token in given:
        check_int(name, token, 0, MOST_TOKEN_ID)
    _check_number(name, len(given))
    return tuple(given)


def sequences(name: str, given: object) -> tuple[TokenIds, ...]:
    """A list of sequences of token ids."""
    if not isinstance(given, list | tuple):
        raise ValueError(f"{name}={given!r:.200}: give a list of lists of token ids")
    found = tuple(_sequence(name, one) for one in given)
    _check_number(name, sum(map(len, found)))
    return found


def biases(name: str, given: object) -> tuple[tuple[int, float], ...]:
    """Biases by token id, in OpenAI's range, as a mapping or as pairs; in the order of the ids."""
    found: dict[int, float] = {}
    for token, bias in _pairs(name, given):
        check_int(name, token, 0, MOST_TOKEN_ID)
        found[token] = _bias(f"{name}[{token}]", bias, _MOST_BIAS)
    _check_number(name, len(found))
    return tuple(sorted(found.items()))


def sequence_biases(name: str, given: object) -> tuple[tuple[TokenIds, float], ...]:
    """Biases by sequence of token ids, as a mapping or as pairs."""
    found: dict[TokenIds, float] = {}
    for tokens, bias in _pairs(name, given):
        sequence = _sequence(name, tokens)
        found[sequence] = _bias(f"{name}[{sequence!r:.100}]", bias, _MOST_SEQUENCE_BIAS)
    _check_number(name, sum(map(len, found)))
    return tuple(found.items())


def _sequence(name: str, given: object) -> TokenIds:
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"{name}={given!r:.200}: give token ids in lists, each of one at least")
    return token_ids(name, given)


def _pairs(name: str, given: object) -> list[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return list(given.items())
    if isinstance(given, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given):
        return [(key, bias) for key, bias in given]
    raise ValueError(f"{name}={given!r:.200}: give a mapping to biases")


def _bias(name: str, given: Any, most: float) -> float:
    check_range(name, given, lambda bias: abs(bias) <= most, f"in [{-most:g}, {most:g}]")
    return float(given)


def _check_number(name: str, number: int) -> None:
    if number > MOST_LISTED:
        raise ValueError(f"{name}: {number} token ids, give at most {MOST_LISTED}")
