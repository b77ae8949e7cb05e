"""Attention of a few tokens to the rows of a cache, in code of our own; `attention.cpp` says how it works."""

from torch import Tensor

from ppd_runtime.models.native.library import Operator


def _like_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: Tensor, tails: Tensor, scale: float
) -> Tensor:
    return queries.new_empty(1, queries.shape[2], queries.shape[1], values.shape[3])


few_tokens_attention = Operator(
    "few_tokens_attention", ("queries", "keys", "values", "mask", "places", "tails"), ("scale",), _like_attention
)
"""`[1, tokens, heads, value_dim]` of queries, `[1, heads, tokens, dim]`, keys, `[1, key_heads, rows, dim]`, values,
`[1, key_heads, rows, value_dim]`, and an additive mask, `[1, 1, tokens, rows]`, all float32 with contiguous rows.

Each token stands at a place, `places` are `[1, tokens]`, at the end of a text whose entries lie in the rows of their
positions, but for the last ones: `tails`, `[tokens, depth]`, are the rows at the `depth` positions that end with the
last place of all. Those behind a token's own place may be any rows. Both are int64.

Groups of `heads / key_heads` heads share keys and values; scores are multiplied by `scale`. A token's bits depend
neither on the tokens beside it nor on the rows in which its text lies.
"""
