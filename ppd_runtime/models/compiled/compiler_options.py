"""What PyTorch's compiler is told for a kind of passes."""

from typing import Any

import torch

from ppd_runtime.models.pass_kinds import PassKind

_USUAL = {"cpp.threads": 1, "compile_threads": 1}  # matrix products are the library's and use PyTorch's threads
_ONE_ROW_ON_GPUS = {"coordinate_descent_tuning": True}
"""One row's products become reductions of the compiler's own, which are tuned for the bandwidth and fused with what is
around them."""
_ONE_ROW = (PassKind.ONE, PassKind.WITHOUT_ATTENTION, PassKind.WITHOUT_MLP)


def compiler_options(device: torch.device, passes: int) -> dict[str, Any]:
    """The options for code on `device` that runs `passes`, a `PassKind` or a number of candidates.

    The dictionary is the caller's: the compiler writes to it.
    """
    tuned = device.type == "cuda" and passes in _ONE_ROW
    return {**_USUAL, **(_ONE_ROW_ON_GPUS if tuned else {})}
