"""A stage that computes each text's states once: its sums are the model's, and ten thousand texts cost few passes.

A row of states is known by its bytes, so the stage also sees that a method feeds it the states of the text that its
layers hold: a KeyError where it does not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSubset


class Held(NamedTuple):
    """What a layer holds of a place."""

    item: int | bytes
    """The token; where states are all that a stage reads, the state's bytes."""
    subset: LayerSubset | None = None
    """Which wrote it; None: all of the model's layers."""


class RememberedStage(LayerRange):
    """Answers as `LayerRange` does, by passes of one text each that are run when they are asked for first."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._real = LayerRange(model)
        self._rows: dict[tuple[int | LayerSubset, tuple[Held, ...]], Tensor] = {}
        self._of_bytes: dict[bytes, Tensor] = {}
        """The rows by their bytes."""
        self._newest: dict[tuple[bytes, tuple[Held, ...]], Held] = {}
        """Whose state a row is, behind the text before it."""
        self._subsets: dict[LayerSubset, LayerSubset] = {}
        """One of those that run the same layers; they are named without their modules."""
        self._logits_of: dict[bytes, Tensor] = {}
        self._behind: dict[PreTrainedModel, RememberedStage] = {}
        self._columns: list[list[Held]] = []
        self._held: list[list[Held]] = []

    def behind(self, part: PreTrainedModel) -> "RememberedStage":
        """As `LayerRange.behind`."""
        if part not in self._behind:
            self._behind[part] = stage = RememberedStage(part)
            stage._of_bytes = self._of_bytes
        return self._behind[part]

    def begin(self, capacity: int) -> None:
        """Forget the last sequence."""
        self._held = [[] for _ in range(self.num_layers)]
        self._columns = []

    def length(self, layer: int) -> int:
        """Tokens that `layer` holds."""
        return len(self._held[layer])

    def check_position(self, layer: int, position: int) -> None:
        """As `LayerRange.check_position`."""
        assert self.length(layer) == position

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for held in self._held:
            del held[length:]

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """As `LayerRange.run`; states must be those of the text that these layers hold."""
        rows = []
        for item in self._items(inputs):
            self.check_position(first, position + len(rows))
            held = self._held[first]
            newest = self._newest[item, tuple(held)] if first else Held(item)
            for layer in range(first, last):
                self._held[layer].append(newest)
            rows.append(self._row(last, held))
        return _states(rows)

    def run_tree(self, token_ids: Sequence[int], parents: Sequence[int], position: int) -> Tensor:
        """As `LayerRange.run_tree`."""
        for layer in range(self.num_layers):
            self.check_position(layer, position)
        before, texts, rows = tuple(self._held[0]), list[tuple[Held, ...]](), []
        for token, parent in zip(token_ids, parents, strict=True):
            text = (*(before if parent < 0 else texts[parent]), Held(token))
            texts.append(text)
            rows.append(self._row(self.num_layers, text))
        for held in self._held:
            held.extend(Held(token) for token in token_ids)
        return _states(rows)

    def run_subset(self, subset: LayerSubset, token_ids: list[int], position: int) -> Tensor:
        """As `LayerRange.run_subset`, a token a pass."""
        same = subset._replace(decoder=None)  # another piece that runs the same layers
        self._subsets.setdefault(same, subset)
        rows = []
        for token in token_ids:
            for layer in subset.attending:
                self.check_position(layer, position + len(rows))
                self._held[layer].append(Held(token, same))
            rows.append(self._row(same, self._held[subset.attending[0]]))
        return _states(rows)

    def keep_path(self, position: int, nodes: Sequence[int]) -> None:
        """As `LayerRange.keep_path`."""
        for held in self._held:
            held[position:] = [held[position + node] for node in nodes]

    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """Numbers of what is held, for `import_entries`."""
        begin = len(self._columns)
        self._columns += [[held[place] for held in self._held[:last]] for place in range(first, end)]
        return torch.arange(begin, len(self._columns))

    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append them."""
        for entry in entries:
            for held, newest in zip(self._held, self._columns[int(entry)], strict=True):
                held.append(newest)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `LayerRange.logits`."""
        return self._logits(hidden[0, -1])

    def token_logits(self, hidden: Tensor) -> Tensor:
        """As `LayerRange.token_logits`."""
        return torch.stack([self._logits(hidden[0, i]) for i in range(hidden.shape[1])])

    def _logits(self, row: Tensor) -> Tensor:
        key = row.numpy().tobytes()
        if key not in self._logits_of:
            self._logits_of[key] = self._real.logits(row[None, None])
        return self._logits_of[key]

    def _items(self, inputs: list[int] | Tensor) -> list[int] | list[bytes]:
        return inputs if isinstance(inputs, list) else [row.numpy().tobytes() for row in inputs[0]]

    def _row(self, layers: int | LayerSubset, held: Sequence[Held]) -> Tensor:
        """The newest token's state behind the first so many layers, or a piece."""
        text = tuple(held)
        if (row := self._rows.get((layers, text))) is None:
            row = self._pass(layers, text) if isinstance(layers, int) else self._subset_pass(layers, text)
            self._rows[layers, text] = row
            name = row.numpy().tobytes()
            self._of_bytes[name], self._newest[name, text[:-1]] = row, text[-1]
        return row

    def _pass(self, last: int, text: Sequence[Held]) -> Tensor:
        self._real.begin(len(text))
        items = [held.item for held in text]
        inputs = items if isinstance(items[0], int) else _states([self._of_bytes[item] for item in items])
        return self._real.run(0, last, inputs, 0)[0, -1].clone()

    def _subset_pass(self, same: LayerSubset, text: Sequence[Held]) -> Tensor:
        """It reads the whole model's entries of the places before the first that it wrote itself."""
        tokens, whole = [held.item for held in text], sum(held.subset is None for held in text)
        self._real.begin(len(text))
        self._real.run(0, self.num_layers, tokens[:whole], 0)
        return self._real.run_subset(self._subsets[same], tokens[whole:], whole)[0, -1].clone()


def _states(rows: Sequence[Tensor]) -> Tensor:
    """`[1, tokens, hidden_size]`."""
    return rows[0][None, None] if len(rows) == 1 else torch.stack(list(rows))[None]
