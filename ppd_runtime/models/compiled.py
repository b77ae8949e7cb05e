"""One-token passes in compiled code: the library's own layers, exported and compiled ahead of time, kept on disk.

So are passes over siblings, tokens that all stand at one position, in code of its own for each number of them.

A layer is compiled once for each kind of layer, with its weights as inputs: the layers of a kind share the code, so
their bits cannot depend on where a stage is cut, and files hold no weights. How many rows of the caches a pass attends
to is an input too: the next multiple of `ATTENDED_ROWS`, a function of the position alone.
"""

import contextlib
import copy
import hashlib
import inspect
import logging
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppd_runtime.models import kv_cache, products
from ppd_runtime.models.artifacts import artifact, capabilities
from ppd_runtime.models.cuda_graphs import Recordings
from ppd_runtime.models.kv_cache import ATTENDED_ROWS, PreallocatedLayer, SomeLayersCache, sliding_windows
from ppd_runtime.models.loading import CHAIN
from ppd_runtime.models.products import few_rows_gain, few_rows_linear
from ppd_runtime.models.stage import layer_range

logger = logging.getLogger(__name__)
MOST_CHAINED = 15
"""Tokens of a chain for which compiled code is of use; the library runs longer ones."""
_AT_ONCE = 5  # rows of which CPUs make the best; see `few_rows_linear`
_GROUPED_ATTENTION = "ppd_grouped_sdpa"
_MOST_ROWS = 2**24
_IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "architectures", "vocab_size", "num_hidden_layers"}
_NOT_OF_THE_LAYER = {"layer_idx", "name_or_path", "vocab_size", "num_embeddings"}
_INDUCTOR = {"cpp.threads": 1, "compile_threads": 1}  # matrix products are the library's and use PyTorch's threads


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
        layers = range(model.config.num_hidden_layers)
        codes = {path: _load(path, model.device) for path in {path for paths in files.values() for path in paths}}
        self._codes = {siblings: [codes[paths[i]] for i in layers] for siblings, paths in files.items()}
        self._weights = [list(_weights(layer_range(model, i, i + 1)).values()) for i in layers]
        self._position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._recordings = Recordings() if model.device.type == "cuda" else None

    def runs_chain(self, tokens: int) -> bool:
        """Whether there is code for a chain of so many."""
        return CHAIN in self._codes and tokens <= MOST_CHAINED

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
        launch = partial(self._launch, self._codes[CHAIN if chain else tokens], first, rows)
        if self._recordings:
            places = tuple(tensor.data_ptr() for pair in rows for tensor in pair)
            key = (first, last, tokens, chain, rows[0][0].shape[0], places)
            return self._recordings.run(key, hidden, position, launch)
        self._position.fill_(position)
        return launch(hidden, self._position)

    def _launch(
        self, codes: Sequence[Any], first: int, rows: list[tuple[Tensor, Tensor]], hidden: Tensor, position: Tensor
    ) -> Tensor:
        for i, (keys, values) in enumerate(rows, first):
            (hidden,) = codes[i].run([hidden, position, keys, values, *self._weights[i]])
        return hidden


def compile_layers(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, siblings: int = 1) -> list[Path]:
    """The file of compiled code for each layer of a model, for passes over so many siblings, or over a `CHAIN`;
    layers of one kind have one file.

    Needs no weights and no memory for them. Takes some ten seconds for a kind that is not on disk yet.

    Raises:
        ValueError: where the model cannot be compiled, or not on this machine.
    """
    with torch.device("meta"):
        skeleton = _model(config, dtype)
    versions = _versions(type(skeleton), dtype, device)
    paths = []
    for i in range(config.num_hidden_layers):
        ingredients = versions | _kind(skeleton, i) | {"siblings": siblings}
        paths.append(artifact(ingredients, partial(_compile, config, i, dtype, device, siblings)))
    return paths


