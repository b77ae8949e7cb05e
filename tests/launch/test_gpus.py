"""What is asked of this host's GPUs, without a context there, and what users are told of them."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ppd_runtime import PPDRuntime
from ppd_runtime.launch import nvml
from ppd_runtime.launch.gpus import crowding, free_bytes
from ppd_runtime.launch.worker_specs import all_code_kinds
from ppd_runtime.models.native.library import cpp_compiler
from ppd_runtime.models.pass_kinds import PassKind

NVML = """
#include <cstring>
struct Memory { unsigned long long total, free, used; };
static int opened, gpu;
extern "C" int nvmlInit_v2() { return FAILS || opened++; }
extern "C" int nvmlShutdown() { return --opened; }
extern "C" int nvmlDeviceGetHandleByUUID(const char* name, void** device) {
    *device = &gpu;
    return !opened || strcmp(name, "GPU-11-22");
}
extern "C" int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
    *memory = {100, 70, 30};
    return !opened || device != &gpu;
}
"""


def library(folder: Path, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's library of a machine with one GPU."""
    (folder / "nvml.cpp").write_text(NVML)
    file = folder / f"nvml-{fails}.so"
    subprocess.run(
        [cpp_compiler(), "-shared", "-fPIC", f"-DFAILS={fails}", folder / "nvml.cpp", "-o", file], check=True
    )
    monkeypatch.setattr(nvml, "_LIBRARY", str(file))


@pytest.mark.usefixtures("gpu_seen")
def test_free_memory_is_asked_without_a_context_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take half a gigabyte of each worker's GPU for as long as the program runs."""
    uuids = ["11-22", "33-44"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    library(tmp_path, 0, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("this opens a context"))
        assert [free_bytes("cuda:0") for _ in range(2)] == [70, 70]
    assert free_bytes("cuda:1") == 5_000, "a GPU that the library does not know"
    library(tmp_path, 1, monkeypatch)
    assert free_bytes("cuda:0") == 5_000, "a library that does not serve"
    monkeypatch.setattr(nvml, "_LIBRARY", str(tmp_path / "none.so"))
    assert free_bytes("cuda:0") == 5_000


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        (["cuda:0", "cuda:1"], None),
        (["cuda:0", "cpu", "cpu"], None),
        (["cuda", "cuda"], None),
        (["cuda:0", "cuda:0"], "2 workers share one GPU: "),
        (["cuda:0", "cuda:1", "cuda:0", "cpu"], "3 workers share 2 GPUs: "),
    ],
)
def test_workers_that_share_gpus(devices: list[str], told: str | None) -> None:
    """Ray's workers learn theirs when they run."""
    found = crowding(devices)
    assert found is None if told is None else found.startswith(told)


@pytest.mark.usefixtures("gpu_seen")
@pytest.mark.parametrize(("k", "shares"), [(1, False), (2, True)])
def test_a_start_says_that_workers_share_gpus(
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    k: int,
    shares: bool,
) -> None:
    def stop(*_: object) -> None:
        raise ValueError("no further")

    monkeypatch.setattr("ppd_runtime.runtime.prepare", stop)
    settings = {"device": "cuda", "dtype": "float32", "launcher": "processes"}
    stopped = pytest.raises(ValueError, match="^no further$")
    with contextlib.closing(PPDRuntime(model_folder("llama"), k=k, **settings)) as runtime, stopped:
        runtime.start()
    assert ("3 workers share 2 GPUs" in caplog.text) == shares


@pytest.mark.usefixtures("gpu_seen")
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16")])
def test_code_for_several_rows_is_made_where_rows_share_passes(
    model_folder: Callable[..., Path], device: str, dtype: str
) -> None:
    """Elsewhere each row is a pass of its own, whatever `rows` is."""
    settings = {"stages": 2, "rows": 4, "device": device, "dtype": dtype, "launcher": "processes"}
    with contextlib.closing(PPDRuntime(model_folder("llama"), **settings)) as runtime:
        kinds = all_code_kinds(runtime._specs)
    assert (PassKind.SEVERAL in kinds) == (dtype == "float32")
    assert PassKind.ONE in kinds
