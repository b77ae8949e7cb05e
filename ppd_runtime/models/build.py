"""Builds a stage from a model's files and compiled code; makes shared weight files before workers start."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.checkpoint.loading import (
    bfloat16_copies,
    bfloat16_weights,
    check_gpu_memory,
    load_layers,
    weight_copies,
)
from ppd_runtime.models.checkpoint.quantised import check_packed
from ppd_runtime.models.native.library import is_float32_on_cpu
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.row_probe import why_rows_cannot_share
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.models.stage.state_range import range_class

logger = logging.getLogger(__name__)


def load_stage(
    info: ModelInfo,
    last: int,
    dtype: torch.dtype,
    device: str,
    code: Mapping[int, Sequence[Path]] | None = None,
    first: int = 0,
    head_tokens: Sequence[int] = (),
    rows_on: int | None = None,
) -> LayerRange:
    """`load_layers` as a stage. With `code` from `compile_ahead`, passes over few tokens run that code.

    `rows_on` are the CPU threads of passes whose rows share the reading of weights, if they can; None: they need not.
    """
    check_gpu_memory(info, first, last, dtype, device)
    model = load_layers(info, last, dtype, device, first, head_tokens)
    compiled = None
    if rows_on and _rows_share(model, rows_on, told=last == info.num_layers):
        return RowsRange(model, None, first, info.longest_in_chunks)
    if code:
        from ppd_runtime.models.compiled.passes import CompiledLayers  # many imports; only compiled code needs them

        copies = bfloat16_weights(info, last) if _has_copies(info, dtype, device) else {}
        compiled = CompiledLayers(model, code, copies, first=first)
    return range_class(model.config)(model, compiled, first, info.longest_in_chunks)


def _rows_share(model: PreTrainedModel, threads: int, told: bool) -> bool:
    """Whether they can; if not, and it is to be `told`, which the last stage does for all, the log says why."""
    with cpu_threads(threads):
        reason = why_rows_cannot_share(model, threads)
    if reason:
        logger.log(
            logging.WARNING if told else logging.DEBUG,
            "rows_share_weights: each row is a pass of its own, because %s",
            reason,
        )
    return reason is None


def share_weights(info: ModelInfo, dtype: torch.dtype, device: str, compiled: bool) -> None:
    """Make, or check, the files of weights that `load_stage` maps into memory, before processes with deadlines do so.

    Raises:
        ValueError: if the file of a quantised folder is damaged.
    """
    if info.weights:
        check_packed(info)
    elif device == "cpu":
        weight_copies(info, dtype)
        if compiled and _has_copies(info, dtype, device):
            bfloat16_copies(info)


def _has_copies(info: ModelInfo, dtype: torch.dtype, device: str) -> bool:
    """Whether compiled code maps a bfloat16 copy of weights, too."""
    return is_float32_on_cpu(device, dtype) and not info.weights
