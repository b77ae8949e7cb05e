"""Writes a GGUF model's tensors as safetensors: the same numbers, with the library's names and order of rows."""

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.checkpoint.gguf.blocks import QUANTISED_TYPES, numbers_of
from ppd_runtime.models.checkpoint.gguf.metadata import OTHER_MODEL
from ppd_runtime.models.checkpoint.gguf.naming import Naming, Run, Source
from ppd_runtime.models.checkpoint.gguf.reader import BLOCKS, GGUF, StoredTensor, shown
from ppd_runtime.models.checkpoint.gguf.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS
from ppd_runtime.models.checkpoint.quantisable import EMBEDDING, HEAD, quantised_linears
from ppd_runtime.models.checkpoint.weight_cache import bytes_of, header_of
from ppd_runtime.models.native.experts import stacked_experts
from ppd_runtime.models.native.formats import NUMBER_FORMATS, NumberFormat
from ppd_runtime.models.native.packing import begin_and_end, packed_bytes, packed_rows
from ppd_runtime.models.native.products import TILE
from ppd_runtime.settings.config import FLOATS
from ppd_runtime.settings.config import GGUF as MIXED

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_FILE = "quantise it again to one of them, or give another file of the model"
_FACTORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
_MOST_FACTORS = 2**12
_BLOCK = 2**25
"""Bytes of a tensor that are read at once."""


@dataclass(frozen=True)
class _Written:
    """A tensor of the safetensors file, and where its numbers come from."""

    source: Source
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: NumberFormat | None = None
    """The format it is packed in."""


@dataclass(frozen=True)
class TensorPlan:
    """What is written: tensors by the library's names, in the order that a pass reads them."""

    written: Mapping[str, _Written]
    dtype: torch.dtype
    """Holds every number of the file if its matrices are floats; else float32, the dtype of states."""

    @property
    def is_packed(self) -> bool:
        """Whether any is packed."""
        return any(each.form for each in self.written.values())

    @property
    def head(self) -> str:
        """The name of the head's format."""
        return MIXED if self.written.get(HEAD, self.written[EMBEDDING]).form else FLOATS

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in self.written.values())

    def write(self, path: Path, about: Mapping[str, str]) -> None:
        """Write the tensors, a block of rows at a time; `about` is text for readers.

        Raises:
            ValueError: if the GGUF file cannot be read, or a scale is not finite.
            OSError: if it cannot be written.
        """
        with path.open("wb") as out:
            out.write(header_of({name: (each.dtype, each.shape) for name, each in self.written.items()}, about))
            for each in self.written.values():
                for matrix in _matrices(each):
                    begin, end = begin_and_end(each.form, *matrix.source.shape) if each.form else (b"", b"")
                    out.write(begin)
                    for rows in _written_rows(matrix):
                        out.write(bytes_of(rows))
                    out.write(end)
            out.flush()
            os.fsync(out.fileno())


def check_kinds(gguf: GGUF) -> None:
    """Raise ValueError for a tensor of a type that is not read."""
    for tensor in gguf.tensors.values():
        if tensor.kind not in BLOCKS:
            known = ", ".join(BLOCKS)
            raise ValueError(f"has {shown(tensor.name)} in {tensor.kind}; {known} are read: {_OTHER_FILE}")


def rope_factors_of(gguf: GGUF) -> dict[str, Tensor]:
    """The tensors that divide rotary frequencies, by name."""
    found = {name: gguf.tensors[name] for name in _FACTORS if name in gguf.tensors}
    for name, tensor in found.items():
        if len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS or tensor.kind not in _FLOATS:
            raise ValueError(f"is damaged: {name} is {list(tensor.shape)} in {tensor.kind}")
    return {name: torch.cat(list(_floats(_whole(tensor)))).flatten() for name, tensor in found.items()}


def plan_tensors(gguf: GGUF, naming: Naming, config: PretrainedConfig) -> TensorPlan:
    """Compare the tensors with those of the library's class, and decide what each becomes.

    Raises:
        ValueError: for a tensor that is missing, of another shape, unknown, or a vector of few bits.
    """
    skeleton = skeleton_of(config, config.num_hidden_layers)
    sources = dict[str, Source]()
    for name, tensor in skeleton.state_dict().items():
        if not (name == HEAD and config.tie_word_embeddings):
            sources[name] = naming.source(name, tuple(tensor.shape))
    _check_tensors(gguf, sources.values(), config.model_type)
    packable = {name: sources[name] for name in (EMBEDDING, *quantised_linears(skeleton)) if name in sources}
    packable |= {name: _as_stored(sources[name]) for name in stacked_experts(skeleton)}
    forms = {name: form for name, source in packable.items() if (form := _form(source))}
    dtype = torch.float32 if forms else _narrowest(sources.values())
    written = {
        name: _written(packable[name] if name in forms else source, forms.get(name), dtype)
        for name, source in sources.items()
    }
    return TensorPlan(written, dtype)


