"""Light tensors: what PyTorch's C functions say of tensors, said of ours, whose memory is used again."""

import ctypes
from collections.abc import Sequence

import torch
from compilers import needs_compiler

from ppd_runtime.models.native.layers import _with_our_tensors
from ppd_runtime.models.native.library import load

FLOAT32, CPU = 6, 0


def call(name: str, *arguments: object) -> None:
    assert getattr(load(), f"ppdl_torch_{name}")(*arguments) == 0


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


class Light:
    """A handle, which goes with this."""

    def __init__(self, maker: str, *arguments: object) -> None:
        self.handle = ctypes.c_void_p()
        call(maker, *arguments, ctypes.byref(self.handle))

    def __del__(self) -> None:
        call("delete_tensor_object", self.handle)

    def number(self, name: str) -> int:
        found = ctypes.c_int64()
        call(f"get_{name}", self.handle, ctypes.byref(found))
        return found.value

    def axes(self, name: str) -> list[int]:
        found = ctypes.POINTER(ctypes.c_int64)()
        call(f"get_{name}", self.handle, ctypes.byref(found))
        return [found[axis] for axis in range(self.number("dim"))]

    def values(self) -> list[float]:
        """In the order of its axes."""
        memory = (ctypes.c_float * 1000).from_address(self.number("data_ptr"))
        sizes, strides = self.axes("sizes"), self.axes("strides")
        places = [0]
        for size, stride in zip(sizes, strides, strict=True):
            places = [place + i * stride for place in places for i in range(size)]
        return [memory[place] for place in places]


def empty(*sizes: int) -> Light:
    return Light("empty_strided", len(sizes), numbers(sizes), numbers(contiguous(sizes)), FLOAT32, CPU, 0)


def view(tensor: Light, sizes: Sequence[int], strides: Sequence[int], further: int) -> Light:
    rank = ctypes.c_int64(len(sizes))
    return Light("_reinterpret_tensor", tensor.handle, rank, numbers(sizes), numbers(strides), ctypes.c_int64(further))


def contiguous(sizes: Sequence[int]) -> list[int]:
    return list(torch.empty(tuple(sizes), device="meta").stride())


@needs_compiler
def test_memory_is_used_again_and_shared_until_the_last_is_gone() -> None:
    first = empty(3, 100)
    place = first.number("data_ptr")
    assert place % 64 == 0
    row = view(first, (100,), (1,), 200)
    same = Light("new_tensor_handle", row.handle)
    assert same.handle.value != row.handle.value
    del first, row
    taken = empty(3, 100)
    assert taken.number("data_ptr") != place, "a view is left"
    del same
    assert empty(4, 90).number("data_ptr") == place, "of the same size, rounded up"


@needs_compiler
def test_more_axes_than_they_have_are_pytorchs() -> None:
    many = empty(*[1] * 17)
    assert many.handle.value is not None
    assert many.handle.value % 2 == 0
    assert (many.number("dim"), many.axes("sizes")) == (17, [1] * 17)


def names(*called: str) -> bytes:
    return b"".join(b"\0" + name.encode() for name in called) + b"\0"


def test_a_library_is_turned_where_all_that_it_asks_is_ours() -> None:
    own = ("aoti_torch_empty_strided", "aoti_torch_check", "aoti_torch_cpu_few_rows_linear_2", "memcpy")
    turned = _with_our_tensors(names(*own))
    assert turned == names("ppdl_torch_empty_strided", *own[1:])
    for foreign in (
        "aoti_torch_cpu_mm_out",
        "aoti_torch_empty_strided_pinned",
        "aoti_torch_proxy_executor_call_function",
    ):
        code = names(*own, foreign)
        assert _with_our_tensors(code) == code
