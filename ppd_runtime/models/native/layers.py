"""Passes through layers that were compiled one by one, each pass in one call; `layers.cpp` says how it works."""

import ctypes
import json
import math
import re
import tempfile
import weakref
import zipfile
import zlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.files.checksummed import find, keep
from ppd_runtime.models.native.library import load
from ppd_runtime.models.stage.caches import PreallocatedLayer, whole_rows
from ppd_runtime.models.stage.trees import PlacedTree, TokenTree

_P, _N = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ppd_code": (_P, [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]),
    "ppd_error": (ctypes.c_char_p, []),
    "ppd_delete_code": (None, [_P]),
    "ppd_layer": (_P, [_P, _N, _P, _P, _P]),
    "ppd_delete_layer": (None, [_P]),
    "ppd_cache": (_P, [_P, _P, _N, _N, _N, _N]),
    "ppd_delete_cache": (None, [_P]),
    "ppd_pass": (ctypes.c_int, [_P, _P, _N, _P, _N, _N, _P, _N, _N, _P, _N]),
    "ppd_draft": (ctypes.c_int, [_P]),
}


READS_MASK = "reads_mask"
"""Metadata key: whether a file's attention adds a mask to scores, in JSON; other attention reads lists."""
_NUMBERS_OF_A_TREE = 8
_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""See PyTorch's `ScalarType`."""

_OF_TENSORS = (
    "_reinterpret_tensor",
    "clone",
    "create_tensor_from_blob",
    "create_tensor_from_blob_v2",
    "delete_tensor_object",
    "empty_strided",
    "get_data_ptr",
    "get_device_type",
    "get_dim",
    "get_dtype",
    "get_numel",
    "get_sizes",
    "get_storage_offset",
    "get_storage_size",
    "get_strides",
    "new_tensor_handle",
)
"""PyTorch's functions, behind `aoti_torch_`, that `light_tensors.cpp` has too."""
_OF_NO_TENSOR = r"check|device_type_\w+|dtype_(?!element_size$)\w+|layout_\w+|grad_mode_\w+|cpu_few_\w+"
"""Functions without tensors, and our operators."""
_LIGHT = f"_light{zlib.crc32(repr((_OF_TENSORS, _OF_NO_TENSOR)).encode()):08x}"
"""In the name of a library converted to light tensors by these lists."""


class NativeCode:
    """Compiled code from a file in PyTorch's package format, for one thread at a time.

    Raises:
        ValueError: if there is none in the file, or it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="ppd-code-") as folder:
            try:
                self.metadata, library, takes_light = _unpacked(path, Path(folder))
            except (OSError, ValueError, KeyError, StopIteration, zipfile.BadZipFile) as error:
                raise ValueError(_cannot_be_loaded(path, str(error) or type(error).__name__)) from error
            self.reads_mask = reads_mask(self.metadata)
            self.handle: int | None = function("ppd_code")(bytes(library), takes_light, self.reads_mask)
        if not self.handle:
            library.unlink(missing_ok=True)  # it is made again from the package, or with it
            raise ValueError(_cannot_be_loaded(path, function("ppd_error")().decode(errors="replace")))
        _delete_with(self, "ppd_delete_code")


class Layer:
    """A layer's code with its weights, which are contiguous; a head is one, too."""

    def __init__(self, code: NativeCode, weights: Sequence[Tensor]) -> None:
        self._code, self.weights = code, list(weights)
        self.reads_mask = code.reads_mask
        places = array("q", [weight.data_ptr() for weight in weights])
        shapes = array("q", [number for weight in weights for number in (weight.dim(), *weight.shape)])
        dtypes = array("i", [_DTYPES[weight.dtype] for weight in weights])
        addresses = (numbers.buffer_info()[0] for numbers in (places, shapes, dtypes))
        self.handle: int = function("ppd_layer")(code.handle, len(weights), *addresses)
        _delete_with(self, "ppd_delete_layer")


