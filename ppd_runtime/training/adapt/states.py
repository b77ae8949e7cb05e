"""Hidden states of texts after some of a model's layers, and labels of their tokens, in files of bounded size."""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.training.adapt.answers import Text
from ppd_runtime.training.adapt.work_folder import damaged, whole_lines
from ppd_runtime.tune.match_rates import exit_states

_HEAD_ROWS = 64  # places whose logits are computed together
_CHOICE = torch.int32
_ENDINGS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class KeptText:
    """The places of one text: tokens after each of which full depth chose another, or the text goes on."""

    source: int
    places: range
    """Their numbers among all places."""


class KeptStates:
    """Files of states: `[places, hidden_size]` for each layer, and `[places]` choices.

    A text counts once its line is in the index; what a killed run wrote after that is cut off.

    Args:
        folder: where the files are.
        layers: those after which states are kept, in rising order.
        hidden_size: of a state.
        dtype: the states' in the files.

    Raises:
        ValueError: if a file has less than the index says, or the index is damaged.
    """

    def __init__(
        self, folder: Path, layers: Sequence[int], hidden_size: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._folder, self.layers, self._hidden_size, self._dtype = folder, tuple(layers), hidden_size, dtype
        self._index = folder / "texts.jsonl"
        self._texts: list[tuple[int, int]] = [tuple(line) for line in whole_lines(self._index, 2)]
        for path, bytes_of_place in self._files():
            path.touch()
            if path.stat().st_size < self.num_places * bytes_of_place:
                raise damaged(path)
            os.truncate(path, self.num_places * bytes_of_place)

    @property
    def bytes_of_place(self) -> int:
        """What a place takes in all files."""
        return sum(size for _, size in self._files())

    @property
    def num_texts(self) -> int:
        """Texts that are kept."""
        return len(self._texts)

    @property
    def num_places(self) -> int:
        """Places of all texts."""
        return sum(places for _, places in self._texts)

    def keep(self, text: Text, states: Sequence[Tensor], choices: Tensor) -> None:
        """Append a text's places: `[places, hidden_size]` after each layer, and `[places]` token ids."""
        rows = [*(of_layer.to("cpu", self._dtype) for of_layer in states), choices.to("cpu", _CHOICE)]
        for (path, _), numbers in zip(self._files(), rows, strict=True):
            with path.open("ab") as file:
                file.write(numbers.contiguous().view(torch.uint8).numpy().tobytes())
        line = (text.source, len(choices))
        with self._index.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._texts.append(line)

    def texts(self) -> Iterator[KeptText]:
        """The kept texts, in their order."""
        start = 0
        for source, places in self._texts:
            yield KeptText(source, range(start, start + places))
            start += places

    def states(self, layer: int) -> Tensor:
        """`[places, hidden_size]` after a layer, mapped into memory."""
        shape = self.num_places, self._hidden_size
        return _mapped(self._state_file(layer), shape[0] * shape[1], self._dtype).view(shape)

    def choices(self) -> Tensor:
        """`[places]`, the label of each place: full depth's choice after it, or the text's next token."""
        return _mapped(self._choice_file, self.num_places, _CHOICE).long()

    @property
    def _choice_file(self) -> Path:
        return self._folder / "choices.i32"

    def _state_file(self, layer: int) -> Path:
        return self._folder / f"layer-{layer}.{_ENDINGS[self._dtype]}"

    def _files(self) -> list[tuple[Path, int]]:
        """Each file and the bytes that a place takes there."""
        of_state = self._hidden_size * self._dtype.itemsize
        return [*((self._state_file(layer), of_state) for layer in self.layers), (self._choice_file, _CHOICE.itemsize)]


class Reader:
    """Reads texts through a stage's own layers, whatever the format of their weights.

    Args:
        stage: the model.
        layers: those after which states are wanted, in rising order.
        chooses: whether full depth's choices are wanted. Else the labels are the text's own next tokens, and the layers
            behind the last one of `layers` do not run.
    """

    def __init__(self, stage: LayerRange, layers: Sequence[int], chooses: bool = True) -> None:
        self._stage, self._layers, self._chooses = stage, tuple(layers), chooses
        self._head = FinalHead(stage.model)

    @torch.inference_mode()
    def read(self, text: Text) -> tuple[list[Tensor], Tensor]:
        """`[places, hidden_size]` after each layer, and `[places]` labels.

        The places are the tokens from the last one before `text.first` on, without the text's last.
        """
        token_ids, first = list(text.token_ids[:-1]), text.first - 1
        self._stage.begin(len(token_ids))
        layers = (*self._layers, *[self._stage.num_layers] * self._chooses)
        states = [of_layer[first:] for of_layer in exit_states(self._stage, token_ids, 0, layers)]
        if not self._chooses:
            return states, torch.tensor(text.token_ids[text.first :], device=self._stage.device)
        rows = states.pop()[None].split(_HEAD_ROWS, dim=1)
        return states, torch.cat([self._head(some)[0].argmax(-1) for some in rows])


def read_all(kept: KeptStates, texts: Iterable[Text], reader: Reader, most_bytes: float) -> Iterator[int]:
    """Keep the states of texts that are not kept yet, and yield the number of kept texts after each.

    It ends when the files would be larger than `most_bytes`.
    """
    for text in itertools.islice(texts, kept.num_texts, None):
        places = len(text.token_ids) - text.first
        if (kept.num_places + places) * kept.bytes_of_place > most_bytes:
            return
        kept.keep(text, *reader.read(text))
        yield kept.num_texts


def room(folder: Path, disk_gb: float) -> float:
    """Bytes that states in a folder may take: so many gigabytes, and less than what is free."""
    return min(1e9 * disk_gb, 0.9 * shutil.disk_usage(folder).free)


def _mapped(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
