"""Compiling layers ahead of time: the library's own layers, exported for passes over few tokens, kept on disk.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from ppd_runtime.files.cache_folder import artifact, capabilities, ingredients_name
from ppd_runtime.models.checkpoint.config import without_weights
from ppd_runtime.models.compiled import code_metadata, joined_products, programs
from ppd_runtime.models.compiled.code_metadata import metadata_of, tensors_of, weights_of
from ppd_runtime.models.compiled.compiler_apart import compiler_apart
from ppd_runtime.models.compiled.compiler_options import compiler_options
from ppd_runtime.models.compiled.joined_products import join_products
from ppd_runtime.models.compiled.programs import (
    AttentionlessLayer,
    FewTokensHead,
    ListedTokensLayer,
    MaskIsReadError,
    OneTokenLayer,
    SeveralTokensLayer,
    grouped_attention,
    own_attention,
)
from ppd_runtime.models.compiled.toolkit import check_toolkit, toolkit
from ppd_runtime.models.native import attention, experts, products
from ppd_runtime.models.native import library as native
from ppd_runtime.models.native.attention import few_tokens_attention
from ppd_runtime.models.native.experts import choose_few_bits_experts, chosen_product
from ppd_runtime.models.native.few_bits_attention import FEW_BITS
from ppd_runtime.models.native.linear import with_floats
from ppd_runtime.models.native.products import MOST_ROWS, PRODUCTS, few_rows_linear, product
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage import arithmetic, caches, decoder_parts, library_probe, slicing
from ppd_runtime.models.stage.caches import ATTENDED_ROWS, PreallocatedLayer, SomeLayersCache
from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT, shallow_copy
from ppd_runtime.models.stage.grouped_attention import SHARED_HEADS
from ppd_runtime.models.stage.library_probe import cache_windows, embedding_scale
from ppd_runtime.models.stage.slicing import FinalHead, decoder_of, with_head_rows, without

logger = logging.getLogger(__name__)
MOST_SEVERAL = 15
"""Tokens of a compiled pass: more run in several, for the library's code rounds differently."""
_GROUPED_ATTENTION, _FEW_TOKENS_ATTENTION = "ppd_grouped_sdpa", "ppd_few_tokens"
_MOST_ROWS = 2**24
_ALIGNED = 8  # PyTorch's attention on GPUs takes masks of rows that it knows to be a multiple of this
_IRRELEVANT = {"_name_or_path", "transformers_version", "dtype", "architectures", "vocab_size", "num_hidden_layers"}
_NOT_OF_THE_LAYER = {"layer_idx", "name_or_path", "vocab_size", "num_embeddings"}
_PASSES: dict[int, str] = {
    PassKind.SEVERAL: "several tokens",
    PassKind.WITHOUT_ATTENTION: "one token without attention",
    PassKind.WITHOUT_MLP: "one token without MLP",
}


@dataclass(frozen=True)
class CodePart:
    """One file of compiled code: a layer's for a kind of passes, or a head's."""

    what: str
    """It computes this; for messages."""
    ingredients: Mapping[str, Any]
    make: Callable[[Path], None]

    @cached_property
    def name(self) -> str:
        """Parts of one name have one file."""
        return ingredients_name(self.ingredients)

    def file(self) -> Path:
        """The file; made where it is missing or damaged, which takes some ten seconds.

        Raises:
            ValueError: where the model cannot be compiled, or not on this machine.
        """
        return artifact(self.ingredients, self.make)


def compile_layers(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, passes: int = 1) -> list[Path]:
    """The file for each of `layer_parts`."""
    return [part.file() for part in layer_parts(config, dtype, device, passes)]


def layer_parts(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, passes: int = 1) -> list[CodePart]:
    """The code of each layer of a model, for passes over so many tokens, or over what stands for a number of them, such
    as `PassKind.SEVERAL`; layers of one kind have one file. Needs no weights and no memory for them.
    """
    with torch.device("meta"):
        skeleton = without_weights(config, dtype)
    scale = embedding_scale(skeleton)

    def piece(index: int) -> nn.Module:
        return layer_for(without_weights(config, dtype), index, passes, scale)

    windows = enumerate(cache_windows(config))
    return [_layer_part(skeleton, i, window, partial(piece, i), device, passes) for i, window in windows]


def compile_part(part: PreTrainedModel, passes: int) -> Path:
    """Like `compile_layers`, for a loaded model of one layer, such as an adapter."""
    twin, (window,) = with_floats(copy.deepcopy(layer_for(part, 0, passes))), cache_windows(part.config)
    return _layer_part(part, 0, window, lambda: twin, part.device, passes).file()


def compile_head(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, rows: int = 0) -> Path | None:
    """The file of `head_part`."""
    part = head_part(config, dtype, device, rows)
    return part.file() if part else None


def head_part(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, rows: int = 0) -> CodePart | None:
    """The code of a model's final norm and head, over any few tokens; None where the library's own is used, since there
    are no products of our own. With `rows`, a head for so many tokens alone.
    """
    if not native.is_available(device, dtype):
        return None
    with torch.device("meta"):
        skeleton = with_head_rows(without_weights(config, dtype), rows)
    return _head_part(skeleton, lambda: FinalHead(with_head_rows(without_weights(config, dtype), rows)).module, device)