class NativePasses:
    """Passes of one stage, in float32 on CPUs."""

    num_recorded = 0
    """There are no recordings on CPUs."""

    def __init__(self) -> None:
        self._routes: dict[Hashable, LayerProgram] = {}

    def load(self, path: Path) -> NativeCode:
        """The code of a file; ValueError if it cannot be loaded."""
        return NativeCode(path)

    def part(self, code: NativeCode, weights: Sequence[Tensor]) -> Layer:
        """A layer or a head."""
        return Layer(code, weights)

    def forget(self) -> None:
        """Let go of all sequences' caches."""
        for route in self._routes.values():
            route.forget()

    def head(self, part: Layer, hidden: Tensor, shape: Sequence[int]) -> Tensor:
        """Logits of hidden states `[1, tokens, hidden_size]`, in `shape`, whose last size is the vocabulary's.

        A later reshape takes ten microseconds between two passes.
        """
        return self.route("head", [part], [None]).run(hidden, (), None, shape)

    def run_trees(
        self,
        key: Hashable,
        parts: Sequence[Layer],
        numbers: Sequence[int | None],
        hidden: Tensor,
        caches: Sequence[PreallocatedLayer],
        trees: Sequence[PlacedTree],
    ) -> Tensor:
        """Like `run`, for trees of several texts at their own places. Caches hold all texts; no token is counted."""
        return self.route(key, parts, numbers).run_trees(hidden, caches, trees)

    def run(
        self,
        key: Hashable,
        parts: Sequence[Layer],
        numbers: Sequence[int | None],
        hidden: Tensor,
        caches: Sequence[PreallocatedLayer],
        tree: TokenTree | None = None,
    ) -> Tensor:
        """Run states `[1, tokens, hidden_size]`, of one token or of a tree's, through layers.

        `numbers` index the layers' caches, None without attention; `key` stands for parts and numbers.
        The caches count the tokens.
        """
        return self.route(key, parts, numbers).run(hidden, caches, tree, hidden.shape)

    def route(self, key: Hashable, parts: Sequence[Layer], numbers: Sequence[int | None]) -> "LayerProgram":
        """The program of some layers, cached by `key`; see `run`."""
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = LayerProgram(parts, numbers)
        return route


class LayerProgram:
    """Layers run one after the other, over the caches of one sequence at a time."""

    def __init__(self, parts: Sequence[Layer], numbers: Sequence[int | None]) -> None:
        self._parts, self._numbers = list(parts), list(numbers)
        self._layers = array("Q", [part.handle for part in parts])
        self._at_layers = self._layers.buffer_info()[0]
        self._pass = function("ppd_pass")
        self.forget()

    def forget(self) -> None:
        """Let go of all sequences' caches."""
        self._over: _Caches | None = None
        self._known: dict[int, _Caches] = {}
        self.attending: list[PreallocatedLayer] = []
        """The caches of the current sequence that it writes to."""

    def run(
        self, hidden: Tensor, caches: Sequence[PreallocatedLayer], tree: TokenTree | None, shape: Sequence[int]
    ) -> Tensor:
        """Implements `NativePasses.run`; the result of the layers has the shape `shape`."""
        self.over(caches)
        tokens = hidden.shape[1]
        position = attended = at_order = 0
        if self.attending:
            oldest = self.attending[0]
            position, order = oldest.length, oldest.order
            reach = position + (tokens if tree is None else tree.extent)
            oldest.check_room(reach)
            for cache in self.attending:
                cache.length += tokens
            attended, at_order = whole_rows(max(reach, order.extent)), order.address(reach)
        memory = (0, 0, 0, tokens, 0) if tree is None else tree.memory
        return self._call(hidden, array("q", [*memory, position, 0, at_order]), attended, shape)

    def run_trees(self, hidden: Tensor, caches: Sequence[PreallocatedLayer], trees: Sequence[PlacedTree]) -> Tensor:
        """Implements `NativePasses.run_trees`."""
        self.over(caches)
        reach = max(placed.reach for placed in trees)
        self.attending[0].check_room(reach)
        memory = array("q")
        for tree, position, first_row, order in trees:
            memory.extend((*tree.memory, position, first_row, order.address(position + tree.extent)))
        return self._call(hidden, memory, whole_rows(reach), hidden.shape)

    def _call(self, hidden: Tensor, trees: "array[int]", attended: int, shape: Sequence[int]) -> Tensor:
        """`trees` are laid out as `Tree` in passes.h."""
        hidden, (_, tokens, size) = hidden.contiguous(), hidden.shape
        if math.prod(shape) != tokens * shape[-1]:
            raise ValueError(f"what is behind {tokens} tokens has another shape than {tuple(shape)}")
        result = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
        failed = self._pass(
            *self.memory,
            hidden.data_ptr(),
            tokens,
            size,
            trees.buffer_info()[0],
            len(trees) // _NUMBERS_OF_A_TREE,
            attended,
            result.data_ptr(),
            shape[-1],
        )
        if failed:
            raise RuntimeError(f"compiled code failed ({failed}) at position {trees[-3]}, over {tokens} tokens")
        return result

    @property
    def memory(self) -> tuple[int, int | None, int]:
        """The addresses of its layers' and caches' handles, and the number of layers."""
        return self._at_layers, self._over.at if self._over else None, len(self._parts)

    def over(self, caches: Sequence[PreallocatedLayer]) -> None:
        """Switch to a sequence's caches, one for each model layer."""
        if self._over and caches is self._over.sequence:
            return
        if (known := self._known.get(id(caches))) is None:
            known = self._known[id(caches)] = _Caches(caches, self._numbers)
        self._over, self.attending = known, known.attending


