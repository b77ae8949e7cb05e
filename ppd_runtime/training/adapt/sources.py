"""What parts learn from: prompts that the model answers, or texts that it only reads; a share of each is held out."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path

from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.prompts import encoded
from ppd_runtime.training.texts import read_texts
from ppd_runtime.tune.prompt_files import Prompt, read_prompts

ANSWER_TOKENS = 160
"""Most tokens of an answer."""
LONGEST_PROMPT = 1024
"""Prompts of more tokens are left out."""
_PIECE = 512  # tokens of a text that are read together
_HELD_OUT_EVERY = 8
_OTHER, _TEXT = "other", "text"


@dataclass(frozen=True)
class Source:
    """A prompt, or a text to read."""

    kind: str
    """What the report tells apart, such as code."""
    token_ids: tuple[int, ...]
    held_out: bool
    """Whether nothing may learn from it."""


def shipped_prompts() -> Path:
    """The file of prompts that comes with the package: six kinds in turn."""
    return Path(str(resources.files("ppd_runtime.training.adapt") / "prompts.jsonl"))


def prompts_of(file: str | None, generator: TextGenerator) -> list[Source]:
    """Prompts of a file (None: the shipped ones) as the model reads them, by its chat template if it has one.

    The kinds come in turn. One in eight of each kind is held out, chosen by the prompts' hashes.

    Raises:
        ValueError: naming the file and the line that is broken, or a file without two prompts that fit the model.
    """
    source = str(shipped_prompts()) if file is None else file
    most = min(LONGEST_PROMPT, (generator.info.max_positions or LONGEST_PROMPT + 1) - 1)
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for prompt in sorted(_different(read_prompts(source)), key=lambda prompt: _digest(prompt.text)):
        token_ids = _as_read(prompt.text, generator)
        if 0 < len(token_ids) <= most:
            kinds.setdefault(prompt.category or _OTHER, []).append(token_ids)
    found = [source for row in zip_longest(*(_held_out(*kind) for kind in kinds.items())) for source in row if source]
    return _checked(source, found, f"prompts of at most {most} tokens")


def texts_of(file: str, generator: TextGenerator) -> list[Source]:
    """Texts of a file, in pieces of at most 512 tokens; see `read_texts`, which says what is held out.

    Raises:
        ValueError: as `read_texts`, or for a file without two texts.
    """
    texts = read_texts(file)
    held_out, learnt = (
        list(_pieces(some, generator, out)) for some, out in ((texts.held_out, True), (texts.training, False))
    )
    return _checked(file, [*held_out, *learnt], "texts of two tokens")


def sha256(sources: Sequence[Source]) -> str:
    """The hash of all of them, in hexadecimal digits."""
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def _different(prompts: Iterable[Prompt]) -> list[Prompt]:
    return list({prompt.text: prompt for prompt in prompts}.values())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _as_read(text: str, generator: TextGenerator) -> tuple[int, ...]:
    has_template = generator.tokenizer.chat_template is not None
    if has_template:
        text = generator.chat_prompt([{"role": "user", "content": text}])
    return tuple(encoded(text, generator.tokenizer, generator.info.vocab_size, not has_template))


def _held_out(kind: str, rows: Sequence[tuple[int, ...]]) -> list[Source]:
    return [Source(kind, row, len(rows) > 1 and not number % _HELD_OUT_EVERY) for number, row in enumerate(rows)]


def _pieces(texts: Iterable[str], generator: TextGenerator, held_out: bool) -> Iterator[Source]:
    length = min(_PIECE, generator.info.max_positions or _PIECE)
    for token_ids in generator.encoded(list(texts)):
        for start in range(0, len(token_ids) - 1, length):
            if len(piece := token_ids[start : start + length]) > 1:
                yield Source(_TEXT, tuple(piece), held_out)


def _checked(file: str, sources: list[Source], what: str) -> list[Source]:
    """The sources, one at least held out and one not; ValueError for fewer than two."""
    if len(sources) < 2:
        raise ValueError(f"{file}: holds {len(sources)} different {what}; at least 2 are needed, one to be held out")
    if not any(source.held_out for source in sources):
        first = sources[0]
        sources[0] = Source(first.kind, first.token_ids, True)
    return sources