class FewTokensLayer(nn.Module):
    """One layer of the library's decoder over preallocated caches, as it is exported."""

    def __init__(self, piece: nn.Module, index: int, window: int | None, chain: bool = False) -> None:
        super().__init__()
        self._piece, self._index, self._window = [piece], index, window  # in a list: its weights are no constants
        self._chain = chain

    def forward(
        self, hidden: Tensor, position: Tensor, keys: Tensor, values: Tensor, weights: dict[str, Tensor]
    ) -> Tensor:
        """`[1, tokens, hidden_size]` behind the layer; caches are `[rows, heads, dim]`, the position is `[1]`."""
        feed: dict[str, Any] = {"inputs_embeds": hidden, "use_cache": True}
        own_rows = position
        if (tokens := hidden.shape[1]) > 1:
            own_rows = position + torch.arange(tokens, device=hidden.device)
            positions = own_rows if self._chain else position.expand(tokens)
            feed["position_ids"] = positions[None]
            feed["attention_mask"] = _several_mask(hidden, positions, own_rows, keys.shape[0], self._window)
        cache: Cache = SomeLayersCache([_FewTokensCache(keys, values, own_rows, self._window)], [self._index])
        feed["past_key_values"] = cache
        return torch.func.functional_call(self._piece[0], weights, (), feed).last_hidden_state


