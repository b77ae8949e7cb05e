"""A GGUF model's tensors as a safetensors file: the same numbers, by the library's names and in its order of rows."""

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppd_runtime.config import FLOATS
from ppd_runtime.config import GGUF as MIXED
from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.checkpoint.gguf.blocks import QUANTISED_TYPES, numbers_of
from ppd_runtime.models.checkpoint.gguf.config import INTERLEAVED, OTHER_MODEL, ROPE_FACTORS
from ppd_runtime.models.checkpoint.gguf.reader import BLOCKS, GGUF, StoredTensor, shown
from ppd_runtime.models.checkpoint.quantisable import EMBEDDING, HEAD, quantised_linears
from ppd_runtime.models.checkpoint.weight_cache import bytes_of, header_of
from ppd_runtime.models.native.formats import NUMBER_FORMATS, NumberFormat
from ppd_runtime.models.native.packing import begin_and_end, packed_bytes, packed_rows
from ppd_runtime.models.native.products import TILE

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_FILE = "quantise it again to one of them, or give another file of the model"
NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""What GGUF calls the library's modules; those of a layer without its number."""
_IGNORED = {ROPE_FACTORS}
_BLOCK = 2**25
"""Bytes of a tensor that are read at once."""


@dataclass(frozen=True)
class _Written:
    """A tensor of the safetensors file, and where its numbers come from."""

    of: StoredTensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: NumberFormat | None = None
    """The format it is packed in."""
    head_dim: int | None = None
    """Rows of a head, where those that rotary turns together have to be parted."""


@dataclass(frozen=True)
class TensorPlan:
    """What is written: tensors by the library's names in the order in which a pass reads them."""

    gguf: GGUF
    written: Mapping[str, _Written]
    dtype: torch.dtype
    """Holds every number of the file, where its matrices are floats; else float32, in which states are."""

    @property
    def is_packed(self) -> bool:
        """Whether any matrix is."""
        return any(each.form for each in self.written.values())

    @property
    def head(self) -> str:
        """What the head's weights are called."""
        return MIXED if self.written.get(HEAD, self.written[EMBEDDING]).form else FLOATS

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.written.values())

    def write(self, path: Path, about: Mapping[str, str]) -> None:
        """Write the tensors, a block of rows at a time; `about` is text for readers.

        Raises:
            ValueError: where the GGUF file cannot be read, or a scale is not finite.
            OSError: where it cannot be written.
        """
        with self.gguf.path.open("rb") as file, path.open("wb") as out:
            out.write(header_of({name: (each.dtype, each.shape) for name, each in self.written.items()}, about))
            for each in self.written.values():
                begin, end = begin_and_end(each.form, *each.of.shape) if each.form else (b"", b"")
                out.write(begin)
                for rows in _blocks(file, each):
                    out.write(bytes_of(_converted(rows, each)))
                out.write(end)
            out.flush()
            os.fsync(out.fileno())


def check_kinds(gguf: GGUF) -> None:
    """Raise ValueError for a tensor of a type that is not read."""
    for tensor in gguf.tensors.values():
        if tensor.kind not in BLOCKS:
            known = ", ".join(BLOCKS)
            raise ValueError(f"has {shown(tensor.name)} in {tensor.kind}; {known} are read: {_OTHER_FILE}")


def rope_factors_of(gguf: GGUF) -> Tensor | None:
    """The numbers by which rotary's frequencies are divided, `[half a head]`; None where the file has none."""
    tensor = gguf.tensors.get(ROPE_FACTORS)
    return _read(gguf, tensor).flatten() if tensor else None