def compile_part_head(part: PreTrainedModel) -> Path | None:
    """Like `compile_head`, for a loaded model."""
    if not native.is_available(part.device, part.dtype):
        return None
    part = shallow_copy(part)
    part.lm_head = with_floats(copy.deepcopy(part.lm_head))
    twin = copy.deepcopy(FinalHead(part).module)
    return _head_part(part, lambda: twin, part.device).file()


def layer_for(model: PreTrainedModel, index: int, passes: int, scale: str | None = None) -> nn.Module:
    """The model's decoder with what passes of a kind run of one layer; `scale` as `decoder_of` has it."""
    layer = model.model.layers[index]
    left_out = {"attention": passes == PassKind.WITHOUT_ATTENTION, "mlp": passes == PassKind.WITHOUT_MLP}
    piece = {index: without(layer, **left_out) if any(left_out.values()) else layer}
    return decoder_of(model, piece, scale)


def _layer_part(
    model: PreTrainedModel,
    index: int,
    window: int | None,
    make: Callable[[], nn.Module],
    device: torch.device,
    passes: int,
) -> CodePart:
    known = _kind(model, index, passes) | {"window": window, "passes": passes}
    ingredients = _versions(type(model), model.dtype, device) | {"inductor": compiler_options(device, passes)} | known
    tokens = _PASSES.get(passes, "one token" if passes == 1 else f"{passes} tokens")
    what = f"layer {index}, for passes over {tokens}"
    return CodePart(what, ingredients, partial(_compile, what, make, index, window, model.dtype, device, passes))


def _head_part(model: PreTrainedModel, make: Callable[[], nn.Module], device: torch.device) -> CodePart:
    piece, what = FinalHead(model).module, "the head"
    ingredients = _versions(type(model), model.dtype, device) | {
        "config": {k: v for k, v in model.config.to_dict().items() if k not in _IRRELEVANT},
        "constants": sorted(_constants(piece)),
        "weights": [(name, str(t.dtype), list(t.shape)) for name, t in weights_of(piece).items()],
        "inductor": compiler_options(device, PassKind.HEAD),
        "passes": PassKind.HEAD,
    }
    return CodePart(what, ingredients, partial(_compile, what, make, 0, None, model.dtype, device, PassKind.HEAD))


def _compile(
    what: str,
    make: Callable[[], nn.Module],
    index: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    passes: int,
    path: Path,
) -> None:
    native.cpp_compiler()  # or one clear line
    if device.type == "cuda":
        check_toolkit()
    arithmetic.settle_arithmetic(device)  # which attention and products the code has is chosen now
    try:
        with warnings.catch_warnings(), _without_tracebacks(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = _export(make, index, window, dtype, device, passes)
            options = compiler_options(device, passes)
            if own := native.is_available(device, dtype):
                shims = {
                    operator.in_graphs(): [operator.shim]
                    for operator in (*PRODUCTS, chosen_product, few_tokens_attention)
                }
                options["aot_inductor.custom_ops_to_c_shims"] = shims
            options["aot_inductor.metadata"] = metadata_of(program, make() if own else None)
            with compiler_apart(), toolkit() if device.type == "cuda" else contextlib.nullcontext():
                torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:  # exporting and compiling raise whatever an architecture provokes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"compile: {what}, of this model cannot be: {reason}; run it without") from error


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """PyTorch logs one of each operation that it cannot trace; what is raised says it in a line."""
    talkative = logging.getLogger("torch._subclasses.fake_tensor")
    was, talkative.disabled = talkative.disabled, True
    try:
        yield
    finally:
        talkative.disabled = was


def _export(
    make: Callable[[], nn.Module],
    index: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    passes: int,
) -> torch.export.ExportedProgram:
    """The pass of a layer as a graph; everything is made of fake tensors."""
    with FakeTensorMode(), torch.device(device):
        piece = make()
        own = native.is_available(device, dtype)
        _choose_attention(piece, _FEW_TOKENS_ATTENTION if own else _GROUPED_ATTENTION)
        if own:
            choose_few_bits_experts(piece, in_graphs=True)
        weights = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors_of(piece)}
        layer, inputs, shapes = _example(piece, weights, index, window, dtype, passes, own)
    with _FewRows() if own else contextlib.nullcontext():
        program = torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=False)
    if own:
        join_products(program)
    return program