class _FewTokensCache(CacheLayerMixin):
    """Writes entries in place into rows known only when it runs; all rows are there to be attended to."""

    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, own_rows: Tensor, window: int | None) -> None:
        super().__init__()
        self.keys, self.values, self._own_rows = keys, values, own_rows
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[1, heads, siblings, dim]` each; all rows as `[1, heads, rows, dim]`, for the mask to choose from."""
        for rows, states in ((self.keys, key_states), (self.values, value_states)):
            rows.index_copy_(0, self._own_rows, states[0].transpose(0, 1))
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All rows, from the first."""
        return self.keys.shape[0], 0

    def get_seq_length(self) -> Tensor:
        """The position, a tensor as in the library's own static cache."""
        return self._own_rows[0]

    def get_max_length(self) -> int:
        """Rows that there are."""
        return self.keys.shape[0]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's attention without copies of the key/value heads that queries share.

    Its own does the same for one token (`pack_gqa`), but not in code that is being exported. `query` is
    `[1, heads, tokens, dim]`, the mask `[1, 1, tokens, rows]`.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    _, heads, tokens, dim = query.shape
    if not isinstance(tokens, int):  # any number of them: such a regrouping cannot be exported
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    groups = query.reshape(1, key.shape[1], -1, dim)
    if tokens > 1 and attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, heads // key.shape[1], 1)
    output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(1, heads, tokens, -1).transpose(1, 2), None


def _several_mask(hidden: Tensor, positions: Tensor, own_rows: Tensor, rows: int, window: int | None) -> Tensor:
    """The additive mask, `[1, 1, tokens, rows]`: what came before each one's position, in the window, and itself."""
    row, position = torch.arange(rows, device=hidden.device), positions[:, None]
    before = row < position if window is None else (row < position) & (row > position - window)
    seen = before | (row == own_rows[:, None])
    return torch.where(seen, 0.0, torch.finfo(hidden.dtype).min).to(hidden.dtype)[None, None]


def _check_embedding(model: PreTrainedModel) -> None:
    """Refuse a decoder that does more to a token than look it up."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        embedded = layer_range(model, 0, 0)(input_ids=token, use_cache=False).last_hidden_state
        if not torch.equal(embedded, model.model.embed_tokens(token)):
            raise ValueError(f"compile: a {model.config.model_type} model changes its embeddings; leave compile out")


def _compile(
    config: PretrainedConfig, index: int, dtype: torch.dtype, device: torch.device, siblings: int, path: Path
) -> None:
    _check_compiler()
    logger.info(
        "compiling layer %d for passes over %s", index, f"{siblings} tokens at one position" if siblings else "chains"
    )
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = _export(config, index, dtype, device, siblings)
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(path),
                inductor_configs=dict(_INDUCTOR),  # a copy: it is written to
            )
    except Exception as error:  # exporting and compiling raise whatever an architecture provokes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"compile: layer {index} of this {config.model_type} model cannot be: {reason}") from error


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import, only compiling needs it

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise ValueError("compile: no C++ compiler here; install g++, set CXX, or leave compile out") from error


def _export(
    config: PretrainedConfig, index: int, dtype: torch.dtype, device: torch.device, siblings: int
) -> torch.export.ExportedProgram:
    """The pass of a layer as a graph; everything is made of fake tensors."""
    with FakeTensorMode(), torch.device(device):
        model = _model(config, dtype)
        _use_grouped_attention(model.config)
        piece = layer_range(model, index, index + 1)
        weights = _weights(piece)
        hidden = torch.zeros(1, siblings or 3, config.hidden_size, dtype=dtype)
        position = torch.zeros(1, dtype=torch.int64)
        keys, values = _example_rows(piece, index, hidden)
    rows = {0: torch.export.Dim("rows", min=ATTENDED_ROWS, max=_MOST_ROWS)}
    tokens = None if siblings else {1: torch.export.Dim("tokens", min=2, max=MOST_CHAINED)}
    shapes = (tokens, None, rows, rows, dict.fromkeys(weights))
    layer = FewTokensLayer(piece, index, sliding_windows(config)[index], chain=siblings == CHAIN)
    with _FewRows() if few_rows_gain(device, dtype) else contextlib.nullcontext():
        inputs = (hidden, position, keys, values, weights)
        return torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=False)


class _FewRows(TorchFunctionMode):
    """Has linear layers make their products as `few_rows_linear` does."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        chosen = few_rows_linear if function is nn.functional.linear else function
        return chosen(*args, **(kwargs or {}))


def _example_rows(piece: nn.Module, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the shapes that the layer writes."""
    cache = PreallocatedLayer(2 * ATTENDED_ROWS, None)
    piece(inputs_embeds=hidden, past_key_values=SomeLayersCache([cache], [index]), use_cache=True)
    cache.length = ATTENDED_ROWS
    return cache.next_rows()


def _model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model without weights worth keeping; `config` stays as it is."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(copy.deepcopy(config), dtype=dtype).eval()


def _use_grouped_attention(config: PretrainedConfig) -> None:
    if config._attn_implementation == "sdpa":
        AttentionInterface.register(_GROUPED_ATTENTION, grouped_attention)
        AttentionMaskInterface.register(_GROUPED_ATTENTION, sdpa_mask)
        config._attn_implementation = _GROUPED_ATTENTION


def _weights(piece: nn.Module) -> dict[str, Tensor]:
    """All that a piece of one layer computes with, by name; the embedding is not part of it."""
    tensors = {**dict(piece.named_parameters()), **dict(piece.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items() if not name.startswith("embed_tokens.")}


def _kind(model: PreTrainedModel, index: int) -> dict[str, Any]:
    """All that tells what a layer computes, apart from the numbers in its weights."""
    piece = layer_range(model, index, index + 1)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IRRELEVANT}
    of_layer = {k: v[index] for k, v in config.items() if "layer" in k and isinstance(v, list)}
    return {
        "config": config | of_layer,
        "window": sliding_windows(model.config)[index],
        "constants": sorted(_constants(piece)),
        "weights": [(name, str(t.dtype), list(t.shape)) for name, t in _weights(piece).items()],
    }


def _constants(piece: nn.Module) -> Iterator[tuple[str, str, str]]:
    for path, module in piece.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float | str) and name not in _NOT_OF_THE_LAYER:
                yield path, name, repr(value)


def _versions(model_class: type, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    sources = [__file__, kv_cache.__file__, products.__file__, inspect.getfile(model_class)]
    return {
        "dtype": str(dtype),
        "machine": [device.type, platform.machine(), *capabilities(device)],
        "sources": [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources],
        "versions": [torch.__version__, transformers.__version__, platform.python_version()],
        "inductor": _INDUCTOR,
    }


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
