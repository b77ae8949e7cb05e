"""An unfinished training in one file, replaced atomically: weights, optimizer states and finished steps."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Checkpoint:
    """The state of a training."""

    def __init__(self, path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._partial = path.with_suffix(".partial")
        self.path, self.model, self.optimizers = path, model, optimizers

    def save(self, step: int) -> None:
        """Write the state after `step` finished steps.

        Raises:
            ValueError: the file cannot be written; what it held stays.
        """
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, self._partial, metadata={"step": str(step)})
            self._partial.replace(self.path)
        except (SafetensorError, OSError) as error:
            self._partial.unlink(missing_ok=True)
            raise ValueError(
                f"{self.path}: the training cannot be kept there ({error}); make room, and the same command goes on"
            ) from error

    def load(self) -> int:
        """Restore the newest state, if any; returns the number of finished steps.

        Raises:
            ValueError: the file is broken.
        """
        if not self.path.exists():
            return 0
        with self._readable():
            with safe_open(self.path, "pt") as file:
                step = int(file.metadata()["step"])
            self._restore(load_file(self.path))
        return step

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(f"{self.path}: no unfinished training ({error}); delete it to begin again") from error

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(tensors[f"model.{name}"])
        for number, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                kind, *where = name.split(".", 3)
                if kind == "optimizer" and where[0] == str(number):
                    state.setdefault(int(where[1]), {})[where[2]] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
