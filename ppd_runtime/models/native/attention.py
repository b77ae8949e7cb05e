"""Attention of a few tokens to the rows of a cache, in code of our own; `attention.cpp` says how it works."""

from torch import Tensor

from ppd_runtime.models.native.library import Operator


def _like_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
    lists: Tensor,
    scale: float,
    window: float,
) -> Tensor:
    return queries.new_empty(1, queries.shape[2], queries.shape[1], values.shape[3])


few_tokens_attention = Operator(
    "few_tokens_attention",
    ("queries", "keys", "values", "where", "lists"),
    ("scale", "window"),
    _like_attention,
)
"""`[1, tokens, heads, value_dim]` of queries, `[1, heads, tokens, dim]`, keys, `[1, key_heads, rows, dim]`, and values,
`[1, key_heads, rows, value_dim]`, all float32 with contiguous rows.

Each token stands at a place, at the end of a text: `lists`, `[tokens, positions]`, are the rows in which the positions
of its text lie, up to its place. `where` is `[3, tokens]`: of each token the row of its own entries, its place, and how
many positions of its list are the same as in the list of the token before; 0 for the first one. These need only be in
the list of the first of several such tokens, which goes on behind its own place then. Both are int64.

Groups of `heads / key_heads` heads share keys and values; scores are multiplied by `scale`. A token sees its own
position and `window - 1` before it, or all where that is 0. Its bits depend neither on the tokens beside it nor on the
rows in which its text lies.
"""
