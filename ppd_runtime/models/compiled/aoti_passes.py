"""Passes through compiled layers, each layer launched from Python; on GPUs recorded once and replayed as one."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppd_runtime.models.native.layers import reads_mask
from ppd_runtime.models.stage.caches import PreallocatedLayer
from ppd_runtime.models.stage.graphs import Recordings, current_device
from ppd_runtime.models.stage.trees import TokenTree, chain_of

_LARGEST_RECORDED = 2**28
"""Bytes of a layer's weights up to which passes are recorded. An estimate: an H100 reads them in 0.1 ms, about as long
as a launch from Python takes. Above it the device is behind the launches anyway, and a recording costs 12 to 20 ms for
every 64 tokens of a cache."""


class Part(NamedTuple):
    """A layer's code with its weights; a head is one, too."""

    code: "AotiCode"
    weights: list[Tensor]
    num_bytes: int = 0
    """The weights' size."""


class AotiCode:
    """Compiled code from a file in PyTorch's package format.

    Raises:
        ValueError: if it cannot be loaded.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        from torch._C._aoti import AOTIModelPackageLoader  # torch._inductor takes seconds to import

        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        can_be_recorded = device.type == "cuda"  # runs without locks, which a recording cannot hold
        try:
            loader = AOTIModelPackageLoader(str(path), "model", can_be_recorded, 1, -1 if index is None else index)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"compile: {path} cannot be loaded ({reason}); remove it to have it made again") from error
        self.run: Any = loader.run
        self.metadata: dict[str, str] = loader.get_metadata()
        self.reads_mask = reads_mask(self.metadata)


class LaunchedPasses:
    """Passes of one stage on a device; see `native.layers.NativePasses`, which does the same in one call.

    Compiled code works on the current device's stream, and loading it changes the current device. So each call makes
    the stage's device current for its duration, in any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._recordings = Recordings() if device.type == "cuda" else None
        self.largest_recorded: float = _LARGEST_RECORDED
        """The largest layer, in bytes of weights, whose passes are recorded."""

    @property
    def num_recorded(self) -> int:
        """Recordings made so far; 0 on a CPU."""
        return self._recordings.made if self._recordings else 0

    def load(self, path: Path) -> AotiCode:
        """The code of a file; ValueError if it cannot be loaded."""
        with current_device(self._device):
            return AotiCode(path, self._device)

    def part(self, code: AotiCode, weights: Sequence[Tensor]) -> Part:
        """A layer or a head."""
        return Part(code, list(weights), sum(weight.nbytes for weight in weights))

    def forget(self) -> None:
        """Nothing to forget: recordings are keyed by the caches' addresses and serve any caches there."""

    @torch.inference_mode()
    def head(self, part: Part, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """Logits of hidden states `[1, tokens, hidden_size]`, in the shape `shape`."""
        with current_device(self._device):
            return part.code.run([hidden.contiguous(), *part.weights])[0].view(shape)

    @torch.inference_mode()
    def run(
        self,
        key: Hashable,
        parts: Sequence[Part],
        numbers: Sequence[int | None],
        hidden: Tensor,
        caches: Sequence[PreallocatedLayer],
        tree: TokenTree | None = None,
    ) -> Tensor:
        """Implements `NativePasses.run`."""
        tokens = hidden.shape[1]
        attending = [None if number is None else caches[number] for number in numbers]
        position = next(cache.length for cache in attending if cache)
        extent = tokens if tree is None else tree.extent
        rows = [cache.next_rows(tokens, extent) if cache else () for cache in attending]
        windows = [cache.sliding_window if cache else None for cache in attending]

        def launch(hidden: Tensor, position: Tensor) -> Tensor:
            if tree is None and all(part.code.reads_mask for part in parts):
                return _launch(parts, rows, hidden, position)
            return _launch_several(parts, rows, windows, tree or chain_of(1, self._device), hidden, position)

        again = tree is None or tree.comes_again  # a recording reads what the tree holds
        if self._recordings and again and all(part.num_bytes <= self.largest_recorded for part in parts):
            tensors = [tensor for pair in rows for tensor in pair]
            places = tuple(tensor.data_ptr() for tensor in tensors)
            key = (key, tree, tensors[0].shape[0], places)
            with current_device(self._device):
                where = torch.full((1,), position, dtype=torch.int64, device=hidden.device)
                return self._recordings.run(
                    key, (hidden, where), launch, lambda: [rows[position : position + tokens] for rows in tensors]
                )
        with current_device(self._device):
            return launch(hidden, self._position.fill_(position))


def _launch(parts: Sequence[Part], rows: Sequence[tuple[Tensor, ...]], hidden: Tensor, position: Tensor) -> Tensor:
    for part, of_layer in zip(parts, rows, strict=True):
        attends = (position, *of_layer) if of_layer else ()
        (hidden,) = part.code.run([hidden, *attends, *part.weights])
    return hidden


def _launch_several(
    parts: Sequence[Part],
    rows: Sequence[tuple[Tensor, ...]],
    windows: Sequence[int | None],
    tree: TokenTree,
    hidden: Tensor,
    position: Tensor,
) -> Tensor:
    """Run the tree at `position`."""
    own_rows, places = tree.rows + position, tree.depths + position
    size = next(of_layer[0].shape[0] for of_layer in rows if of_layer)
    masks = {w: tree.mask(position, size, w, hidden.dtype) for w in set(windows)}
    for part, of_layer, window in zip(parts, rows, windows, strict=True):
        attends: tuple[Tensor, ...] = ()
        if of_layer and part.code.reads_mask:
            attends = own_rows, *of_layer, places[None], masks[window]
        elif of_layer:
            where = torch.stack([own_rows, places, torch.zeros_like(places)])
            attends = where, *of_layer, tree.lists(int(position))
        (hidden,) = part.code.run([hidden, *attends, *part.weights])
    return hidden
