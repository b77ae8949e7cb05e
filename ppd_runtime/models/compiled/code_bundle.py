"""Packs compiled code to send it from the worker that compiled it to the others, perhaps on other hosts.

A process that compiles for itself may choose other kernels, and so have other bits. A bundle is a line of JSON, then
the bytes of the files that it names by their hashes.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from ppd_runtime.files.cache_folder import artifact, capabilities

Code = Mapping[int, Sequence[Path]]
"""Each kind of passes' files, one a layer; see `compile_ahead`."""


def pack_code(code: Code, device: torch.device) -> bytes:
    """All files of `code`, which was compiled for this machine's `device`."""
    files = {path: path.read_bytes() for path in sorted(set().union(*code.values()))}
    about = {
        "machine": _machine(device),
        "sha256": [hashlib.sha256(data).hexdigest() for data in files.values()],
        "sizes": [len(data) for data in files.values()],
        "code": {int(kind): [list(files).index(path) for path in paths] for kind, paths in code.items()},
    }
    return b"".join([json.dumps(about).encode(), b"\n", *files.values()])


def unpack_code(bundle: bytes, device: torch.device) -> dict[int, tuple[Path, ...]]:
    """Unpack the code into this host's cache folder.

    Raises:
        ValueError: if the bytes differ from those packed, or are for another kind of machine.
    """
    line, _, data = bundle.partition(b"\n")
    about = json.loads(line)
    if (here := _machine(device)) != about["machine"]:
        raise ValueError(
            f"compile: the code was compiled on {' '.join(about['machine'])}, this worker is on {' '.join(here)}: give "
            "all workers one kind of machine and the same PyTorch, or leave compile out"
        )
    paths, begin = list[Path](), 0
    for digest, size in zip(about["sha256"], about["sizes"], strict=True):
        content = data[begin : begin + size]
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError("compile: the code that another worker compiled has been damaged on its way")
        paths.append(artifact({"sha256": digest}, partial(_write, content)))
        begin += size
    return {int(kind): tuple(paths[place] for place in places) for kind, places in about["code"].items()}


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _machine(device: torch.device) -> list[str]:
    return [device.type, platform.machine(), f"torch {torch.__version__}", *capabilities(device)]
