"""Triton kernels: attention of a pass's rows over their texts' caches, each read where it lies.

The keys of a row are cut by position into splits, and splits into blocks. One program adds up a split of one row and
key head, and the splits' results are joined in order. So a row's bits depend on its own entries and their positions
alone: not on slots, on other rows, nor on how many programs run beside its own.

A pass is told its rows in tables of int64 on the device: `rows`, `[ROWS, 2 + tail]`, has how many entries each row sees
(0: there is no row), for how many of them the position is the slot, and the slots of the others; `addresses`,
`[2, ROWS]`, where the keys and the values of each row's text begin in the layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

SPLIT = 512
"""Positions of a split."""
_BLOCK = 64
"""Positions that a program reads at a time."""
_LEAST = 16
"""The least rows and numbers of a product on a GPU's matrix units."""


@triton.jit
def _slots(rows: tl.tensor, positions: tl.tensor, in_place: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """The slots of positions of one row, whose numbers in the table begin at `rows`."""
    beside = tl.load(rows + 2 + positions - in_place, mask=seen & (positions >= in_place), other=0)
    return tl.where(positions < in_place, positions, beside)


@triton.jit(do_not_specialize=["row_size"], do_not_specialize_on_alignment=["keys", "values"])
def _append(
    keys: tl.tensor, values: tl.tensor, rows: tl.tensor, addresses: tl.tensor, row_size: tl.tensor,
    head_step: tl.constexpr, row_step: tl.constexpr, value_head_step: tl.constexpr, value_row_step: tl.constexpr,
    num_rows: tl.constexpr, heads: tl.constexpr, heads_wide: tl.constexpr, dim: tl.constexpr, wide: tl.constexpr,
    value_dim: tl.constexpr, value_wide: tl.constexpr,
) -> None:  # fmt: skip
    """Write one row's keys and values into the slot of the last position that the row sees."""
    row = tl.program_id(0)
    of_row = rows + row * row_size
    length, in_place = tl.load(of_row), tl.load(of_row + 1)
    if length > 0:
        slot = _slots(of_row, length - 1, in_place, length > 0)
        head, numbers = tl.arange(0, heads_wide)[:, None], tl.arange(0, wide)[None, :]
        of_value = tl.arange(0, value_wide)[None, :]
        known = (head < heads) & (numbers < dim)
        key = tl.load(keys + head * head_step + row * row_step + numbers, mask=known)
        to_keys = tl.multiple_of(tl.load(addresses + row).to(keys.dtype), 16)
        tl.store(to_keys + (slot * heads + head) * dim + numbers, key, mask=known)
        known = (head < heads) & (of_value < value_dim)
        value = tl.load(values + head * value_head_step + row * value_row_step + of_value, mask=known)
        to_values = tl.multiple_of(tl.load(addresses + num_rows + row).to(values.dtype), 16)
        tl.store(to_values + (slot * heads + head) * value_dim + of_value, value, mask=known)


@triton.jit(do_not_specialize=["row_size", "splits"], do_not_specialize_on_alignment=["query"])
def _attend_split(
    query: tl.tensor, rows: tl.tensor, addresses: tl.tensor, sums: tl.tensor, largest_scores: tl.tensor,
    totals: tl.tensor, row_size: tl.tensor, splits: tl.tensor, scale: tl.constexpr, cap: tl.constexpr,
    window: tl.constexpr, head_step: tl.constexpr, row_step: tl.constexpr, num_rows: tl.constexpr,
    key_heads: tl.constexpr, group: tl.constexpr, group_wide: tl.constexpr, dim: tl.constexpr, wide: tl.constexpr,
    value_dim: tl.constexpr, value_wide: tl.constexpr, split_size: tl.constexpr, block: tl.constexpr,
    in_float32: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of a key head's query heads of one row over one split: sums of values that are not yet divided by their
    `totals`, `[ROWS, heads, splits, value_dim]`, and the largest scores that these are relative to.
    """
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of_row = rows + row * row_size
    length, in_place = tl.load(of_row), tl.load(of_row + 1)
    start = tl.maximum(length - window, 0) if window else 0
    first = tl.maximum(split * split_size, start // block * block)
    end = tl.minimum((split + 1) * split_size, length)
    if first < end:
        heads, numbers, of_value = tl.arange(0, group_wide), tl.arange(0, wide), tl.arange(0, value_wide)
        inside = heads < group
        from_query = query + (key_head * group + heads)[:, None] * head_step + row * row_step + numbers[None, :]
        asked = tl.load(from_query, mask=inside[:, None] & (numbers < dim)[None, :], other=0)
        keys = tl.multiple_of(tl.load(addresses + row).to(query.dtype), 16) + key_head * dim
        values = tl.multiple_of(tl.load(addresses + num_rows + row).to(query.dtype), 16) + key_head * value_dim
        largest = tl.full([group_wide], float("-inf"), tl.float32)
        total, summed = tl.zeros([group_wide], tl.float32), tl.zeros([group_wide, value_wide], tl.float32)
        for at in range(first, end, block):
            positions = at + tl.arange(0, block)
            seen = (positions >= start) & (positions < length)
            slots = _slots(of_row, positions, in_place, seen) * key_heads
            known = seen[None, :] & (numbers < dim)[:, None]
            key = tl.load(keys + slots[None, :] * dim + numbers[:, None], mask=known, other=0)
            known = seen[:, None] & (of_value < value_dim)[None, :]
            value = tl.load(values + slots[:, None] * value_dim + of_value[None, :], mask=known, other=0)
            if in_float32:
                asked, key = asked.to(tl.float32), key.to(tl.float32)
            scores = tl.dot(asked, key, input_precision="ieee") * scale
            if cap > 0:
                scores = cap * (1 - 2 / (tl.exp(2 / cap * scores) + 1))
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(largest, tl.max(scores, 1))
            shares, shrunk = tl.exp(scores - higher[:, None]), tl.exp(largest - higher)
            total = total * shrunk + tl.sum(shares, 1)
            shares = shares.to(value.dtype)
            if in_float32:
                shares, value = shares.to(tl.float32), value.to(tl.float32)
            summed = summed * shrunk[:, None] + tl.dot(shares, value, input_precision="ieee")
            largest = higher
        to = ((row * key_heads + key_head) * group + heads) * splits + split
        tl.store(largest_scores + to, largest, mask=inside)
        tl.store(totals + to, total, mask=inside)
        known = inside[:, None] & (of_value < value_dim)[None, :]
        tl.store(sums + to[:, None] * value_dim + of_value[None, :], summed, mask=known)


@triton.jit(do_not_specialize=["row_size", "splits"])
def _join_splits(
    sums: tl.tensor, largest_scores: tl.tensor, totals: tl.tensor, rows: tl.tensor, output: tl.tensor,
    row_size: tl.tensor, splits: tl.tensor, window: tl.constexpr, key_heads: tl.constexpr, group: tl.constexpr,
    group_wide: tl.constexpr, value_dim: tl.constexpr, value_wide: tl.constexpr, split_size: tl.constexpr,
) -> None:  # fmt: skip
    """Join the splits of a key head's query heads of one row in their order; zeros if there is no row."""
    row, key_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(rows + row * row_size)
    start = tl.maximum(length - window, 0) if window else 0
    heads, of_value = tl.arange(0, group_wide), tl.arange(0, value_wide)
    inside, head = heads < group, (row * key_heads + key_head) * group + heads
    known = inside[:, None] & (of_value < value_dim)[None, :]
    largest = tl.full([group_wide], float("-inf"), tl.float32)
    total, summed = tl.zeros([group_wide], tl.float32), tl.zeros([group_wide, value_wide], tl.float32)
    for split in range(start // split_size, tl.cdiv(length, split_size)):
        at = head * splits + split
        of_split = tl.load(largest_scores + at, mask=inside, other=0)
        higher = tl.maximum(largest, of_split)
        shrunk, share = tl.exp(largest - higher), tl.exp(of_split - higher)
        total = total * shrunk + tl.load(totals + at, mask=inside, other=1) * share
        values = tl.load(sums + at[:, None] * value_dim + of_value[None, :], mask=known, other=0)
        summed, largest = summed * shrunk[:, None] + values * share[:, None], higher
    result = summed / tl.where(length > 0, total, 1)[:, None]
    to = output + head[:, None] * value_dim + of_value[None, :]
    tl.store(to, result.to(output.dtype.element_ty), mask=known)


@torch.library.custom_op("ppd::append_to_slots", mutates_args=())  # what it changes lies at addresses
def append_to_slots(keys: Tensor, values: Tensor, rows: Tensor, addresses: Tensor) -> None:
    """Write the rows' entries, `[1, heads, ROWS, dim]` each, where the texts' caches lie."""
    keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
    _, heads, num_rows, dim = keys.shape
    wide, value_wide = triton.next_power_of_2(dim), triton.next_power_of_2(values.shape[3])
    _append[num_rows,](
        keys, values, rows, addresses, rows.shape[1], *keys.stride()[1:3], *values.stride()[1:3], num_rows, heads,
        triton.next_power_of_2(heads), dim, wide, values.shape[3], value_wide,
    )  # fmt: skip


@append_to_slots.register_fake
def _(keys: Tensor, values: Tensor, rows: Tensor, addresses: Tensor) -> None:
    """It gives nothing."""


@torch.library.custom_op("ppd::attend_to_slots", mutates_args=())
def attend_to_slots(
    query: Tensor, rows: Tensor, addresses: Tensor, key_heads: int, value_dim: int, splits: int, scale: float,
    cap: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of queries `[1, heads, ROWS, dim]`, `[1, ROWS, heads, value_dim]`.

    Args:
        splits: those of the longest row, or more.
        cap: soft cap of the scores; 0: none.
        window: entries that a row sees at most; 0: no bound.
    """
    query = query if query.stride(3) == 1 else query.contiguous()
    _, heads, num_rows, dim = query.shape
    value_wide, group = max(_LEAST, triton.next_power_of_2(value_dim)), heads // key_heads
    of_group = key_heads, group, max(_LEAST, triton.next_power_of_2(group))
    sums = query.new_empty((num_rows, heads, splits, value_dim), dtype=torch.float32)
    largest, totals = sums.new_empty(sums.shape[:3]), sums.new_empty(sums.shape[:3])
    output = query.new_empty((1, num_rows, heads, value_dim))
    _attend_split[num_rows, key_heads, splits](
        query, rows, addresses, sums, largest, totals, rows.shape[1], splits, scale, cap, window,
        *query.stride()[1:3], num_rows, *of_group, dim, max(_LEAST, triton.next_power_of_2(dim)), value_dim,
        value_wide, SPLIT, _BLOCK, isinstance(_attend_split, InterpretedFunction),
    )  # fmt: skip
    _join_splits[num_rows, key_heads](
        sums, largest, totals, rows, output, rows.shape[1], splits, window, *of_group, value_dim, value_wide, SPLIT
    )
    return output


@attend_to_slots.register_fake
def _(query: Tensor, rows: Tensor, addresses: Tensor, key_heads: int, value_dim: int, *_: object) -> Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value_dim))
