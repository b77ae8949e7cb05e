"""Finds the library's tensors in a GGUF file: their names there, and the parts they are put together from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, stack
from transformers import PretrainedConfig

from ppd_runtime.models.checkpoint.gguf.architectures import Architecture
from ppd_runtime.models.checkpoint.gguf.metadata import Metadata
from ppd_runtime.models.checkpoint.gguf.reader import StoredTensor

Shape: TypeAlias = tuple[int, ...]
Finish: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Makes the library's rows from some neighbouring runs, in floats."""


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of a stored tensor; in a vector each number is a row."""

    of: StoredTensor
    first: int
    count: int


@dataclass(frozen=True)
class Source:
    """Where a tensor of the library comes from: consecutive runs of rows."""

    shape: Shape
    """The tensor's shape in the library."""
    runs: Sequence[Run]
    head_dim: int | None = None
    """Rows of a head, if its rotary pairs have to be separated."""
    finish: Finish | None = None
    together: int = 1
    """Runs that `finish` takes at once."""

    @property
    def kinds(self) -> set[str]:
        """The types of its runs in the file."""
        return {run.of.kind for run in self.runs}


@dataclass(frozen=True)
class _Parts:
    """File tensors that make one library tensor: each group takes rows of every tensor in turn."""

    names: Sequence[str]
    shape: Callable[[Shape], Shape] = lambda shape: shape
    """Library shape to file shape."""
    finish: Finish | None = None


def _half_the_rows(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-2] // 2, shape[-1])


def _half_turned(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1] // 2, shape[-2])


def _side_by_side(halves: Sequence[Tensor]) -> Tensor:
    """Two rows, interleaved."""
    return stack(tuple(halves), dim=-1).flatten(-2)


def _less_one(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] - 1


_PARTS: Mapping[str, Sequence[_Parts]] = {
    "experts.gate_up_proj": (
        _Parts(("ffn_gate_exps.weight", "ffn_up_exps.weight"), _half_the_rows),
        _Parts(("ffn_gate_up_exps.weight",)),
    ),
    "experts.down_proj": (_Parts(("ffn_down_exps.weight",)),),
    "block_sparse_moe.router.weight": (_Parts(("ffn_gate_inp.weight",)),),
    "shared_mlp.input_linear.weight": (_Parts(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), _half_the_rows),),
    "self_attn.sinks": (_Parts(("attn_sinks.weight",)),),
    "conv.conv.weight": (_Parts(("shortconv.conv.weight",), lambda shape: (shape[0], shape[2])),),
}
"""By endings of library names: tensors that its checkpoints store differently, in the forms of files."""
_TURNED_EXPERTS: Mapping[str, Sequence[_Parts]] = {
    "experts.gate_up_proj": (
        _Parts(
            ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            _half_turned,
            lambda halves: _side_by_side([half.T for half in halves]),
        ),
    ),
    "experts.gate_up_proj_bias": (
        _Parts(("ffn_gate_exps.bias", "ffn_up_exps.bias"), lambda shape: (shape[0], shape[1] // 2), _side_by_side),
    ),
    "experts.down_proj": (
        _Parts(("ffn_down_exps.weight",), lambda shape: (shape[0], shape[2], shape[1]), lambda rows: rows[0].T),
    ),
    "experts.down_proj_bias": (_Parts(("ffn_down_exps.bias",)),),
}
_ROTARY = ("self_attn.q_proj", "self_attn.k_proj")
_FUSED = (*_ROTARY, "self_attn.v_proj")


class Naming:
    """Finds the library's tensors in a file."""

    def __init__(self, about: Metadata, architecture: Architecture, config: PretrainedConfig) -> None:
        import gguf  # only a file that is opened for the first time needs it

        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(numbers[about.architecture], config.num_hidden_layers)
        self._about, self._architecture, self._config = about, architecture, config
        self._parts = {**_PARTS, **(_TURNED_EXPERTS if architecture.turned_experts else {})}

    def source(self, name: str, shape: Shape) -> Source:
        """Where one of the library's tensors comes from.

        Raises:
            ValueError: if a tensor is missing or has another shape.
        """
        layer, part = _split(name)
        if fused := self._of_fused(layer, part, shape):
            return fused
        forms = [each for end, each in self._parts.items() if part.endswith(end)]
        if forms:
            prefix = f"blk.{layer}."
            candidates = [([prefix + one for one in parts.names], parts) for parts in forms[0]]
        else:
            mapped = self._map.get_name(name, try_suffixes=(".weight", ".bias")) or name
            candidates = [([mapped], _Parts((mapped,), finish=self._finish(part)))]
        tensors = self._about.tensors
        there = next((each for each in candidates if all(one in tensors for one in each[0])), candidates[0])
        return self._put_together(*there, part, shape)

    def _finish(self, part: str) -> Finish | None:
        return _less_one if self._architecture.norms_plus_one and part.endswith("norm.weight") else None

    def _put_together(self, names: Sequence[str], parts: _Parts, part: str, shape: Shape) -> Source:
        found = [self._stored(name, parts.shape(shape)) for name in names]
        groups = shape[0] if len(shape) == 3 or (parts.finish and len(shape) == 2) else 1
        runs = [Run(of, group * (count := of.rows // groups), count) for group in range(groups) for of in found]
        return Source(shape, runs, self._head_dim(part), parts.finish, len(found))

    def _of_fused(self, layer: str, part: str, shape: Shape) -> Source | None:
        """Queries, keys or values, if the file has them in one tensor."""
        module, _, kind = part.rpartition(".")
        name = f"blk.{layer}.attn_qkv.{kind}"
        if module not in _FUSED or name not in self._about.tensors:
            return None
        heads, groups = self._config.num_attention_heads, self._config.num_key_value_heads
        head_dim = shape[0] // (heads if module == _FUSED[0] else groups)
        counts = [heads * head_dim, groups * head_dim, groups * head_dim]
        number = _FUSED.index(module)
        of = self._stored(name, (sum(counts), *shape[1:]))
        return Source(shape, [Run(of, sum(counts[:number]), counts[number])], self._head_dim(part))

    def _head_dim(self, part: str) -> int | None:
        """See `Source.head_dim`."""
        turned = self._architecture.interleaved and part.rpartition(".")[0] in _ROTARY
        return self._config.head_dim if turned else None

    def _stored(self, name: str, shape: Shape) -> StoredTensor:
        if name not in self._about.tensors:
            raise ValueError(f"lacks the tensor {name}; convert the model again with llama.cpp")
        if (found := self._about.tensors[name]).shape != shape:
            raise ValueError(f"is damaged: {name} has the shape {list(found.shape)}, by its metadata {list(shape)}")
        return found


def _split(name: str) -> tuple[str, str]:
    """The layer's number and the part's name; outside layers the number is empty."""
    if not name.startswith("model.layers."):
        return "", name
    _, _, layer, part = name.split(".", 3)
    return layer, part
