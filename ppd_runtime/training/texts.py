"""Texts to train on: the demo model's corpus or a user's file, with a share of them held out, as rows of token ids."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppd_runtime.methods.prompts import check_known
from ppd_runtime.training.corpus import read_standard_library
from ppd_runtime.tune.prompt_files import texts_under

DEMO = "demo"
"""Names the demo model's corpus."""
_HELD_OUT_SHARE = 0.04
_PASSAGE = 4000  # characters of a plain text that are held out, or trained on, together


@dataclass(frozen=True)
class Texts:
    """Texts for training, and those that are kept from it."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """All texts' hash, in hexadecimal digits."""
        return hashlib.sha256(json.dumps([self.training, self.held_out]).encode()).hexdigest()


def read_texts(source: str) -> Texts:
    """The texts of a file, or the standard library's if `source` is "demo".

    A file ending in .jsonl holds one object a line with a "text" or a "prompt"; any other file is one plain text, cut
    into passages at blank lines. One in 25 of the different texts, at least one, is held out: those with the lowest
    hashes, so that a longer or reordered file holds out nearly the same ones.

    Raises:
        ValueError: naming the file, the line that is broken, or what is missing.
    """
    if source == DEMO:
        documents = read_standard_library()
        halves = ([d.text for d in documents if d.held_out is held_out] for held_out in (False, True))
        return Texts(*map(tuple, halves))
    path = Path(source)
    try:
        texts = list(_json_lines(path) if path.suffix == ".jsonl" else _passages(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file of texts, or {DEMO!r}") from error
    return _hold_out(path, texts)


def token_rows(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], length: int, vocab_size: int) -> Tensor:
    """`[rows, length + 1]` token ids of all texts one after the other, each ended by the end token if there is one.

    The last token of a row is the label of its last but one; what does not fill a row is left out.

    Raises:
        ValueError: for a token that is not among the `vocab_size` of the model.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = tokenizer(list(texts), verbose=False).input_ids
    token_ids = [token for row in rows for token in [*row, *end]]
    check_known(token_ids, tokenizer, vocab_size)
    tokens = torch.tensor(token_ids)
    return tokens[: tokens.numel() // (length + 1) * (length + 1)].view(-1, length + 1)


def _hold_out(path: Path, texts: list[str]) -> Texts:
    hashes = [hashlib.sha256(text.encode()).digest() for text in texts]
    different = sorted(set(hashes))
    if len(different) < 2:
        raise ValueError(
            f"{path}: holds {len(different)} different texts; at least 2 are needed, one of them to be held out"
        )
    highest = different[max(1, int(len(different) * _HELD_OUT_SHARE)) - 1]
    pairs = list(zip(texts, hashes, strict=True))
    return Texts(
        training=tuple(text for text, digest in pairs if digest > highest),
        held_out=tuple(text for text, digest in pairs if digest <= highest),
    )


def _json_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for prompt in texts_under(("text", "prompt"), path, file):
            yield prompt.text


def _passages(path: Path) -> Iterator[str]:
    """Whole paragraphs, as many as make a passage."""
    try:
        paragraphs = path.read_text(encoding="utf-8").split("\n\n")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: no UTF-8 text ({error.reason})") from error
    passage = ""
    for paragraph in paragraphs:
        passage += paragraph + "\n\n"
        if len(passage) >= _PASSAGE:
            yield passage
            passage = ""
    if passage.strip():
        yield passage