def plan_tensors(gguf: GGUF, config: PretrainedConfig) -> TensorPlan:
    """Compare the tensors with those that the library's class has, and decide what each becomes.

    Raises:
        ValueError: for a tensor that lacks, is of another shape, is unknown, or is in a type that does not fit the
            others'.
    """
    skeleton = skeleton_of(config, config.num_hidden_layers)
    tied, places = config.tie_word_embeddings, dict[str, StoredTensor]()
    for name, tensor in skeleton.state_dict().items():
        if not (name == HEAD and tied):
            places[name] = _place(gguf, name, tuple(tensor.shape))
    known = {tensor.name for tensor in places.values()} | _IGNORED
    if unknown := [name for name in gguf.tensors if name not in known]:
        raise ValueError(f"has {shown(unknown[0])}, which no {config.model_type} has here; {OTHER_MODEL}")
    kinds = {name: places[name].kind for name in (EMBEDDING, *quantised_linears(skeleton)) if name in places}
    forms = {name: NUMBER_FORMATS[kind] for name, kind in kinds.items() if kind in QUANTISED_TYPES}
    dtype = torch.float32 if forms else _narrowest(gguf, places.values())
    turned = config.head_dim if config.model_type in INTERLEAVED else None
    written = dict[str, _Written]()
    for name, of in places.items():
        head_dim = turned if ".q_proj." in name or ".k_proj." in name else None
        written[name] = _written(of, forms.get(name), dtype, head_dim)
    return TensorPlan(gguf, written, dtype)


def _written(of: StoredTensor, form: NumberFormat | None, dtype: torch.dtype, head_dim: int | None) -> _Written:
    if form:
        return _Written(of, torch.uint8, (packed_bytes(form, *of.shape),), form, head_dim)
    stored = _FLOATS.get(of.kind, torch.float32)
    narrower = dtype if stored == torch.float32 and dtype.itemsize < stored.itemsize else stored
    return _Written(of, narrower, of.shape, None, head_dim)


def _place(gguf: GGUF, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Where a tensor of the library's lies in the file."""
    stem, _, kind = name.rpartition(".")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    place = f"{prefix}{NAMES.get(stem, stem)}.{kind}"
    if place not in gguf.tensors:
        raise ValueError(f"lacks the tensor {place}; convert the model again with llama.cpp")
    if (found := gguf.tensors[place]).shape != shape:
        raise ValueError(f"is damaged: {place} has the shape {list(found.shape)}, by its metadata {list(shape)}")
    if len(shape) == 1 and found.kind not in _FLOATS:
        raise ValueError(f"has {place} in {found.kind}, and vectors in floats are read; {OTHER_MODEL}")
    return found


def _narrowest(gguf: GGUF, tensors: Collection[StoredTensor]) -> torch.dtype:
    """The dtype of the matrices, where it holds every vector too; else float32."""
    matrices, vectors = ([t for t in tensors if (len(t.shape) > 1) == many] for many in (True, False))
    kinds = {tensor.kind for tensor in matrices}
    dtype = _FLOATS.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
    for tensor in vectors:
        numbers = _read(gguf, tensor).float()
        if not torch.equal(numbers.to(dtype).float(), numbers):
            return torch.float32
    return dtype


def _read(gguf: GGUF, tensor: StoredTensor) -> Tensor:
    """A small tensor in floats."""
    with gguf.path.open("rb") as file:
        each = _written(tensor, None, torch.float32, None)
        return torch.cat([_converted(rows, each) for rows in _blocks(file, each)])


def _blocks(file: BufferedReader, each: _Written) -> Iterator[np.ndarray[Any, Any]]:
    """A tensor's bytes `[rows, bytes of a row]`, so many rows at a time as are packed and parted together."""
    rows, size = math.prod(each.of.shape[:-1]), each.of.row_bytes
    if each.head_dim and len(each.of.shape) == 1:  # a bias: each number is a row
        rows, size = each.of.shape[0], size // each.of.shape[0]
    at_once = math.lcm(TILE, each.head_dim or 1)
    step = max(1, _BLOCK // (size * at_once)) * at_once
    file.seek(each.of.start)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        content = bytearray(count * size)
        if file.readinto(content) < len(content):
            raise ValueError("was cut short while it was read")
        block = np.frombuffer(content, np.uint8).reshape(count, size)
        yield _parted(block, each.head_dim) if each.head_dim else block


def _parted(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows of heads in the library's order: first the numbers that rotary turns in each pair, then their partners."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _converted(rows: np.ndarray[Any, Any], each: _Written) -> Tensor:
    """Some rows as they are written."""
    if each.of.kind in _FLOATS:
        floats = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)).view(_FLOATS[each.of.kind])
        return floats.to(each.dtype).view(len(rows), -1)
    numbers = numbers_of(rows, each.of.kind)
    if not numbers.are_finite:
        raise ValueError(f"is damaged: a scale of {each.of.name} is not finite")
    return torch.from_numpy(packed_rows(numbers) if each.form else numbers.in_floats())
