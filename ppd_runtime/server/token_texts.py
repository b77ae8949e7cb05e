"""Tokens as texts, and their log-probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppd_runtime.logprobs import TokenLogprobs

_INCOMPLETE = "\ufffd"


def old_logprobs(
    noted: Sequence[TokenLogprobs | None], token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, offset: int
) -> dict[str, Any]:
    """`logprobs` of `/v1/completions`; None stands for a token that has none, as a prompt's first.

    `offset` is where the first token's text begins; of tokens with equal texts the likeliest is named.
    """
    texts = [text_of(token, tokenizer) for token in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if one is None else one.logprob for one in noted],
        "top_logprobs": [None if one is None else _by_text(one, tokenizer) for one in noted],
        "text_offset": offsets,
    }


def chat_logprobs(noted: Sequence[TokenLogprobs], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`logprobs` of `/v1/chat/completions`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token, tokenizer)
        return {"token": text, "logprob": logprob, "bytes": None if _INCOMPLETE in text else list(text.encode())}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in one.top]}
        for one in noted
    ]
    return {"content": content, "refusal": None}


def text_of(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token alone as text; part of a character is shown as one that is incomplete."""
    return str(tokenizer.decode([token]))


def _by_text(one: TokenLogprobs, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token_id, one.logprob)):
        found.setdefault(text_of(token, tokenizer), logprob)
    return found