class _Caches:
    """One sequence's caches as the layers of a program take them."""

    def __init__(self, sequence: Sequence[PreallocatedLayer], numbers: Sequence[int | None]) -> None:
        of_layers = [None if number is None else _Cache(sequence[number]) for number in numbers]
        self.sequence, self._caches = sequence, of_layers
        self.attending = [sequence[number] for number in numbers if number is not None]
        self._handles = array("Q", [cache.handle if cache else 0 for cache in of_layers])
        self.at = self._handles.buffer_info()[0] if self.attending else None


class _Cache:
    """A layer's cache as the passes see it."""

    def __init__(self, layer: PreallocatedLayer) -> None:
        self._kept = keys, values = layer.rows
        _, heads, dim = keys.shape
        places = keys.data_ptr(), values.data_ptr()
        self.handle = function("ppd_cache")(*places, heads, dim, values.shape[2], layer.sliding_window or 0)
        _delete_with(self, "ppd_delete_cache")


def function(name: str) -> Any:
    """A function of the C++ code, with its signature."""
    found = getattr(load(), name)
    found.restype, found.argtypes = _SIGNATURES[name]
    return found


def _delete_with(owner: Any, name: str) -> None:
    weakref.finalize(owner, function(name), owner.handle).atexit = False


def reads_mask(metadata: Mapping[str, str]) -> bool:
    """Whether a file with this metadata has attention that adds a mask to scores."""
    return bool(json.loads(metadata.get(READS_MASK, "true")))


def calls_python(path: Path) -> bool:
    """Whether a package's code needs operators that only Python has; false if there is no package."""
    try:
        with zipfile.ZipFile(path) as package:
            names = package.namelist()
    except (OSError, zipfile.BadZipFile):
        return False  # loading it tells why
    return any(name.removesuffix(".so") + ".json" in names for name in names if name.endswith(".so"))


def _unpacked(path: Path, folder: Path) -> tuple[dict[str, str], Path, bool]:
    """A package's metadata, its library, and whether the library takes light tensors.

    The library is a file beside it, which all processes share, or one in `folder` if none can be written there. A
    damaged one is unpacked again.
    """
    with zipfile.ZipFile(path) as package:
        library = next(name for name in package.namelist() if name.endswith(".so"))
        metadata = json.loads(package.read(f"{library.removesuffix('.so')}_metadata.json"))
        if beside := find(path.parent, f"{path.stem}{_LIGHT}", ".so"):
            return metadata, beside, True
        code = package.read(library)  # which checks it
    turned = _with_our_tensors(code)
    takes_light = turned != code
    name = f"{path.stem}{_LIGHT}" if takes_light else path.stem
    if not takes_light and (beside := find(path.parent, name, ".so")):
        return metadata, beside, False
    own = folder / f"{name}.so"
    own.write_bytes(turned)
    try:
        return metadata, keep(own, path.parent, name, ".so"), takes_light
    except OSError:
        return metadata, own, takes_light


def _with_our_tensors(code: bytes) -> bytes:
    """A library that asks `light_tensors.cpp` for its tensors instead of PyTorch: the functions' names are as long.

    Unchanged if it calls PyTorch for more than tensors, constants and our operators.
    """
    called = {name.decode() for name in re.findall(rb"\0((?:aoti|torch)_\w+)(?=\0)", code)}
    known = re.compile(f"aoti_torch_(?:{'|'.join(_OF_TENSORS)}|{_OF_NO_TENSOR})")
    if not all(map(known.fullmatch, called)):
        return code
    names = "|".join(_OF_TENSORS).encode()
    return re.sub(rb"\0aoti(_torch_(?:" + names + rb"))(?=\0)", rb"\0ppdl\1", code)


def _cannot_be_loaded(path: Path, reason: str) -> str:
    return f"compile: {path} cannot be loaded ({' '.join(reason.split())[:200]}); remove it to have it made again"