def _check_tensors(gguf: GGUF, sources: Iterable[Source], model_type: str) -> None:
    """Refuse tensors that the model does not have, and vectors of few bits."""
    known = {run.of.name for source in sources for run in source.runs} | {*_FACTORS}
    for name, tensor in gguf.tensors.items():
        if name not in known:
            raise ValueError(f"has {shown(name)}, which no {model_type} has here; {OTHER_MODEL}")
        if len(tensor.shape) == 1 and tensor.kind not in _FLOATS:
            raise ValueError(f"has {name} in {tensor.kind}, and vectors in floats are read; {OTHER_MODEL}")


def _as_stored(experts: Source) -> Source:
    """Experts' matrices as `[experts, outputs, inputs]`, if the library has them turned."""
    if not experts.finish:
        return experts
    number, inputs, outputs = experts.shape
    return replace(experts, shape=(number, outputs, inputs), finish=None)


def _form(source: Source) -> NumberFormat | None:
    """The format that a matrix keeps, or experts' matrices; None for floats, or if runs meet inside a tile."""
    kinds, last = source.kinds, source.together - 1
    within = (run for number, run in enumerate(source.runs) if number % source.together != last)
    if len(kinds) > 1 or source.finish or any(run.count % TILE for run in within):
        return None
    (kind,) = kinds
    return NUMBER_FORMATS[kind] if kind in QUANTISED_TYPES else None


def _written(source: Source, form: NumberFormat | None, dtype: torch.dtype) -> _Written:
    if form:
        return _Written(source, torch.uint8, (*source.shape[:-2], packed_bytes(form, *source.shape[-2:])), form)
    kinds = {_FLOATS.get(kind, torch.float32) for kind in source.kinds}
    stored = kinds.pop() if len(kinds) == 1 and not source.finish else torch.float32
    narrower = dtype if stored == torch.float32 and dtype.itemsize < stored.itemsize else stored
    return _Written(source, narrower, source.shape)


def _matrices(each: _Written) -> Iterator[_Written]:
    """Those that are packed one by one: experts' have a tag each."""
    source, of_one = each.source, each.source.together
    if not each.form or len(source.shape) == 2:
        yield each
        return
    for first in range(0, len(source.runs), of_one):
        yield replace(each, source=replace(source, shape=source.shape[1:], runs=source.runs[first : first + of_one]))


def _narrowest(sources: Collection[Source]) -> torch.dtype:
    """The half precision of some tensors, if it holds all other tensors' numbers too; else float32."""
    kinds = {kind for source in sources for kind in source.kinds}
    halves = {_FLOATS[kind] for kind in kinds & {"F16", "BF16"}}
    if len(halves) != 1 or not kinds <= {*_FLOATS}:
        return torch.float32
    dtype = halves.pop()
    others = (source for source in sources if source.finish or "F32" in source.kinds)
    fit = all(torch.equal(rows.to(dtype).float(), rows) for source in others for rows in _floats(source))
    return dtype if fit else torch.float32


def _whole(tensor: StoredTensor) -> Source:
    return Source(tensor.shape, [Run(tensor, 0, tensor.rows)])


def _floats(source: Source) -> Iterator[Tensor]:
    """A tensor's rows in float32, some at a time."""
    return _written_rows(_Written(source, torch.float32, source.shape))


def _written_rows(each: _Written) -> Iterator[Tensor]:
    """A tensor's rows as they are written, some at a time."""
    runs, source = each.source.runs, each.source
    if source.finish:
        for first in range(0, len(runs), source.together):
            some = [torch.cat(list(_rows(run, source, None))) for run in runs[first : first + source.together]]
            yield source.finish(some).to(each.dtype).contiguous()
    else:
        for run in runs:
            for rows in _rows(run, source, each.form):
                yield rows if each.form else rows.to(each.dtype)


def _rows(run: Run, source: Source, form: NumberFormat | None) -> Iterator[Tensor]:
    """A run's rows, as many at a time as are packed and parted together."""
    size = run.of.row_bytes
    at_once = math.lcm(TILE, source.head_dim or 1)
    step = max(1, _BLOCK // (size * at_once)) * at_once
    with run.of.file.open("rb") as file:
        file.seek(run.of.start + run.first * size)
        for first in range(0, run.count, step):
            count = min(step, run.count - first)
            content = bytearray(count * size)
            if file.readinto(content) < len(content):
                raise ValueError("was cut short while it was read")
            block = np.frombuffer(content, np.uint8).reshape(count, size)
            yield _converted(_parted(block, source.head_dim) if source.head_dim else block, run.of, form)


def _parted(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows of heads in the library's order: the first numbers of all rotary pairs, then the second ones."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _converted(rows: np.ndarray[Any, Any], of: StoredTensor, form: NumberFormat | None) -> Tensor:
    """Some rows, packed or in floats."""
    if of.kind in _FLOATS:
        floats = torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)).view(_FLOATS[of.kind])
        return floats.view(len(rows), -1)
    numbers = numbers_of(rows, of.kind)
    if not numbers.are_finite:
        raise ValueError(f"is damaged: a scale of {of.name} is not finite")
    return torch.from_numpy(packed_rows(numbers) if form else numbers.in_floats())
