"""Whether rows may share passes here: whether a product's row depends on nothing but itself, in every shape of a model.

The products are of pairs that cancel: each sum is 0 but for the rounding on the way, so the result shows the order in
which a kernel adds, in bfloat16 too, which would round other results alike. And whether attention over slots computes
what the library's does.
"""

import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.chunks import library_masks_fit
from ppd_runtime.models.stage.decoder_parts import decoder_in
from ppd_runtime.models.stage.library_probe import has_states, runs_in_library, unlike_layers
from ppd_runtime.models.stage.row_attention import (
    ROWS,
    RunningRows,
    attention_of,
    can_attend_by_row,
    mixes_rows,
    usual_attention,
)
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.stage.trees import TextRows

logger = logging.getLogger(__name__)

_MOST_NUMBERS = 2**25
"""Weights of a matrix that is tried; of larger ones fewer outputs."""
_LANES = 64
"""Numbers that PyTorch's loops over elements take at a time, at most; what is left over they compute in another way."""
_OF_A_THREAD = 2**15
"""Numbers for which PyTorch takes a further thread in such a loop."""


def why_rows_cannot_share(model: PreTrainedModel, threads: int) -> str | None:
    """Why rows of the model's passes on so many CPU threads cannot share the reading of weights; None if they can.

    It depends on the model's configuration, its number format and this machine, and on no weights: all stages, and
    ordinary decoding, find the same.
    """
    return _why_not_in_its_code(model) or _why_not_here(model, threads)


def _why_not_in_its_code(model: PreTrainedModel) -> str | None:
    if has_states(model.config):
        return "its layers keep a recurrent state"
    if what := runs_in_library(model.config):
        return f"its layers {what}"
    if not can_attend_by_row(model):
        return f"its attention ({model.config._attn_implementation}) cannot be computed row by row"
    if not library_masks_fit(model, 1):
        return "its passes over one token need a mask"
    mixing = (part for layer in decoder_in(model).layers for part in layer.children() if mixes_rows(part))
    if any(hasattr(module, "is_causal") for part in mixing for module in part.modules()):
        return "its attention has experts"
    return None


def _why_not_here(model: PreTrainedModel, threads: int) -> str | None:
    shapes, heads = _product_shapes(model), set(map(_head_width, unlike_layers(model.config)))
    widths = heads | {outputs for outputs, _ in shapes} | ({model.config.vocab_size} - _plain_head(model))
    if odd := [width for width in sorted(widths) if not _has_whole_vectors(width, threads)]:
        return f"{ROWS} rows of {odd[0]} numbers do not divide into vectors on {threads} threads"
    for shape in sorted({*shapes, (model.config.vocab_size, model.config.hidden_size)}):
        if not product_keeps_rows(*shape, model.dtype, model.device, torch.get_num_threads()):
            return f"its products of {shape[1]} numbers with {shape[0]} outputs give a row other bits beside other rows"
    return None


def _head_width(layer: PretrainedConfig) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def _plain_head(model: PreTrainedModel) -> set[int]:
    """The vocabulary's size, if a model does nothing to its logits after the head."""
    return {model.config.vocab_size} if FinalHead(model).is_plain else set()


def _product_shapes(model: PreTrainedModel) -> set[tuple[int, int]]:
    """Outputs and inputs of the layers' products over all rows of a pass."""
    parts = (part for layer in decoder_in(model).layers for part in layer.children() if not mixes_rows(part))
    return {(module.out_features, module.in_features) for module in _linears(parts)}


def _linears(parts: Iterable[nn.Module]) -> Iterable[nn.Linear]:
    return (module for part in parts for module in part.modules() if isinstance(module, nn.Linear))


