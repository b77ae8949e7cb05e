"""Whether passes are compiled, and their code: made before workers start, found again by later starts."""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from ppd_runtime.files.cache_folder import kept_artifact
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.native.library import is_available, is_float32_on_cpu, load, load_meanwhile
from ppd_runtime.models.pass_kinds import PassKind, head_rows
from ppd_runtime.models.stage.library_probe import has_states, runs_in_library

logger = logging.getLogger(__name__)
VARIABLE = "PPD_COMPILE"
"""An environment variable: 0 or 1 is `compile` if that is not given."""
_COST = "a token takes several times as long"
Code = Mapping[int, tuple[Path, ...]]
"""Files for each kind of passes."""


def wants_code(wanted: bool | None, device: str) -> bool:
    """Whether to compile passes: `wanted` if given, else on Linux CPUs with a C++ compiler.

    Raises:
        ValueError: for an environment variable `VARIABLE` that is neither 0 nor 1.
    """
    if wanted is not None:
        return wanted
    said = os.environ.get(VARIABLE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={said!r:.50}: give 0 or 1, or leave it out")
    if said:
        return said == "1"
    return device.partition(":")[0] == "cpu" and sys.platform == "linux" and _has_compiler(os.environ.get("CXX", "g++"))


@cache
def _has_compiler(command: str) -> bool:
    found = shutil.which(command) is not None
    if not found:
        logger.warning("no C++ compiler (%s): passes are not compiled, and %s; install g++, or set CXX", command, _COST)
    return found


def code_for(
    wanted: bool | None,
    info: ModelInfo,
    dtype: torch.dtype,
    device: str,
    passes: Iterable[int],
    progress: Callable[[str], None] = logger.info,
) -> Code:
    """Call `compile_ahead` if passes are to be compiled; otherwise do nothing.

    Raises:
        ValueError: if `wanted` is True and the model cannot be compiled, or not on this machine. Else that is a
            warning.
    """
    if not wants_code(wanted, device):
        return {}
    try:
        return compile_ahead(info, dtype, device, passes, progress)
    except ValueError as error:
        if wanted:
            raise
        logger.warning("passes are not compiled, and %s: %s", _COST, error)
        return {}


def compile_ahead(
    info: ModelInfo,
    dtype: torch.dtype,
    device: str,
    passes: Iterable[int] = (PassKind.ONE,),
    progress: Callable[[str], None] = logger.info,
) -> dict[int, tuple[Path, ...]]:
    """Each layer's file of compiled code for each kind of passes, and the head's own if that is compiled; makes those
    that no earlier run has made.

    Args:
        passes: numbers that are, or stand for, a `PassKind`; the whole head is made besides.
        progress: is told each file that has to be made.

    Raises:
        ValueError: if the model cannot be compiled, or not on this machine.
    """
    if is_float32_on_cpu(device, dtype):
        load_meanwhile()
    # many imports; only compiled code needs them
    from ppd_runtime.models.compiled.export import CodePart, head_part, layer_parts

    config, place = model_config(info.folder), torch.device(device)
    if has_states(config):
        raise ValueError(
            f"compile: layers of {info.name!r} keep a recurrent state and run in the library's code; leave compile out"
        )
    if what := runs_in_library(config):
        raise ValueError(f"compile: layers of {info.name!r} {what} and run in the library's code; leave compile out")
    parts = dict[int, list[CodePart]]()
    for kind in {*passes, PassKind.HEAD}:
        if (rows := head_rows(kind)) is None:
            parts[kind] = layer_parts(config, dtype, place, kind)
        elif head := head_part(config, dtype, place, rows):
            parts[kind] = [head]
    unlike = dict[str, CodePart]()
    for part in chain(*parts.values()):
        unlike.setdefault(part.name, part)
    files = {name: found for name in unlike if (found := kept_artifact(name))}
    missing = [part for name, part in unlike.items() if name not in files]
    if missing:  # a warning, for it takes a while and most programs show nothing less
        logger.warning("compiling for this model and machine, once: %d files, some ten seconds each", len(missing))
    for number, part in enumerate(missing, 1):
        progress(f"compiling {part.what} ({number} of {len(missing)})")
        files[part.name] = part.file()
    if is_available(place, dtype):
        load()  # or one clear line
    return {kind: tuple(files[part.name] for part in of_kind) for kind, of_kind in parts.items()}


def compile_bundle(info: ModelInfo, dtype: torch.dtype, device: str, passes: Iterable[int]) -> bytes:
    """Code of `compile_ahead` for other hosts' processes, which unpack it with `compiled_elsewhere`."""
    from ppd_runtime.models.compiled.code_bundle import pack_code

    return pack_code(compile_ahead(info, dtype, device, passes), torch.device(device))


def read_code(told: Mapping[str, Sequence[str]]) -> dict[int, tuple[Path, ...]]:
    """Files of compiled code by their kind, from JSON."""
    return {int(kind): tuple(map(Path, files)) for kind, files in told.items()}


def compiled_elsewhere(bundle: bytes, device: str, passes: Iterable[int]) -> dict[int, tuple[Path, ...]]:
    """The bundle's code for these kinds of passes; raises like `unpack_code`."""
    from ppd_runtime.models.compiled.code_bundle import unpack_code

    code = unpack_code(bundle, torch.device(device))
    return {kind: code[kind] for kind in passes if kind in code}
