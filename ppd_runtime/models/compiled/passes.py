"""Passes over few tokens in compiled code: one token's, several tokens' (a chain, a tree, or candidates of one
position), and one token's through layers with a sub-layer left out; each has code of its own.

Code is made by `export`, a file for each kind of layer and pass.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.files.checksummed import is_whole
from ppd_runtime.files.large_pages import in_large_pages
from ppd_runtime.models.compiled.aoti_passes import LaunchedPasses
from ppd_runtime.models.compiled.code_metadata import DTYPES, READ_BY_PRODUCTS, weights_of
from ppd_runtime.models.compiled.export import (
    MOST_SEVERAL,
    compile_head,
    compile_layers,
    compile_part,
    compile_part_head,
    layer_for,
)
from ppd_runtime.models.native.drafts import ChainDrafting, PassVariants, Verification
from ppd_runtime.models.native.layers import NativePasses, calls_python
from ppd_runtime.models.native.library import is_available, load
from ppd_runtime.models.native.packing import packed_as
from ppd_runtime.models.native.products import (
    MOST_IN_OWN_PAGES,
    MOST_ROWS,
    LargePages,
    in_half_the_memory,
    same_numbers,
)
from ppd_runtime.models.pass_kinds import PassKind, head_rows
from ppd_runtime.models.stage.caches import PreallocatedLayer
from ppd_runtime.models.stage.slicing import FinalHead, LayerSubset
from ppd_runtime.models.stage.trees import PlacedTree, TokenTree


class CompiledHead:
    """Final norm and head in compiled code. Many tokens take several passes: the library rounds differently."""

    def __init__(
        self, part: Any, run: Callable[[Any, Tensor, Sequence[int]], Tensor], vocab_size: int, library: FinalHead
    ) -> None:
        self.part, self.vocab_size, self._run, self._library = part, vocab_size, run, library

    def __call__(self, hidden: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Logits `[1, tokens, vocab_size]` of hidden states `[1, tokens, hidden_size]`, or in the shape `shape`."""
        shape = shape or (*hidden.shape[:-1], self.vocab_size)
        if hidden.shape[0] != 1 or hidden.dtype != torch.float32:
            with torch.inference_mode():
                return self._library(hidden).view(shape)
        if hidden.shape[1] <= MOST_ROWS:
            return self._run(self.part, hidden, shape)
        return torch.cat([self(some) for some in hidden.split(MOST_ROWS, dim=1)], dim=1).view(*shape)