def _has_whole_vectors(width: int, threads: int) -> bool:
    """Whether a loop over the elements of `ROWS` rows, on any number of threads up to so many, leaves nothing over."""
    numbers = ROWS * width
    shares = {-(-numbers // used) for used in range(1, min(threads, -(-numbers // _OF_A_THREAD)) + 1)}
    return all(share % _LANES == 0 for share in {numbers, *shares})


@lru_cache
@torch.inference_mode()
def product_keeps_rows(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Whether a row of a product over `ROWS` rows has the same bits in every place and beside all others.

    `threads` are those that products use, for the record of what is known.
    """
    outputs = min(outputs, max(ROWS, _MOST_NUMBERS // inputs // ROWS * ROWS))
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs - inputs % 2, generator=generator)
    weight, rows = (_paired(number, inputs, order, generator) for number in (outputs, ROWS))
    rows[:, : len(order) // 2] *= -1
    weight, rows = (_in_order(part, order).to(device, dtype) for part in (weight, rows))
    together = linear(rows[None], weight)[0]
    for place in range(ROWS):
        others = torch.randn(ROWS, inputs, generator=generator, dtype=torch.float32).to(device, dtype)
        others[place] = rows[place]
        alone = torch.zeros_like(rows)
        alone[0] = rows[place]
        turned = linear(rows.roll(place, 0)[None], weight)[0]
        same = linear(others[None], weight)[0, place], linear(alone[None], weight)[0, 0]
        if not (all(together[place].equal(found) for found in same) and turned.equal(together.roll(place, 0))):
            return False
    return True


def _paired(number: int, inputs: int, order: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers `[number, inputs]` whose first half comes again; an odd one out is 0."""
    half = torch.randn(number, len(order) // 2, generator=generator, dtype=torch.float32)
    return torch.cat([half, half, half.new_zeros(number, inputs - len(order))], dim=1)


def _in_order(part: Tensor, order: Tensor) -> Tensor:
    return torch.cat([part[:, : len(order)][:, order], part[:, len(order) :]], dim=1)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def attends_to_slots(model: PreTrainedModel) -> bool:
    """Whether padded passes read the texts' caches where they lie, in our own kernel; else they gather what rows see.

    Like the above, all stages and ordinary decoding find the same.
    """
    if not has_kernels(model.device):
        return False
    if reason := _why_not_to_slots(model):
        logger.warning("rows_share_weights: attention gathers what each row sees, because %s", reason)
    return reason is None


_ATTENTION_WITH_MORE = re.compile(r"\b(s_aux|sinks|position_bias)\b")
"""What a model's attention may add to scores that the kernel does not."""
_TRIED = ((1, 0), (513, 1), (64, 0), (1100, 4), (511, 0), (65, 3), (512, 2), (63, 1))
"""Entries that the tried rows see, and how many of the newest lie elsewhere than at their positions."""
_WINDOWS = (None, 100)
_LEAST_ERROR = 2e-5
"""Relative to the whole result; or twice the number format's step, if that is more."""


def _why_not_to_slots(model: PreTrainedModel) -> str | None:
    config, name = unlike_layers(model.config)[0], usual_attention(model)
    found = (part for part in decoder_in(model).layers[0].modules() if hasattr(part, "num_key_value_groups"))
    module = next(found, None)
    if module is None or _ATTENTION_WITH_MORE.search(inspect.getsource(sys.modules[type(module).__module__])):
        return "the model's code for attention is unknown"
    heads, groups = config.num_attention_heads, int(module.num_key_value_groups)
    numbers = tuple((name, value) for name, value in vars(module).items() if isinstance(value, int | float | None))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    dims = getattr(config, "qk_head_dim", head_dim), getattr(config, "v_head_dim", head_dim)
    cap = getattr(config, "attn_logit_softcapping", None)
    shape = heads, groups, *dims
    try:
        agrees = _kernel_agrees(attention_of(module, name), shape, numbers, cap, model.dtype, model.device)
    except AttributeError as error:
        return f"the model's attention reads more than numbers of its module: {error}"
    return None if agrees else f"the kernel does not compute what the model's attention ({name}) does"


@lru_cache
@torch.inference_mode()
def _kernel_agrees(
    compute: Callable[..., Any],
    shape: tuple[int, ...],
    of_module: tuple[tuple[str, float | None], ...],
    cap: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether attention over slots gives what the library's gives over gathered entries, up to rounding, and gives rows
    the same bits beside others and in other places.

    `shape`: heads, query heads of a key head, and numbers of a key and of a value. `of_module`: the module's numbers,
    which the library's attention may ask for.
    """
    from ppd_runtime.models.stage.slot_rows import slot_tables  # it needs Triton

    (heads, groups, *dims), generator = shape, torch.Generator().manual_seed(0)

    def drawn(heads: int, dim: int) -> Tensor:
        return torch.randn(1, heads, ROWS, dim, generator=generator, dtype=torch.float32).to(device, dtype)

    inputs = [drawn(heads, dims[0]), *(drawn(heads // groups, dim) for dim in dims)]
    texts = [_tried_text(seen, elsewhere, inputs, generator) for seen, elsewhere in _TRIED]
    module: Any = SimpleNamespace(**dict(of_module))

    def attended(rows: Any, number: int, turned: bool = False) -> Tensor:
        query, key, value = (part.flip(2) if turned else part for part in inputs)
        found = rows.append(number, key, value)
        output: Tensor = rows.attend(compute, module, query, *found, **({"softcap": cap} if cap else {}))[0][0]
        return output.float()

    numbers, least = tuple(range(len(_WINDOWS))), max(_LEAST_ERROR, 2 * torch.finfo(dtype).eps)
    all_rows, turned = (slot_tables(some, numbers, ROWS) for some in (texts, texts[: ROWS // 2 - 1 : -1]))
    for number in numbers:
        expected = attended(RunningRows(texts, device), number)
        ours = attended(all_rows.rows(all_rows.table.to(device)), number)
        others = attended(turned.rows(turned.table.to(device)), number, turned=True)[: ROWS // 2]
        if not (others.equal(ours.flip(0)[: ROWS // 2]) and (ours - expected).norm() <= least * expected.norm()):
            return False
    return True


def _tried_text(seen: int, elsewhere: int, inputs: list[Tensor], generator: torch.Generator) -> TextRows:
    """A text with one row, which sees `seen` random entries, the last `elsewhere` of them not at their positions."""
    cache = StageCache(_WINDOWS, seen + elsewhere)
    for layer in cache.layers:
        layer.lazy_initialization(*inputs[1:])
    cache.fill(generator)
    path = tuple(range(elsewhere, 2 * elsewhere)) or (0,)
    return TextRows(cache, seen - len(path), [path])
