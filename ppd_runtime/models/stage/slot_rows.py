"""Rows of a pass whose attention reads each text's cache where it lies, by tables in device memory.

Nothing but the tables tells passes of one size apart: where the rows' entries lie, how many each row sees, and in which
slots. So a recorded pass serves any rows and any caches.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppd_runtime.models.stage.slot_attention import SPLIT, append_to_slots, attend_to_slots
from ppd_runtime.models.stage.trees import TextRows

_LEAST_TAIL = 8


class SlotTables(NamedTuple):
    """The tables of a pass in one tensor; see `slot_attention`."""

    numbers: tuple[int, ...]
    """The pass's layers."""
    windows: tuple[int | None, ...]
    tail: int
    """Slots that the tables have for each row, beside those that are the positions."""
    splits: int
    num_rows: int
    """Rows of the pass, those without a token among them."""
    table: Tensor
    """Int64, on the CPU."""

    @property
    def kind(self) -> Hashable:
        """What else tells passes apart; the caches' entries have one size."""
        return self.numbers, self.tail, self.splits

    def rows(self, table: Tensor) -> "SlotRows":
        """The rows of a pass, by the same table on its device."""
        rows, addresses = table.split([self.num_rows * (2 + self.tail), 2 * len(self.numbers) * self.num_rows])
        return SlotRows(self, rows.view(self.num_rows, -1), addresses.view(-1, 2, self.num_rows))


def slot_tables(texts: Sequence[TextRows], numbers: tuple[int, ...], num_rows: int) -> SlotTables:
    """Tables of a pass through the layers `numbers` over the texts' rows, which their caches must have room for.

    Raises:
        RuntimeError: if a cache has no entries yet.
    """
    rows, places = list[list[int]](), list[list[int]]()
    for text in texts:
        text.cache.layers[numbers[0]].check_room(1 + text.kept + max(path[-1] for path in text.paths))
        parts = [part for number in numbers for part in text.cache.layers[number].rows]
        if len(parts) < 2 * len(numbers):
            raise RuntimeError("a padded pass over a text without entries: run its prompt first")
        addresses = [part.data_ptr() for part in parts]
        for path in text.paths:
            in_place = next((i for i, row in enumerate(path) if row != i), len(path))
            rows.append([text.kept + n for n in (len(path), in_place, *path[in_place:])])
            places.append(addresses)
    tail = _doubled(_LEAST_TAIL, max(map(len, rows)) - 2)
    splits = _doubled(1, -(-max(row[0] for row in rows) // SPLIT))
    missing = num_rows - len(rows)
    of_rows = [number for row in rows for number in row + [0] * (2 + tail - len(row))] + [0] * (missing * (2 + tail))
    of_layers = [address for part in zip(*places, strict=True) for address in (*part, *[0] * missing)]
    windows = tuple(texts[0].cache.layers[number].sliding_window for number in numbers)
    return SlotTables(numbers, windows, tail, splits, num_rows, torch.tensor([*of_rows, *of_layers]))


def own_entries(texts: Sequence[TextRows], numbers: Sequence[int]) -> list[Tensor]:
    """The entries that a pass writes in the layers `numbers`, `[heads, dim]` each."""
    slots = [(text, text.kept + path[-1]) for text in texts for path in text.paths]
    return [part[slot] for number in numbers for text, slot in slots for part in text.cache.layers[number].rows]


def _doubled(least: int, most: int) -> int:
    while least < most:
        least *= 2
    return least


class SlotRows:
    """The rows of a pass that is running, as `row_attention.RunningRows`; those without a token run too.

    Args:
        of_pass: its tables.
        rows, addresses: parts of them on the device.
    """

    def __init__(self, of_pass: SlotTables, rows: Tensor, addresses: Tensor) -> None:
        self._pass, self._rows, self._addresses, self.size = of_pass, rows, addresses, of_pass.num_rows
        self._layer = 0
        """The place of the layer that has written last."""

    def places(self) -> Tensor:
        """The rows' positions, `[1, ROWS]`; 0 without a token."""
        return (self._rows[:, 0] - 1).clamp(min=0)[None]

    def append(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' entries, `[1, heads, ROWS, head_dim]` each, into layer `number` of their texts' caches."""
        self._layer = self._pass.numbers.index(number)
        append_to_slots(keys, values, self._rows, self._addresses[self._layer])
        return keys, values

    def attend(
        self,
        compute: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of queries `[1, heads, ROWS, dim]`, `[1, ROWS, heads, value_dim]`."""
        scale, cap = kwargs.get("scaling") or query.shape[3] ** -0.5, kwargs.get("softcap") or 0.0
        window, sizes = self._pass.windows[self._layer] or 0, (key.shape[1], value.shape[3])
        addresses, splits = self._addresses[self._layer], self._pass.splits
        return attend_to_slots(query, self._rows, addresses, *sizes, splits, scale, cap, window), None
