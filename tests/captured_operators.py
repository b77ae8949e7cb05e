"""Has PyTorch's operators be kernels of the stand-in's GPUs, so that a capture of `two_gpus` holds whole passes.

In a capture CUDA runs nothing. Here an operator that writes into its tensors does not run either; any other runs for
its result's shape, and what it has computed becomes NaN. A replay computes all again from the tensors that are there
then, into the same memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_gpus import TwoGpus

_WAIT = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
"""A capture cannot hold these; the second is the first's name in inference mode."""


class CapturedOperators(TorchDispatchMode):
    """As long as it lasts, the current stream's capture records each operator of this thread."""

    def __init__(self, gpus: TwoGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        if not (capturing := self._gpus.current_stream().capturing):
            return function(*args, **given)
        if function in _WAIT:
            raise RuntimeError("operation not permitted when stream is capturing")
        if function._schema.is_mutable or not function._schema.returns:
            capturing.add(lambda: function(*args, **given))
            return args[0] if function._schema.returns else None
        found = function(*args, **given)
        before = {_memory(tensor) for tensor in _tensors((args, given))}
        if computed := [tensor for tensor in _tensors(found) if _memory(tensor) not in before]:
            capturing.add(_again(lambda: function(*args, **given), computed))
        for tensor in computed:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        return found


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _again(run: Callable[[], Any], computed: list[Tensor]) -> Callable[[], None]:
    def kernel() -> None:
        found = _tensors(run())
        for ours, again in zip(computed, found, strict=True):
            ours.copy_(again)

    return kernel
