"""Several workers on one GPU, as plain processes: their tokens, what a loss does, and what their messages take."""

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import hop
from benchmarks.gpu.scene import Row, Rows, Scene
from benchmarks.models import shape_config
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.trained.exit_heads import OracleHead

_PROMPT = list(range(5, 45))
_MATCH_RATE = 0.7


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
    try:
        with PPDRuntime(folder, launcher="processes", exit_head=head, **layout, **settings) as runtime:
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


def hops(scene: Scene) -> Rows:
    """A tensor's way from the device of one process to that of another, by transport and size."""
    yield from _hops(scene, ["unix", *["zeromq"] * _has_zeromq()], scene.choose([8192, 65536, 524288, 4194304], [8192]))
    if _has_zeromq() and not scene.pretend:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two processes of one GPU, where NCCL is new enough for that
        yield from _hops(scene, ["collective"], [8192, 524288])


def _has_zeromq() -> bool:
    try:
        importlib.import_module("zmq")
    except ImportError:
        return False
    return True


def _hops(scene: Scene, transports: list[str], sizes: list[int]) -> Rows:
    for transport in transports:
        for size in sizes:
            series = hop.Series(transport, size, 1, scene.choose(200, 5), str(scene.device))
            try:
                (row,) = hop.measure_all([series])
                yield {name: row[name] for name in ("transport", "num_bytes", "median_us", "p99_us", "sender_us")}
            except (RuntimeError, ValueError, TimeoutError) as error:
                yield {"transport": transport, "num_bytes": size, "error": str(error)[:300]}
