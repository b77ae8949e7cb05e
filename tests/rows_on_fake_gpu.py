"""A padded pass and its head over fake tensors of a GPU, which PyTorch's CUDA build makes without one.

Nothing in them waits for a number, so they can be recorded.
"""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from ppd_runtime.models.stage import rows_range
from ppd_runtime.models.stage.row_attention import ROWS
from ppd_runtime.models.stage.slot_rows import SlotTables
from ppd_runtime.sampling.gpu_choice import choices_of, highest_of, likeliest_of

_LAYERS = 2


class StaysThere(TorchDispatchMode):
    """Fails if an operator's result is a number of Python's, or one of its tensors lies on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.called = list[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        assert function is not torch.ops.aten._local_scalar_dense.default
        tensors = [value for value in tree_leaves((args, kwargs, found)) if isinstance(value, Tensor)]
        assert all(tensor.is_cuda for tensor in tensors), function
        self.called.append(str(function))
        return found


def check_rows(family: str, **sizes: Any) -> None:
    """A pass, and all that may be asked of its logits, for a small model of a family."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with patch.object(rows_range, "attends_to_slots", lambda model: True):
        stage = rows_range.RowsRange(model.eval())
    stage.head(torch.zeros(1, 1, stage.state_size))  # once it tries what the model does to its logits
    with FakeTensorMode(), torch.inference_mode():
        for module in stage.model.modules():
            _put_on_a_gpu(module)
        room = ROWS * (2 + 8) + 2 * _LAYERS * ROWS
        of_pass = SlotTables((0, 1), (None, 6), 8, 1, ROWS, torch.zeros(room, dtype=torch.int64))
        rows = of_pass.rows(torch.zeros_like(of_pass.table, device="cuda"))
        hidden, scale = torch.zeros(1, ROWS, stage.state_size, device="cuda"), torch.ones(1, device="cuda")
        with StaysThere() as watching:
            states = rows_range.run_decoder(stage._range(0, _LAYERS), hidden, rows.places(), rows)
            logits = stage.head(states)[0].float()
            noise = torch.zeros_like(logits)
            found = [choices_of(logits), highest_of(logits, scale, noise[0])]
            found += [likeliest_of(3, True)(logits), likeliest_of(3, False)(logits, scale, noise)]
    assert states.shape == hidden.shape and logits.shape[0] == ROWS
    assert [tuple(numbers.shape) for numbers in found] == [(ROWS,), (5,), (ROWS, 2, 4), (ROWS, 2, 4)]
    kernels = [name for name in watching.called if name.startswith("ppd.")]
    assert kernels == ["ppd.append_to_slots.default", "ppd.attend_to_slots.default"] * _LAYERS
    print("stays there", family)


def _put_on_a_gpu(module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(_on_a_gpu(parameter), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _on_a_gpu(buffer)


def _on_a_gpu(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
