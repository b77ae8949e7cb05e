"""Converts what a user may give as a prompt to the form that decoding takes: a list of token ids."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from transformers import BatchEncoding, PreTrainedTokenizerBase

from ppd_runtime.settings.checks import check_bool, foreign_token

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Prompt: TypeAlias = Union[str, Sequence[int], "Tensor", "np.ndarray[Any, Any]", BatchEncoding]
"""A text, or token ids: a sequence, a tensor or array `[tokens]` or `[1, tokens]`, or what a tokenizer gives."""
Prompts: TypeAlias = list[str] | list[list[int]]
"""Several prompts."""

logger = logging.getLogger(__name__)
_GIVE = "give a text or a list of token ids"
_HALF = re.compile("[\ud800-\udfff]")
_SHOWN = 20  # characters before it


def several_prompts(prompt: object, n: int | None) -> list[Prompt]:
    """The prompts in a list of texts, of encodings, or of two lists of token ids at least; none for a single prompt.

    One list of token ids within a list is one prompt, as a tensor `[1, tokens]` is.

    Raises:
        ValueError: for texts mixed with other things, and for `n` with several prompts.
    """
    if not isinstance(prompt, list | tuple) or not prompt:
        return []
    if any(isinstance(one, str) for one in prompt):
        for index, one in enumerate(prompt):
            if not isinstance(one, str):
                raise ValueError(
                    f"prompt {index + 1} of {len(prompt)} is {one!r:.200}: give a list of texts, or one prompt"
                )
    elif not all(isinstance(one, BatchEncoding) for one in prompt) and not (
        len(prompt) > 1 and all(isinstance(one, list | tuple) for one in prompt)
    ):
        return []
    if n is not None:
        raise ValueError(f"n={n} with {len(prompt)} prompts: give one prompt, or leave n out")
    return list(prompt)


def token_ids_of(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, vocab_size: int, add_special_tokens: bool = True
) -> list[int]:
    """A prompt's token ids; a text is encoded, with the tokenizer's special tokens or without.

    Raises:
        ValueError: for what is no prompt, is empty, or holds several prompts, and for a token that the model lacks.
    """
    check_bool("add_special_tokens", add_special_tokens)
    if isinstance(prompt, str):
        token_ids = encoded(prompt, tokenizer, vocab_size, add_special_tokens)
    elif not add_special_tokens:
        raise ValueError("add_special_tokens=False is for a text: token ids are taken as they are, leave it out")
    else:
        token_ids = [_token_id(token) for token in _only_row(prompt)]
        if (foreign := foreign_token(token_ids, vocab_size)) is not None:
            raise ValueError(f"token id {foreign} is outside the vocabulary: choose 0 to {vocab_size - 1}")
    if not token_ids:
        raise ValueError("the prompt is empty: give some text, or at least one token id")
    return token_ids


def encoded(
    text: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, add_special_tokens: bool = True
) -> list[int]:
    """A text's token ids; none, perhaps.

    Raises:
        ValueError: for half a character, and for a token that the model lacks.
    """
    if half := _HALF.search(text):
        near = text[max(0, half.start() - _SHOWN) : half.end()]
        raise ValueError(f"prompt={near!r}: holds half a character (a lone surrogate), leave it out")
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    check_known(token_ids, tokenizer, vocab_size)
    beginning = tokenizer.bos_token_id
    if beginning is not None and token_ids[:2] == [beginning, beginning]:
        logger.warning(
            "the prompt's text begins with %s and the tokenizer adds another: give add_special_tokens=False where a "
            "chat template has put it there",
            tokenizer.bos_token,
        )
    return token_ids


def encoded_all(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, vocab_size: int, add_special_tokens: bool = True
) -> list[list[int]]:
    """Call `encoded` for each prompt; a refusal names the prompt."""
    rows = []
    for number, text in enumerate(texts, start=1):
        try:
            rows.append(encoded(text, tokenizer, vocab_size, add_special_tokens))
        except ValueError as error:
            raise ValueError(f"prompt {number} of {len(texts)}: {error}") from error
    return rows


def check_known(token_ids: Collection[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ValueError for a token that the model lacks: a tokenizer may have been given more."""
    if (foreign := foreign_token(token_ids, vocab_size)) is not None:
        named = tokenizer.convert_ids_to_tokens(foreign)
        raise ValueError(
            f"the tokenizer makes {named!r:.200} token id {foreign}, which the model lacks (it has 0 to "
            f"{vocab_size - 1}): leave it out of the text, or give the model the tokenizer that it was trained with"
        )


def _only_row(prompt: Any) -> Iterable[Any]:
    """The ids of one prompt of any type."""
    rows = prompt
    if isinstance(prompt, Mapping | BatchEncoding):
        if "input_ids" not in prompt:
            raise ValueError(f"prompt={prompt!r:.200}: has no input_ids; {_GIVE}")
        rows = prompt["input_ids"]
        if "attention_mask" in prompt and not all(_flat(prompt["attention_mask"])):
            raise ValueError("the prompt's attention_mask leaves tokens out: give its tokens without padding")
    rows = _plain(rows)
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | bytearray):
        raise ValueError(f"prompt={prompt!r:.200}: {_GIVE}")
    rows = list(rows)
    if rows and all(isinstance(row, list | tuple) for row in rows):
        if len(rows) > 1:
            raise ValueError(f"the prompt holds {len(rows)} rows of token ids: give one at a time")
        return rows[0]
    return rows


def _flat(mask: Any) -> list[Any]:
    mask = _plain(mask)
    return [value for row in mask for value in (row if isinstance(row, list | tuple) else [row])]


def _plain(values: Any) -> Any:
    """A tensor's or an array's numbers as lists; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _token_id(token: object) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise ValueError(f"token id {token!r:.200}: give a text or a list of whole numbers")
    return int(token.__index__())
