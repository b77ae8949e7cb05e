"""Log-probabilities of tokens, if a request asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppd_runtime.request_error import no_numbers

if TYPE_CHECKING:
    from torch import Tensor

LEAST = -9999.0
"""Stands for lower values, also minus infinity, which JSON lacks; as in vLLM."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities of a token.

    They are the log-softmax of the model's float32 logits, as in OpenAI's and vLLM's answers, without temperature,
    penalties and filters, which only decide what is sampled.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens here and their log-probabilities, in order; may include the token itself."""


def token_logprobs(logits: "Tensor", token_id: int, most: int, position: int) -> TokenLogprobs:
    """Log-probabilities of a token and of the `most` likeliest, from the whole model's `[vocab_size]` logits at a
    position.

    Raises:
        RequestError: if they are NaN.
    """
    found = logits.float().log_softmax(-1).clamp(LEAST, 0)
    if found.isnan().any():
        raise no_numbers(position)
    best = found.topk(min(most, len(found)))
    return TokenLogprobs(
        token_id, float(found[token_id]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )


def packed(noted: Sequence[TokenLogprobs]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Log-probabilities in messages' form: each token's number and its likeliest tokens' numbers, then the likeliest
    ids."""
    numbers = tuple(number for one in noted for number in (one.logprob, *(logprob for _, logprob in one.top)))
    return numbers, tuple(token for one in noted for token, _ in one.top)


def unpacked(numbers: Sequence[float], top_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """The inverse of `packed`; each token has equally many.

    Raises:
        ValueError: if the numbers are not of these tokens.
    """
    if len(numbers) != len(token_ids) + len(top_ids) or (token_ids and len(top_ids) % len(token_ids)):
        raise ValueError(f"{len(numbers)} log-probabilities and {len(top_ids)} ids for {len(token_ids)} tokens")
    most = len(top_ids) // max(len(token_ids), 1)
    noted = []
    for place, token in enumerate(token_ids):
        own, *others = numbers[place * (1 + most) : (place + 1) * (1 + most)]
        top = tuple(zip(top_ids[place * most : (place + 1) * most], others, strict=True))
        noted.append(TokenLogprobs(token, own, top))
    return tuple(noted)
