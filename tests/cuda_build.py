"""What PyTorch's CUDA build shows on a machine without a GPU; `test_cuda_build.py` runs it where it finds that build.

Prints a line for each thing that it has seen.
"""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from rows_on_fake_gpu import check_rows
from torch.export import ExportedProgram
from transformers import AutoConfig

from ppd_runtime.models.compiled import export
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.caches import ATTENDED_ROWS
from ppd_runtime.transport.collective_groups import CollectiveBackend

_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
}


def check_nccl() -> None:
    """Every option that is set exists; without a GPU the group refuses then, and no earlier."""
    backend = CollectiveBackend("cuda:0", "")
    try:
        backend.new_group(dist.HashStore(), 0)
    except (RuntimeError, ValueError) as error:
        if "no GPUs found" not in str(error):
            raise
    else:
        raise AssertionError("a group without a GPU")
    print("nccl", ".".join(map(str, torch.cuda.nccl.version())))


def check_exports() -> None:
    """Every kind of pass can be exported for a GPU, over any number of attended rows that is a multiple of eight."""
    for family, own in _FAMILIES.items():
        config = AutoConfig.for_model(family, vocab_size=128, **_SMALL, **own)
        for dtype in (torch.float32, torch.bfloat16):
            for passes in (1, 4, PassKind.SEVERAL):
                programs: list[ExportedProgram] = []
                with patch.object(torch._inductor, "aoti_compile_and_package", _keep_in(programs)):
                    export.compile_layers(config, dtype, torch.device("cuda"), passes)
                assert programs
                for program in programs:
                    _check_rows(program)
                    assert not any(node.kwargs.get("enable_gqa") for node in program.graph.nodes), (
                        "reads keys in copies"
                    )
                print("exported", family, str(dtype), int(passes))


def _keep_in(programs: list[ExportedProgram]) -> Callable[..., None]:
    def keep(program: ExportedProgram, *, package_path: str, **_: object) -> None:
        programs.append(program)
        Path(package_path).touch()

    return keep


def _check_rows(program: ExportedProgram) -> None:
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    caches = [value for value in inputs if value.dim() == 3 and value.shape[1:] == inputs[2].shape[1:]]
    assert len(caches) == 2, [value.shape for value in inputs]
    for cache in caches:
        rows = cache.shape[0]
        bounds = rows.node.shape_env.bound_sympy(rows.node.expr)
        assert bounds.lower <= ATTENDED_ROWS and bounds.upper >= 2**20, bounds
        assert rows.node.expr % 8 == 0, rows


if __name__ == "__main__":
    assert torch.version.cuda is not None and not torch.cuda.is_available()
    check_nccl()
    for family, own in _FAMILIES.items():
        check_rows(family, vocab_size=128, **{**_SMALL, **own})
    with patch.object(export, "check_toolkit"), patch.object(torch.cuda, "get_device_name", lambda device: "none"):
        check_exports()
