"""Products of a few tokens' states with a weight matrix, in code of our own; `products.cpp` says how it works.

A core reads each weight once for up to six tokens, and a token's bits do not depend on the tokens beside it.
"""

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ppd_runtime.models.native.library import Operator

MOST_ROWS = 24
"""Tokens up to which a product is made this way: the library makes larger ones faster."""
MOST_IN_OWN_PAGES = 2**26
"""Bytes of a model's halved weights up to which a process has its own copy where shared ones are in small pages."""
TILE = 16
"""Rows of a matrix in bfloat16 that stand together."""
_LARGE_PAGE, _LINE, _COMPARED_AT_ONCE = 2**21, 64, 2**18


def _like_product(states: Tensor, weight: Tensor) -> Tensor:
    return states.new_empty(states.shape[0], weight.shape[0])


product = Operator("few_rows_linear", ("states", "weight"), (), _like_product)
"""`[tokens, outputs]` of states, `[tokens, inputs]` in float32, and a weight, `[outputs, inputs]` in float32 or in
bfloat16 as `in_tiles` gives it; both contiguous."""


def _like_products(states: Tensor, *weights: Tensor) -> Tensor:
    return states.new_empty(states.shape[0], sum(weight.shape[0] for weight in weights))


PRODUCTS = (
    product,
    Operator("few_rows_linear_2", ("states", "first", "second"), (), _like_products),
    Operator("few_rows_linear_3", ("states", "first", "second", "third"), (), _like_products),
)
"""The same of one weight, of two, and of three: the outputs of one behind those of the other, with the bits that each
has alone."""


def few_rows_linear(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """`linear` in float32, up to rounding.

    `multiply` makes the product of `[tokens, inputs]` and `[outputs, inputs]`; None is `product`.
    """
    rows = states.numel() // states.shape[-1]
    if isinstance(rows, int) and rows > MOST_ROWS:
        return linear(states, weight, bias)
    flat = states.reshape(rows, states.shape[-1]).contiguous()
    found = (multiply or product)(flat, weight.contiguous())
    found = found.reshape(*states.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


def in_half_the_memory(weight: Tensor) -> Tensor | None:
    """A weight in bfloat16, as `in_tiles` gives it; None where one of its numbers would change."""
    half = weight.to(torch.bfloat16)
    return in_tiles(half) if torch.equal(half.to(weight.dtype), weight) else None


def same_numbers(half: Tensor, weight: Tensor) -> bool:
    """Whether a matrix in bfloat16, as `in_tiles` gives it, holds just what `weight` does."""
    if half.shape != weight.shape:
        return False
    if half.dim() > 2:
        return all(map(same_numbers, half, weight))
    rows = TILE * max(1, _COMPARED_AT_ONCE // max(1, weight[:TILE].numel()))  # a whole copy's memory would be kept
    pairs = (
        (tiled, part, part.to(half.dtype)) for tiled, part in zip(half.split(rows), weight.split(rows), strict=True)
    )
    return all(torch.equal(new.to(old.dtype), old) and torch.equal(tiled, in_tiles(new)) for tiled, old, new in pairs)


def in_tiles(matrix: Tensor) -> Tensor:
    """A matrix in bfloat16 with its numbers in the order in which `product` reads them, which `bfloat16.cpp` describes;
    or several, `[matrices, outputs, inputs]`.

    The shape says nothing of that order: only `product` may read the result.
    """
    if matrix.dim() > 2:
        return torch.stack([in_tiles(each) for each in matrix])
    outputs, inputs = matrix.shape
    paired, whole = inputs - inputs % 2, outputs - outputs % TILE
    parts = []
    for some, rows in ((matrix[:whole], TILE), (matrix[whole:], outputs - whole)):
        if some.numel():
            tiles = some.reshape(-1, rows, inputs)
            pairs = tiles[:, :, :paired].reshape(len(tiles), rows, -1, 2).transpose(1, 2)
            parts.append(torch.cat([pairs.reshape(len(tiles), -1), tiles[:, :, paired:].flatten(1)], dim=1).flatten())
    return torch.cat(parts).view(outputs, inputs) if parts else matrix


class LargePages:
    """Memory in pages of 2 MB, where Linux gives them: reading weights in pages of 4 KB takes up to 1.4 times as long.

    Args:
        most_bytes: that tensors may take; only what they do take is used.
    """

    def __init__(self, most_bytes: int) -> None:
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0
        with contextlib.suppress(OSError):  # no room to reserve, or a kernel without them
            memory = mmap.mmap(-1, most_bytes + 2 * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            self._used = -self._memory.data_ptr() % _LARGE_PAGE
            memory.madvise(mmap.MADV_HUGEPAGE)

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, in this memory; the tensor itself where there is no room."""
        end = self._used + tensor.numel() * tensor.element_size()
        if end > len(self._memory):
            return tensor.contiguous()
        place = self._memory[self._used : end].view(tensor.dtype).view(tensor.shape)
        self._used = -(-end // _LINE) * _LINE
        return place.copy_(tensor)


def product_weights(piece: nn.Module) -> set[str]:
    """The names of a piece's weights that linear layers alone are known to read."""
    return {f"{name}.weight" for name, module in piece.named_modules() if type(module) is nn.Linear}
