"""The most frequent tokens of a vocabulary, to which a boundary's guesses may be kept."""

import json
from pathlib import Path

from ppd_runtime.settings.checks import check_number

_MAKE = "give a JSON object of token ids and how often each occurs"


def shortlist(size: int, vocab_size: int, counts: str | None = None) -> tuple[int, ...]:
    """`size` token ids in ascending order: the most frequent ones by a file of counts, or the tokenizer's first.

    A tokenizer numbers tokens roughly by their frequency where it was made. Tokens that a file leaves out, and equally
    frequent ones, follow that order too.

    Args:
        size: 1 to `vocab_size`.
        vocab_size: the model's.
        counts: a JSON file: an object of token ids and counts, such as `{"262": 1034, "11": 988}`.

    Raises:
        ValueError: naming the file and the way out.
    """
    found = _read_counts(counts, vocab_size) if counts is not None else {}
    return tuple(sorted(sorted(range(vocab_size), key=lambda token: (-found.get(token, 0), token))[:size]))


def _read_counts(file: str, vocab_size: int) -> dict[int, float]:
    name = f"guess_counts={file!r:.200}"
    try:
        told = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; {_MAKE}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON file ({type(error).__name__}); {_MAKE}") from error
    if not isinstance(told, dict) or not told:
        raise ValueError(f"{name} holds no object; {_MAKE}")
    for token, count in told.items():
        if not (token.isascii() and token.isdecimal() and int(token) < vocab_size):
            raise ValueError(f"{name}: {token!r:.50} is no token id below {vocab_size}; {_MAKE}")
        try:
            check_number("count", count)
        except ValueError as error:
            raise ValueError(f"{name}: token {token}: {error}; {_MAKE}") from error
    return {int(token): count for token, count in told.items()}