class CompiledLayers:
    """A model's layers in code from `compile_layers`, for one token or several; perhaps its head.

    Args:
        model: the layers' model.
        files: each layer's file, by the number of a pass's tokens or a `PassKind`.
        bfloat16_weights: by name; other processes map the same memory.
        code_of: makes the model's files for a kind of passes, or for its head, if no earlier run has made them.
        first: the first layer here, counted from 0.
        loaded: already loaded code, by file.

    Raises:
        ValueError: if a file cannot be loaded, or the model cannot be run this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        files: Mapping[int, Sequence[Path]],
        bfloat16_weights: Mapping[str, Tensor] | None = None,
        code_of: "Callable[[PreTrainedModel, int], Sequence[Path]] | None" = None,
        first: int = 0,
        loaded: Mapping[Path, Any] | None = None,
    ) -> None:
        self._model, self._code_of, self._first = model, code_of or _code_of, first
        files = {kind: self._whole(kind, paths) for kind, paths in files.items()}
        self._passes: Any = _passes(model, {path for paths in files.values() for path in paths})
        self._loaded = dict(loaded or {})
        shared = bfloat16_weights or {}
        named = dict(model.named_parameters()) if shared else {}
        self._shared = {named[name].data_ptr(): weight for name, weight in shared.items() if name in named}
        self._in_bfloat16: dict[Hashable, Tensor] = {}
        self._sharing: bool | None = None
        self._files: dict[int, Sequence[Path]] = {}
        self._layers: dict[int, list[Any]] = {}
        """Layers by kind of passes."""
        self.head: CompiledHead | None = None
        """The final norm and the head, if they are compiled."""
        for kind, paths in files.items():
            self._load(kind, paths)

    def add(self, *passes: int) -> None:
        """Load these passes' code too, such as `PassKind.SEVERAL`; makes what no earlier run has made."""
        for kind in set(passes) - set(self._layers):
            self._load(kind, self._code_of(self._model, kind))

    def _whole(self, kind: int, paths: Sequence[Path]) -> Sequence[Path]:
        """The files, or new ones if one was damaged or removed since it was made: a restarted worker may be given the
        path of an old one.
        """
        return paths if all(map(is_whole, set(paths))) else self._code_of(self._model, kind)

    def _load(self, kind: int, paths: Sequence[Path]) -> None:
        self._files[kind] = paths
        for path in set(paths) - set(self._loaded):
            self._loaded[path] = self._passes.load(path)
        if head_rows(kind) is not None:
            (path,), final = paths, FinalHead(self._model)
            part, size = self._part(self._loaded[path], final.module), self._model.lm_head.out_features
            self.head, self._head_code = CompiledHead(part, self._passes.head, size, final), self._loaded[path]
            return
        self._layers[kind] = [
            self._part(self._loaded[path], layer_for(self._model, i, kind)) if i >= self._first else None
            for i, path in enumerate(paths[: self._model.config.num_hidden_layers])
        ]

    def head_of(self, final: FinalHead) -> CompiledHead | None:
        """The head's code with another head's weights, of as many rows; None if it is not compiled."""
        if self.head is None:
            return None
        return CompiledHead(self._part(self._head_code, final.module), self._passes.head, self.head.vocab_size, final)

    def _part(self, code: Any, piece: nn.Module) -> Any:
        """Code with its weights in its formats; weights that are exact in half the memory take half."""
        by_products = set(json.loads(code.metadata.get(READ_BY_PRODUCTS, "[]")))
        weights = weights_of(piece).items()
        of_code = json.loads(code.metadata.get(DTYPES, "[]"))[-len(weights) :]
        for (name, weight), dtype in zip(weights, of_code, strict=False):
            if weight.is_floating_point() and str(weight.dtype) != dtype:
                raise ValueError(f"compile: {name} is {weight.dtype}, and the code reads it as {dtype}; run it without")
        return self._passes.part(code, [self._as_taken(name, weight, name in by_products) for name, weight in weights])

    def _as_taken(self, name: str, weight: Tensor, by_products: bool) -> Tensor:
        if weight.dtype == torch.uint8 and not by_products:
            raise ValueError(f"compile with weights: {name} is not read by products alone; leave one of them out")
        return self._as_bfloat16(weight) if by_products and weight.dtype != torch.uint8 else weight.contiguous()

    @cached_property
    def _pages(self) -> LargePages:
        return LargePages(sum(2 * weight.numel() for weight in self._model.parameters()))

    def _as_bfloat16(self, weight: Tensor) -> Tensor:
        place = (weight.data_ptr(), weight.shape, weight.stride())
        if place not in self._in_bfloat16:
            shared = self._shared.get(weight.data_ptr())
            alike = shared is not None and shared.stride() == weight.stride() and same_numbers(shared, weight)
            if shared is not None and alike and self._shares(shared):
                self._in_bfloat16[place] = shared
            else:
                half = in_half_the_memory(weight)
                self._in_bfloat16[place] = weight.contiguous() if half is None else self._pages.copy(half)
        return self._in_bfloat16[place]

    def _shares(self, half: Tensor) -> bool:
        """Whether to compute with shared weights: not if they are few and their pages are small."""
        if self._sharing is None:
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._shared.values())
            self._sharing = num_bytes > MOST_IN_OWN_PAGES or in_large_pages(half.data_ptr())
        return self._sharing

    @staticmethod
    def of_part(part: PreTrainedModel) -> "CompiledLayers":
        """Passes of a one-layer model behind one, such as an adapter, for one token and for several."""
        files = {kind: _code_of_part(part, kind) for kind in (1, PassKind.SEVERAL, PassKind.HEAD)}
        return CompiledLayers(part, {kind: paths for kind, paths in files.items() if paths}, code_of=_code_of_part)

    def over(self, model: PreTrainedModel) -> "CompiledLayers":
        """The first layer's code with the weights of a model of this layer alone."""
        files = {kind: paths[:1] for kind, paths in self._files.items() if head_rows(kind) is None}
        return CompiledLayers(model, files, code_of=self._code_of, loaded=self._loaded)

    def forget(self) -> None:
        """Let go of the last sequence's caches."""
        self._passes.forget()

    def runs_tree(self, tokens: int) -> bool:
        """Whether code exists for a chain or tree of `tokens`, or as many candidates of one position."""
        return tokens in self._layers or PassKind.SEVERAL in self._layers

    def runs_subset(self, piece: LayerSubset) -> bool:
        """Whether there is code for one token's pass through a piece."""
        return all(kind in self._layers for kind in _kinds(piece))

    def run(self, first: int, last: int, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """Run one token, `[1, 1, hidden_size]`, through layers `first` to `last` (half-open); append to their caches.

        `caches` are all layers' caches; those of the range have been written before.
        """
        return self._passes.run(*self._range(first, last), hidden, caches)

    def run_subset(self, piece: LayerSubset, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """Run one token, `[1, 1, hidden_size]`, through the layers of a piece; append to the attending ones' caches."""
        return self._passes.run(*self._some(piece), hidden, caches)

    def chain_drafting(
        self, layers: int | LayerSubset, behind: "CompiledLayers | None", embedding: Tensor
    ) -> ChainDrafting | None:
        """Greedy chains through a piece or the first `layers` layers, the last token too, and perhaps through a part
        behind them; with verification, if there is code for it. None if there is no code for the drafts.

        `embedding` is `[vocab_size, hidden_size]`, or packed.
        """
        head, part = (behind or self).head, behind._ways(0) if behind else None
        if not isinstance(self._passes, NativePasses) or not head or (behind and not part):
            return None
        if embedding.dtype not in (torch.float32, torch.uint8) or not embedding.is_contiguous():
            return None
        shape = packed_as(embedding)[1:] if embedding.dtype == torch.uint8 else embedding.shape
        if shape[0] < head.vocab_size:
            return None
        if isinstance(layers, int):
            way = self._range(0, layers) if 1 in self._layers else None
        else:
            way = self._some(layers) if self.runs_subset(layers) else None
        if way is None:
            return None
        route, continues = self._passes.route(*way), isinstance(layers, int)
        verifying, verification = self._ways(layers if isinstance(layers, int) else 0), None
        if verifying and self.head and self.head.vocab_size == head.vocab_size:
            verification = Verification(*verifying, self.head.part, min(MOST_SEVERAL, MOST_ROWS))
        return ChainDrafting(route, head.part, head.vocab_size, embedding, shape, part, verification, continues)

    def _ways(self, first: int) -> PassVariants | None:
        """Passes through the layers from `first` on; None unless there is code for just one token and several, in
        native passes."""
        kinds = {kind for kind in self._layers if kind >= 0}
        if not isinstance(self._passes, NativePasses) or kinds != {1, PassKind.SEVERAL}:
            return None
        one, several = (
            self._passes.route(*self._range(first, len(self._layers[1]), kind)) for kind in (1, PassKind.SEVERAL)
        )
        return PassVariants(one, several)

    def _range(self, first: int, last: int, kind: int = 1) -> tuple[Hashable, list[Any], Sequence[int | None]]:
        """Layers `first` to `last`, as passes take them: a key, the layers, and their caches' numbers."""
        return (kind, first, last), self._layers[kind][first:last], range(first, last)

    def _some(self, piece: LayerSubset) -> tuple[Hashable, list[Any], Sequence[int | None]]:
        """The layers of a piece, as `_range`."""
        kinds = _kinds(piece)
        layers = [self._layers[kind][i] for kind, i in zip(kinds, piece.numbers, strict=True)]
        return (piece.numbers, tuple(kinds)), layers, [i if i in piece.attending else None for i in piece.numbers]

    def run_tree(
        self, first: int, last: int, hidden: Tensor, tree: TokenTree, caches: Sequence[PreallocatedLayer]
    ) -> Tensor:
        """Run a tree's tokens, `[1, tokens, hidden_size]`, through layers `first` to `last`; append to their caches.

        `caches` are as in `run`. Many tokens run in several passes: the library's code, which could run them in one,
        rounds differently.
        """
        if tree.size in self._layers or tree.size <= MOST_SEVERAL:
            kind = tree.size if tree.size in self._layers else PassKind.SEVERAL
            return self._passes.run(*self._range(first, last, kind), hidden, caches, tree)
        position, count, states = caches[first].length, -(-tree.size // MOST_SEVERAL), []
        borders = [tree.size * i // count for i in range(count + 1)]
        for start, end in pairwise(borders):
            self._count(caches[first:last], position)  # each part stands where the tree does
            states.append(self.run_tree(first, last, hidden[:, start:end], tree.part(start, end), caches))
        self._count(caches[first:last], position + tree.size)
        return torch.cat(states, dim=1)

    @staticmethod
    def _count(caches: Sequence[PreallocatedLayer], tokens: int) -> None:
        for cache in caches:
            cache.length = tokens

    @property
    def num_recorded(self) -> int:
        """Recordings made of passes so far: CUDA graphs, see `graphs.Recordings`."""
        return self._passes.num_recorded

    @property
    def reads_lists(self) -> bool:
        """Whether all attention reads rows by a list, so that they may lie anywhere."""
        if not isinstance(self._passes, NativePasses):
            return False
        return not any(part.reads_mask for parts in self._layers.values() for part in parts if part)

    @property
    def joins_texts(self) -> bool:
        """Whether there is code for several texts' trees in one pass."""
        return isinstance(self._passes, NativePasses) and PassKind.SEVERAL in self._layers

    def run_trees(
        self, first: int, last: int, hidden: Tensor, trees: Sequence[PlacedTree], caches: Sequence[PreallocatedLayer]
    ) -> Tensor:
        """Run several texts' trees, one behind the other in `[1, tokens, hidden_size]`, through layers `first` to
        `last`; their entries go into the caches' rows that the trees name.
        """
        assert isinstance(self._passes, NativePasses)
        return self._passes.run_trees(*self._range(first, last, PassKind.SEVERAL), hidden, caches, trees)


def _passes(model: PreTrainedModel, files: Iterable[Path]) -> NativePasses | LaunchedPasses:
    if not is_available(model.device, model.dtype):
        return LaunchedPasses(model.device)
    load()  # the code is going to ask for it
    return LaunchedPasses(model.device) if any(map(calls_python, files)) else NativePasses()


def _code_of(model: PreTrainedModel, kind: int) -> Sequence[Path]:
    """A model's files for a kind of passes, or for its head if that is compiled."""
    if (rows := head_rows(kind)) is None:
        return compile_layers(model.config, model.dtype, model.device, kind)
    head = compile_head(model.config, model.dtype, model.device, rows)
    return [head] if head else []


def _code_of_part(part: PreTrainedModel, kind: int) -> Sequence[Path]:
    """Code of a model of one layer that runs behind another model."""
    head = compile_part_head(part) if kind == PassKind.HEAD else compile_part(part, kind)
    return [head] if head else []


def _kinds(piece: LayerSubset) -> list[int]:
    """What a one-token pass through a piece runs of each layer."""
    return [
        PassKind.WITHOUT_ATTENTION
        if i not in piece.attending
        else PassKind.WITHOUT_MLP
        if i in piece.without_mlp
        else 1
        for i in piece.numbers
    ]
