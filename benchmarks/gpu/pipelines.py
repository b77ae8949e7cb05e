"""Several workers on one GPU, as plain processes: their tokens, what a loss does, and what their messages take."""

import contextlib
import importlib
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import hop
from benchmarks.gpu.scene import Row, Rows, Scene
from benchmarks.models import shape_config
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.transport.collective.groups import CollectiveBackend

_PROMPT = list(range(5, 45))
_MATCH_RATE = 0.7
_LINK_BYTES, _LINK_S = 8192, 30.0
_MPS_CONTROL = "nvidia-cuda-mps-control"


def pipelines(scene: Scene) -> Rows:
    """Layouts with a set match rate, compiled or not, and one that loses a worker: ordinary decoding's tokens?"""
    layouts: list[Row] = [{"k": 1}, {"k": 2}, {"k": 3}, *({"stages": stages, "k": 2} for stages in (2, 3, 4))]
    layouts = scene.choose(layouts, [{"k": 1}, layouts[3]])
    with tempfile.TemporaryDirectory(prefix="ppd-gpu-") as folder:
        scene.save_model("small", Path(folder))
        for compiled in scene.choose((False, True), (False,)):
            settings = {"dtype": "bfloat16", "device": scene.device.type, "compile": compiled}
            text = _ordinary(scene, folder, settings, {})
            sampled = _ordinary(scene, folder, settings, {"temperature": 1.0, "seed": 3})
            for layout in scene.choose(layouts, layouts[:1]):
                yield from _run(scene, folder, settings, layout, text, {})
            yield from _run(scene, folder, settings, layouts[-1], sampled, {"temperature": 1.0, "seed": 3})
            for victim, layout in scene.choose({"sub-1": {"k": 1}, "stage-1": {"stages": 2, "k": 2}}, {}).items():
                yield from _run(scene, folder, settings, layout, text, {}, victim)
        if not scene.pretend:
            with _mps() as runs:
                if runs:
                    yield from _run(scene, folder, settings, {"k": 1, "under": "MPS"}, text, {})


