"""Passes over few tokens in compiled code: one token's, several tokens' (a chain, a tree, or siblings, which all stand
at one position), and one token's through layers with a sub-layer left out; each has code of its own.

Code is made by `compiling`, a file for each kind of layer and pass.
"""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.compiling import (
    AT_ONCE,
    MOST_SEVERAL,
    READ_BY_PRODUCTS,
    compile_layers,
    compile_part,
    compile_part_head,
    kinds_of,
    layer_for,
    weights_of,
)
from ppd_runtime.models.cuda_graphs import Launch, Recordings
from ppd_runtime.models.kv_cache import PreallocatedLayer
from ppd_runtime.models.loading import HEAD, SEVERAL, WITHOUT_ATTENTION, WITHOUT_MLP
from ppd_runtime.models.products import MOST_ROWS, LargePages, has_own_products, in_half_the_memory, kernel
from ppd_runtime.models.stage import FinalHead, Piece, layer_range
from ppd_runtime.models.trees import TokenTree


class _Part(NamedTuple):
    """A layer, or the head."""

    code: Any
    weights: list[Tensor]


class CompiledHead:
    """Final norm and head in compiled code; passes over many tokens, such as a prompt's, are the library's."""

    def __init__(self, part: _Part, library: FinalHead) -> None:
        self._part, self._library = part, library

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[1, tokens, vocab_size]` of hidden states `[1, tokens, hidden_size]`."""
        if hidden.shape[0] != 1 or hidden.shape[1] > MOST_ROWS or hidden.dtype != torch.float32:
            return self._library(hidden)
        return self._part.code.run([hidden.contiguous(), *self._part.weights])[0]


class CompiledLayers:
    """The layers of a model, each for one token or several, in the code that `compile_layers` gave; perhaps its head.

    Args:
        model: whose layers they are.
        files: a file for each layer, by the number of tokens that a pass is over, or by what stands for one.

    Raises:
        ValueError: where a file cannot be loaded, or the model is one that cannot be run this way.
    """

    def __init__(self, model: PreTrainedModel, files: Mapping[int, Sequence[Path]]) -> None:
        _check_embedding(model)
        self._model = model
        self._loaded: dict[Path, Any] = {}
        self._halves: dict[Hashable, Tensor] = {}
        self._layers: dict[int, list[_Part]] = {}
        self.head: CompiledHead | None = None
        """The final norm and the head, where they are compiled."""
        for kind, paths in files.items():
            self._load(kind, paths)
        self._position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._recordings = Recordings() if model.device.type == "cuda" else None

    def add(self, *passes: int) -> None:
        """Have code for these passes too, such as `SEVERAL`; makes what no earlier run has made."""
        model = self._model
        for kind in (kind for each in passes for kind in kinds_of(each, model.device)):
            if kind not in self._layers:
                self._load(kind, compile_layers(model.config, model.dtype, model.device, kind))

    def _load(self, kind: int, paths: Sequence[Path]) -> None:
        if has_own_products(self._model.device, self._model.dtype):
            kernel()  # the code is going to ask for it
        for path in set(paths) - set(self._loaded):
            self._loaded[path] = _load(path, self._model.device)
        if kind == HEAD:
            (path,), final = paths, FinalHead(self._model)
            self.head = CompiledHead(self._part(self._loaded[path], final.module), final)
            return
        self._layers[kind] = [
            self._part(self._loaded[path], layer_for(self._model, i, kind))
            for i, path in enumerate(paths[: self._model.config.num_hidden_layers])
        ]

    def _part(self, code: Any, piece: nn.Module) -> "_Part":
        """Code with its weights as it takes them; those that lose nothing by it take half the memory."""
        halves = set(json.loads(code.get_metadata().get(READ_BY_PRODUCTS, "[]")))
        weights = weights_of(piece).items()
        return _Part(code, [self._halved(w) if name in halves else w.contiguous() for name, w in weights])

    @cached_property
    def _pages(self) -> LargePages:
        return LargePages(sum(2 * weight.numel() for weight in self._model.parameters()))

    def _halved(self, weight: Tensor) -> Tensor:
        place = (weight.data_ptr(), weight.shape, weight.stride())
        if place not in self._halves:
            half = in_half_the_memory(weight)
            self._halves[place] = weight.contiguous() if half is None else self._pages.copy(half)
        return self._halves[place]

    @staticmethod
    def of_part(part: PreTrainedModel) -> "CompiledLayers":
        """A model of one layer behind another model, such as an adapter, for one token and for several."""
        kinds, head = (1, *kinds_of(SEVERAL, part.device)), compile_part_head(part)
        files = {kind: [compile_part(part, kind)] for kind in kinds}
        return CompiledLayers(part, files | {HEAD: [head]} if head else files)

    def runs_tree(self, tokens: int) -> bool:
        """Whether there is code for a chain or a tree of so many, or so many siblings."""
        return tokens in self._layers or (
            tokens <= MOST_SEVERAL and all(size in self._layers or SEVERAL in self._layers for size in _sizes(tokens))
        )

    def runs_piece(self, piece: Piece) -> bool:
        """Whether there is code for one token's pass through a piece."""
        return all(kind in self._layers for kind in _kinds(piece))

    def run(self, first: int, last: int, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """Run one token, `[1, 1, hidden_size]`, through layers `first` to `last` (half-open); append to their caches.

        `caches` are all layers' caches; those of the range have been written before.
        """
        position = caches[first].length
        rows = [caches[i].next_rows() for i in range(first, last)]
        launch = partial(self._launch, self._layers[1][first:last], rows)
        return self._run(launch, hidden, position, rows, (first, last))

    def run_piece(self, piece: Piece, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """Run one token, `[1, 1, hidden_size]`, through the layers of a piece; append to the attending ones' caches."""
        position, kinds = caches[piece.attending[0]].length, _kinds(piece)
        layers = [self._layers[kind][i] for kind, i in zip(kinds, piece.numbers, strict=True)]
        rows = [caches[i].next_rows() if i in piece.attending else () for i in piece.numbers]
        launch = partial(self._launch, layers, rows)
        return self._run(launch, hidden, position, rows, (piece.numbers, tuple(kinds)))

    def run_tree(
        self, first: int, last: int, hidden: Tensor, tree: TokenTree, caches: Sequence[PreallocatedLayer]
    ) -> Tensor:
        """Run a tree's tokens, `[1, tokens, hidden_size]`, through layers `first` to `last`; append to their caches.

        `caches` are as in `run`.
        """
        start, states = caches[first].length, []
        comes_again = tree.is_chain or set(tree.parents) == {-1}
        for own in self._parts(hidden.shape[1]):
            size = own.stop - own.start
            layers = self._layers.get(size) or self._layers[SEVERAL]
            rows = [caches[i].next_rows(size) for i in range(first, last)]
            windows = [caches[i].sliding_window for i in range(first, last)]
            launch = partial(self._launch_several, layers[first:last], rows, windows, tree, own)
            key = (first, last, tree, own.start) if comes_again else None  # a recording reads what the tree holds
            states.append(self._run(launch, hidden[:, own], start, rows, key))
        return torch.cat(states, dim=1) if len(states) > 1 else states[0]

    def _parts(self, tokens: int) -> Iterator[slice]:
        """Where a pass over so many is cut."""
        sizes = [tokens] if tokens in self._layers or SEVERAL in self._layers else _sizes(tokens)
        start = 0
        for size in sizes:
            yield slice(start, start + size)
            start += size

    def _run(
        self,
        launch: Launch,
        hidden: Tensor,
        position: int,
        rows: Sequence[tuple[Tensor, ...]],
        key: tuple[Hashable, ...] | None,
    ) -> Tensor:
        """On GPUs from a recording, unless there is no use in a `key` for it."""
        if self._recordings and key is not None:
            tensors = [tensor for pair in rows for tensor in pair]
            places = tuple(tensor.data_ptr() for tensor in tensors)
            return self._recordings.run((*key, tensors[0].shape[0], places), hidden, position, launch)
        return launch(hidden, self._position.fill_(position))

    @staticmethod
    def _launch(
        layers: Sequence[_Part], rows: Sequence[tuple[Tensor, ...]], hidden: Tensor, position: Tensor
    ) -> Tensor:
        for layer, of_layer in zip(layers, rows, strict=True):
            attends = (position, *of_layer) if of_layer else ()
            (hidden,) = layer.code.run([hidden, *attends, *layer.weights])
        return hidden

    @staticmethod
    def _launch_several(
        layers: Sequence[_Part],
        rows: Sequence[tuple[Tensor, ...]],
        windows: Sequence[int | None],
        tree: TokenTree,
        own: slice,
        hidden: Tensor,
        position: Tensor,
    ) -> Tensor:
        """`own` are the tokens of the tree that `hidden` has; its roots stand at `position`."""
        places, first_row = (tree.depths[own] + position)[None], position + own.start if own.start else position
        masks = {w: tree.mask(position, rows[0][0].shape[0], w, hidden.dtype, own) for w in set(windows)}
        for layer, of_layer, window in zip(layers, rows, windows, strict=True):
            (hidden,) = layer.code.run([hidden, first_row, *of_layer, places, masks[window], *layer.weights])
        return hidden


def _sizes(tokens: int) -> list[int]:
    """Of the parts in which CPUs run so many tokens, as even as can be."""
    parts = -(-tokens // AT_ONCE)
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]


def _kinds(piece: Piece) -> list[int]:
    """What of each layer one token's pass through a piece runs."""
    return [
        WITHOUT_ATTENTION if i not in piece.attending else WITHOUT_MLP if i in piece.without_mlp else 1
        for i in piece.numbers
    ]


def _check_embedding(model: PreTrainedModel) -> None:
    """Refuse a decoder that does more to a token than look it up."""
    if isinstance(model.model.embed_tokens, nn.Identity):
        return
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        embedded = layer_range(model, 0, 0)(input_ids=token, use_cache=False).last_hidden_state
        if not torch.equal(embedded, model.model.embed_tokens(token)):
            raise ValueError(f"compile: a {model.config.model_type} model changes its embeddings; leave compile out")


def _load(path: Path, device: torch.device) -> Any:
    """Compiled code, without what `torch._inductor` would take seconds to import."""
    from torch._C._aoti import AOTIModelPackageLoader

    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    try:
        can_be_recorded = device.type == "cuda"  # without locks of its own, which a recording cannot hold
        return AOTIModelPackageLoader(str(path), "model", can_be_recorded, 1, -1 if index is None else index)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"compile: {path} cannot be loaded ({reason}); remove it to have it made anew") from error
