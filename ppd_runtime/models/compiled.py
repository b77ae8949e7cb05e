"""Passes over few tokens in compiled code: one token's, siblings' (tokens that all stand at one position), chains,
trees, and one token's through layers with a sub-layer left out; each has code of its own.

Code is made by `compiling`, a file for each kind of layer and pass.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.compiling import MOST_CHAINED, compile_layers, compile_part, layer_for, weights_of
from ppd_runtime.models.cuda_graphs import Recordings
from ppd_runtime.models.kv_cache import PreallocatedLayer
from ppd_runtime.models.loading import CHAIN, TREE, WITHOUT_ATTENTION, WITHOUT_MLP
from ppd_runtime.models.stage import Piece, layer_range
from ppd_runtime.models.trees import TokenTree

_AT_ONCE = 5  # rows of which CPUs make the best; see `few_rows_linear`


class _Layer(NamedTuple):
    code: Any
    weights: list[Tensor]


class CompiledLayers:
    """The layers of a model, each for one token, siblings or a chain, in the code that `compile_layers` gave.

    Args:
        model: whose layers they are.
        files: a file for each layer, by the number of siblings that a pass is over, 1 for one token's, or `CHAIN`.

    Raises:
        ValueError: where a file cannot be loaded, or the model is one that cannot be run this way.
    """

    def __init__(self, model: PreTrainedModel, files: Mapping[int, Sequence[Path]]) -> None:
        _check_embedding(model)
        self._model = model
        self._loaded: dict[Path, Any] = {}
        self._layers: dict[int, list[_Layer]] = {}
        for siblings, paths in files.items():
            self._load(siblings, paths)
        self._position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._recordings = Recordings() if model.device.type == "cuda" else None

    def add(self, *passes: int) -> None:
        """Have code for these passes too, such as a `TREE`; makes what no earlier run has made."""
        for siblings in passes:
            if siblings not in self._layers:
                model = self._model
                self._load(siblings, compile_layers(model.config, model.dtype, model.device, siblings))

    def _load(self, siblings: int, paths: Sequence[Path]) -> None:
        for path in set(paths) - set(self._loaded):
            self._loaded[path] = _load(path, self._model.device)
        self._layers[siblings] = [
            _Layer(self._loaded[path], list(weights_of(layer_for(self._model, i, siblings)).values()))
            for i, path in enumerate(paths[: self._model.config.num_hidden_layers])
        ]

    @staticmethod
    def of_part(part: PreTrainedModel) -> "CompiledLayers":
        """A model of one layer behind another model, such as an adapter, for one token and for chains."""
        return CompiledLayers(part, {passes: [compile_part(part, passes)] for passes in (1, CHAIN)})

    def runs_chain(self, tokens: int) -> bool:
        """Whether there is code for a chain of so many."""
        return CHAIN in self._layers and tokens <= MOST_CHAINED

    def runs_tree(self, tokens: int) -> bool:
        """Whether there is code for a tree of so many."""
        return TREE in self._layers and tokens <= MOST_CHAINED and not self._recordings

    def runs_piece(self, piece: Piece) -> bool:
        """Whether there is code for one token's pass through a piece."""
        return all(kind in self._layers for kind in _kinds(piece))

    def run(
        self, first: int, last: int, hidden: Tensor, caches: Sequence[PreallocatedLayer], chain: bool = False
    ) -> Tensor:
        """Run `[1, tokens, hidden_size]` through layers `first` to `last` (half-open); append to their caches.

        Several tokens are siblings at one position, or, with `chain`, one behind the other. `caches` are all layers'
        caches; those of the range have been written before.
        """
        if chain and hidden.device.type == "cpu" and hidden.shape[1] > _AT_ONCE:
            parts = hidden.tensor_split(-(-hidden.shape[1] // _AT_ONCE), dim=1)
            return torch.cat([self.run(first, last, part, caches, chain) for part in parts], dim=1)
        position, tokens = caches[first].length, hidden.shape[1]
        rows = [caches[i].next_rows(tokens) for i in range(first, last)]
        layers = self._layers[CHAIN if chain else tokens][first:last]
        return self._run(layers, hidden, position, rows, (first, last, tokens, chain))

    def run_piece(self, piece: Piece, hidden: Tensor, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """Run one token, `[1, 1, hidden_size]`, through the layers of a piece; append to the attending ones' caches."""
        position, kinds = caches[piece.attending[0]].length, _kinds(piece)
        layers = [self._layers[kind][i] for kind, i in zip(kinds, piece.numbers, strict=True)]
        rows = [caches[i].next_rows() if i in piece.attending else () for i in piece.numbers]
        return self._run(layers, hidden, position, rows, (piece.numbers, tuple(kinds)))

    def run_tree(self, hidden: Tensor, tree: TokenTree, caches: Sequence[PreallocatedLayer]) -> Tensor:
        """Run the tokens of a tree, `[1, tokens, hidden_size]`, through all layers; append to all caches."""
        start, size, states = caches[0].length, hidden.shape[1], []
        places = (start + tree.depths)[None]
        masks = {c.sliding_window: tree.mask(start, c.sliding_window, self._model) for c in caches}
        for part in torch.arange(size).tensor_split(-(-size // _AT_ONCE)):
            own, position = slice(int(part[0]), int(part[-1]) + 1), start + int(part[0])
            rows = [cache.next_rows(len(part)) for cache in caches]
            inputs = [
                (*pair, places[:, own], _of_rows(masks[cache.sliding_window], own, pair[0]))
                for cache, pair in zip(caches, rows, strict=True)
            ]
            states.append(self._launch(self._layers[TREE], inputs, hidden[:, own], self._position.fill_(position)))
        return torch.cat(states, dim=1)

    def _run(
        self,
        layers: Sequence[_Layer],
        hidden: Tensor,
        position: int,
        rows: Sequence[tuple[Tensor, ...]],
        key: tuple[Hashable, ...],
    ) -> Tensor:
        launch = partial(self._launch, layers, rows)
        if self._recordings:
            tensors = [tensor for pair in rows for tensor in pair]
            places = tuple(tensor.data_ptr() for tensor in tensors)
            return self._recordings.run((*key, tensors[0].shape[0], places), hidden, position, launch)
        return launch(hidden, self._position.fill_(position))

    @staticmethod
    def _launch(
        layers: Sequence[_Layer], rows: Sequence[tuple[Tensor, ...]], hidden: Tensor, position: Tensor
    ) -> Tensor:
        for layer, of_layer in zip(layers, rows, strict=True):
            attends = (position, *of_layer) if of_layer else ()
            (hidden,) = layer.code.run([hidden, *attends, *layer.weights])
        return hidden


def _kinds(piece: Piece) -> list[int]:
    """What of each layer one token's pass through a piece runs."""
    return [
        WITHOUT_ATTENTION if i not in piece.attending else WITHOUT_MLP if i in piece.without_mlp else 1
        for i in piece.numbers
    ]


def _of_rows(mask: Tensor, own: slice, rows: Tensor) -> Tensor:
    """What some tokens see of the first rows; rows behind the tree are hidden."""
    seen = mask[:, :, own, : rows.shape[0]]
    hidden = rows.shape[0] - seen.shape[3]
    return nn.functional.pad(seen, (0, hidden), value=torch.finfo(mask.dtype).min) if hidden else seen.contiguous()


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