def _ordinary(scene: Scene, folder: str, settings: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[int, ...]:
    ordinary = OrdinaryDecoding(folder, **settings)
    return ordinary.generate(_PROMPT, max_new_tokens=scene.choose(120, 6), ignore_eos=True, **asked).token_ids


def _run(
    scene: Scene,
    folder: str,
    settings: Mapping[str, Any],
    layout: Mapping[str, Any],
    text: tuple[int, ...],
    asked: Mapping[str, Any],
    victim: str | None = None,
) -> Rows:
    """A text; a layout that fails is a row that says so, and the next one is run."""
    about: Row = {"layout": ", ".join(f"{name} {value}" for name, value in layout.items())}
    about |= {"sampled": bool(asked), "compiled": settings["compile"], "killed": victim}
    head = OracleHead(((*_PROMPT, *text),), _MATCH_RATE, shape_config("small").vocab_size)
    given = {name: value for name, value in layout.items() if name != "under"}
    try:
        with PPDRuntime(folder, launcher="processes", exit_head=head, **given, **settings) as runtime:
            found: list[int] = []
            began = time.perf_counter()
            for event in runtime.stream(_PROMPT, max_new_tokens=len(text), ignore_eos=True, **asked):
                found.append(event.token_id)
                if victim and len(found) == len(text) // 2:
                    _kill(victim)
            seconds = time.perf_counter() - began
        yield about | {"equal": tuple(found) == text, "ms a token": 1000 * seconds / len(text), "error": None}
    except (RuntimeError, ValueError) as error:
        yield about | {"equal": False, "ms a token": None, "error": str(error)[:300]}


def _kill(name: str) -> None:
    """End a worker of this process, which Linux knows by its name."""
    for stat in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if stat.read_text().strip() == f"ppd-{name}" and _is_ours(stat.parent):
                os.kill(int(stat.parent.name), 9)


def _is_ours(process: Path) -> bool:
    """Whether a process descends from this one."""
    while process.name not in ("0", "1", str(os.getpid())):
        process = process.parent / (process / "stat").read_text().rpartition(")")[2].split()[1]
    return process.name == str(os.getpid())


@contextlib.contextmanager
def _mps() -> Iterator[bool]:
    """NVIDIA's server that has processes share a GPU at the same time, where it starts."""
    with tempfile.TemporaryDirectory(prefix="ppd-mps-") as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        starts = bool(shutil.which(_MPS_CONTROL)) and _mps_control(["-d"], names).returncode == 0
        os.environ.update(names if starts else {})
        try:
            yield starts
        finally:
            if starts:
                _mps_control([], names, b"quit\n")
                for name in names:
                    os.environ.pop(name)


def _mps_control(
    options: list[str], names: Mapping[str, str], orders: bytes = b""
) -> "subprocess.CompletedProcess[bytes]":
    command, environment = [_MPS_CONTROL, *options], os.environ | names
    return subprocess.run(command, env=environment, input=orders, capture_output=True, timeout=20, check=False)


def hops(scene: Scene) -> Rows:
    """A tensor's way from the device of one process to that of another, by transport and size."""
    transports = ["unix", *["zeromq"] * _has_zeromq()]
    yield from _hops(scene, transports, scene.choose([8192, 65536, 524288, 4194304], [8192]))


def _has_zeromq() -> bool:
    try:
        importlib.import_module("zmq")
    except ImportError:
        return False
    return True


def nccl(scene: Scene) -> Rows:
    """Two processes of one GPU with NCCL, where it is new enough for that, and a group of one; Gloo on a CPU.

    The links are the transport's own, first without the ZeroMQ that its messages go by.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if scene.device.type == "cuda":
        numbers = torch.ones(4, device=scene.device)
        alone = CollectiveBackend(str(scene.device), "").new_group(torch.distributed.HashStore(), 0, 1)
        alone.allreduce([numbers]).wait()
        yield {"NCCL with the transport's options": "a group of one", "equal": numbers.tolist() == [1.0] * 4}
    yield _link(scene)
    if _has_zeromq() and not scene.pretend:
        yield from _hops(scene, ["collective"], [8192, 524288])


def _link(scene: Scene) -> Row:
    about = {"a link of": "two processes", "num_bytes": _LINK_BYTES}
    context = multiprocessing.get_context(scene.start_method)
    with tempfile.TemporaryDirectory(prefix="ppd-link-") as folder, ProcessPoolExecutor(2, context) as pool:
        arguments = str(scene.device), f"{folder}/store", scene.choose(200, 5)
        try:
            both = [pool.submit(exchange, rank, *arguments) for rank in (0, 1)]
            (median_us, right), (_, back) = (one.result(_LINK_S) for one in both)
        except (RuntimeError, TimeoutError, OSError) as error:
            return about | {"median_us": None, "error": str(error)[:300]}
    return about | {"median_us": median_us, "equal": right and back}


def exchange(rank: int, device: str, store: str, rounds: int) -> tuple[float, bool]:
    """Send bytes to the other process and back: microseconds one way, and whether they arrived as they were."""
    torch.set_num_threads(1)
    backend = CollectiveBackend(device, "")
    channel = backend.connect(torch.distributed.FileStore(store, 2), rank)
    raw, times, right = torch.full((_LINK_BYTES,), 1 + rank, dtype=torch.uint8, device=device), [], True
    for _ in range(rounds):
        began = time.perf_counter()
        sent = channel.send(raw) if rank == 0 else None
        got = channel.receive(_LINK_BYTES)
        while not got.is_here(_LINK_S):
            if time.perf_counter() - began > _LINK_S:
                raise TimeoutError(f"nothing has come for {_LINK_S:.0f} s")
        sent = sent or channel.send(raw)
        sent.wait()
        times.append(time.perf_counter() - began)
        right = right and bool((got.raw == 2 - rank).all())
    channel.close()
    backend.close()
    return 1e6 * statistics.median(times) / 2, right


def _hops(scene: Scene, transports: list[str], sizes: list[int]) -> Rows:
    for transport in transports:
        for size in sizes:
            series = hop.Series(transport, size, 1, scene.choose(200, 5), str(scene.device))
            try:
                row = hop.measure_series(series, scene.start_method)
                yield {name: row[name] for name in ("transport", "num_bytes", "median_us", "p99_us", "sender_us")}
            except (RuntimeError, ValueError, TimeoutError) as error:
                yield {"transport": transport, "num_bytes": size, "error": str(error)[:300]}
