"""Completions between two texts: the prompt in which a model was trained to fill in the middle."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ppd_runtime.server.errors import shown

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before the prefix, between it and the suffix, and behind both: Qwen's and Gemma's, StarCoder's, DeepSeek's."""


def infill_ids(prefix: Sequence[int], suffix: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt whose continuation stands between a prefix and a suffix.

    Args:
        prefix: token ids, the special ones at a text's beginning included.
        suffix: the text behind the wanted one.
        tokenizer: the model's.

    Raises:
        ValueError: for a tokenizer without the tokens for it.
    """
    known = tokenizer.get_added_vocab()
    marks = next(([known[mark] for mark in marks] for marks in _MARKS if all(mark in known for mark in marks)), None)
    if marks is None:
        raise ValueError(f"suffix={shown(suffix)}: the model has no tokens to fill in a middle, leave it out")
    before, between, behind = marks
    start = [token for token in prefix[:1] if token == tokenizer.bos_token_id]
    of_suffix = tokenizer.encode(suffix, add_special_tokens=False)
    return [*start, before, *prefix[len(start) :], between, *of_suffix, behind]