def _example(
    piece: nn.Module,
    weights: dict[str, Tensor],
    index: int,
    window: int | None,
    dtype: torch.dtype,
    passes: int,
    own: bool,
) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
    """What is exported, inputs for it, and which of their sizes vary; `own`: with attention of our own."""
    of_weights = dict.fromkeys(weights)
    config: Any = piece.config
    if passes == PassKind.HEAD:
        few = {1: torch.export.Dim("tokens", min=1, max=MOST_ROWS)}
        return FewTokensHead(piece), (torch.zeros(1, 3, config.hidden_size, dtype=dtype), weights), (few, of_weights)
    tokens = 3 if passes == PassKind.SEVERAL else max(passes, 1)
    hidden = torch.zeros(1, tokens, config.hidden_size, dtype=dtype)
    if passes == PassKind.WITHOUT_ATTENTION:
        return AttentionlessLayer(piece), (hidden, weights), (None, of_weights)
    keys, values = _example_rows(piece, weights, index, hidden)
    rows = {0: _ALIGNED * torch.export.Dim("blocks", min=ATTENDED_ROWS // _ALIGNED, max=_MOST_ROWS // _ALIGNED)}
    size = [torch.export.Dim("tokens", min=2, max=MOST_SEVERAL)] if passes == PassKind.SEVERAL else []
    of_rows, of_tokens, of_mask = (dict.fromkeys([axis][: len(size)], *size) for axis in (0, 1, 2))
    if own:
        where, lists = (torch.zeros(*shape, dtype=torch.int64) for shape in ((3, tokens), (tokens, 3)))
        of_lists = of_rows | {1: torch.export.Dim("positions", min=1, max=_MOST_ROWS)}
        listed, inputs = ListedTokensLayer(piece, index, window), (hidden, where, keys, values, lists, weights)
        with contextlib.suppress(MaskIsReadError):
            listed(*inputs)
            return listed, inputs, (of_tokens, of_tokens, rows, rows, of_lists, of_weights)
    own_rows = torch.zeros(tokens, dtype=torch.int64)
    if tokens == 1:
        one = OneTokenLayer(piece, index, window)
        return one, (hidden, own_rows, keys, values, weights), (None, None, rows, rows, of_weights)
    places, mask = torch.zeros(1, tokens, dtype=torch.int64), torch.zeros(1, 1, tokens, keys.shape[0], dtype=dtype)
    of_inputs = (of_tokens, of_rows, rows, rows, of_tokens, of_mask | {3: rows[0]}, of_weights)
    return SeveralTokensLayer(piece, index, window), (hidden, own_rows, keys, values, places, mask, weights), of_inputs


class _FewRows(TorchFunctionMode):
    """Has linear layers make their products as `few_rows_linear` does."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is nn.functional.linear:
            function = partial(few_rows_linear, multiply=product.in_graphs())
        return function(*args, **(kwargs or {}))


def _example_rows(piece: nn.Module, weights: dict[str, Tensor], index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the shapes that the layer writes, in memory of their own: of a cache's, a compiler that wonders whether
    keys and values overlap would find the most rows at which they do not.
    """
    cache = PreallocatedLayer(2 * ATTENDED_ROWS, None)
    feed = {"inputs_embeds": hidden, CACHE_ARGUMENT: SomeLayersCache([cache], [index]), "use_cache": True}
    torch.func.functional_call(piece, weights, (), feed)
    cache.length = ATTENDED_ROWS
    for module in piece.modules():  # long-RoPE's second table is made in a pass, and is not to be this pass' own
        vars(module).pop("long_inv_freq", None)
    keys, values = cache.next_rows()
    return torch.empty_like(keys), torch.empty_like(values)


def _choose_attention(piece: nn.Module, name: str) -> None:
    for module in piece.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in ("sdpa", SHARED_HEADS, FEW_BITS):
            AttentionInterface.register(_GROUPED_ATTENTION, grouped_attention)
            AttentionInterface.register(_FEW_TOKENS_ATTENTION, own_attention)
            AttentionMaskInterface.register(name, sdpa_mask)
            config._attn_implementation = name


def _kind(model: PreTrainedModel, index: int, passes: int) -> dict[str, Any]:
    """All that tells what a layer computes, apart from the numbers in its weights."""
    piece = layer_for(model, index, passes)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IRRELEVANT}
    lists = {name: value for name, value in config.items() if "layer" in name and isinstance(value, list)}
    num_layers = model.config.num_hidden_layers  # other lists are numbers of layers
    of_layer = {name: of[index] if len(of) == num_layers else (of, index in of) for name, of in lists.items()}
    return {
        "config": config | of_layer,
        "constants": sorted(_constants(piece)),
        "weights": [(name, str(t.dtype), list(t.shape)) for name, t in weights_of(piece).items()],
    }


def _constants(piece: nn.Module) -> Iterator[tuple[str, str, str]]:
    for path, module in piece.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float | str) and name not in _NOT_OF_THE_LAYER:
                yield path, name, repr(value)


def _versions(model_class: type, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    of_stage = [arithmetic, library_probe, caches, decoder_parts, slicing]
    modules = [*of_stage, programs, code_metadata, joined_products, native, attention, experts, products]
    sources = [__file__, inspect.getfile(model_class), *map(inspect.getfile, modules)]
    return {
        "dtype": str(dtype),
        "machine": [device.type, platform.machine(), *capabilities(device)],
        "native": native.is_available(device, dtype),
        "sources": [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources],
        "versions": [torch.__version__, transformers.__version__, platform.python_version()],
    }
