"""Compiles the kernels of `slot_attention` to GPUs' machine code, which needs no GPU; prints each kernel's target."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ppd_runtime.models.stage import slot_attention

STEPS = {"head_step": 128, "row_step": 4096, "value_head_step": 128, "value_row_step": 1024, "num_rows": 8}
SIZES = {"dim": 128, "wide": 128, "value_dim": 128, "value_wide": 128, "split_size": slot_attention.SPLIT, "block": 64}
OF_LLAMA_3 = (
    STEPS
    | SIZES
    | {"group": 4, "group_wide": 16, "key_heads": 8, "heads": 8, "heads_wide": 8, "in_float32": False, "scale": 0.09}
)
TABLES = {"rows": "*i64", "addresses": "*i64", "row_size": "i32", "splits": "i32"}
PARTS = {"sums": "*fp32", "largest_scores": "*fp32", "totals": "*fp32"}


def compiled(kernel: Any, dtype: str, capability: int, constants: dict[str, Any]) -> Any:
    """A kernel's code for tensors of a number format on GPUs of this capability."""
    of_states = dict.fromkeys(("query", "keys", "values", "output"), f"*{dtype}")
    known = TABLES | PARTS | of_states
    signature = {name: known.get(name, "constexpr") for name in kernel.arg_names}
    given = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    return triton.compile(ASTSource(kernel, signature, given), target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    for dtype, capability, cap, window in (("bf16", 90, 0.0, 0), ("fp32", 80, 50.0, 1000)):
        constants = OF_LLAMA_3 | {"cap": cap, "window": window}
        for kernel in (slot_attention._append, slot_attention._attend_split, slot_attention._join_splits):
            assert compiled(kernel, dtype, capability, constants).asm["cubin"]
            print(kernel.__name__, capability)
