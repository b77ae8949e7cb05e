"""Compiled code that travels: the same bytes on the other host, or a line that says why not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.launch import startup
from ppd_runtime.models import compiling
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiled import code_bundle
from ppd_runtime.models.compiled.code_bundle import pack_code, unpack_code
from ppd_runtime.models.compiling import compile_bundle, compiled_elsewhere
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.layouts import DECIDER, PaperLayout
from ppd_runtime.workers.spec import WorkerSpec

CPU = torch.device("cpu")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[Path, ...]]:
    """Two files of a host, one for several layers; the cache folder is another host's."""
    (tmp_path / "here").mkdir()
    paths = [tmp_path / "here" / f"{name}.pt2" for name in "ab"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number, 10, 0]) * 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    return {1: (paths[0], paths[1], paths[0]), PassKind.HEAD: (paths[1],)}


def test_the_files_are_the_same_on_the_other_host(code: dict[int, tuple[Path, ...]]) -> None:
    bundle = pack_code(code, CPU)
    for _ in range(2):
        found = unpack_code(bundle, CPU)
        assert found.keys() == code.keys()
        for kind, paths in code.items():
            assert [path.read_bytes() for path in found[kind]] == [path.read_bytes() for path in paths]
        assert {path.parent for paths in found.values() for path in paths} == {cache_folder()}
    assert len(list(cache_folder().glob("*.pt2"))) == 2, "each once"
    assert compiled_elsewhere(bundle, "cpu", [1, 4]).keys() == {1}


@pytest.mark.parametrize("place", [-1, -4000])
def test_damaged_bytes_are_refused(code: dict[int, tuple[Path, ...]], place: int) -> None:
    bundle = bytearray(pack_code(code, CPU))
    bundle[place] ^= 1
    with pytest.raises(
        ValueError, match=r"^compile: the code that another worker compiled has been damaged on its way$"
    ):
        unpack_code(bytes(bundle), CPU)
    with pytest.raises(ValueError, match="damaged on its way"):
        unpack_code(pack_code(code, CPU)[:-5], CPU)


def test_another_kind_of_machine_is_refused(code: dict[int, tuple[Path, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for instructions that a processor lacks would end its process."""
    bundle = pack_code(code, CPU)
    monkeypatch.setattr(code_bundle, "capabilities", lambda device: ["an older one"])
    with pytest.raises(
        ValueError, match=r"^compile: the code was compiled on cpu .*, this worker is on .* an older one: "
    ):
        unpack_code(bundle, CPU)


def test_a_worker_runs_what_another_one_has_compiled(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = describe(str(model_folder("llama")))
    bundle = compile_bundle(info, torch.float32, "cpu", [])  # the head, the quickest to make
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stage = load_stage(info, 4, torch.float32, "cpu", compiled_elsewhere(bundle, "cpu", [PassKind.HEAD]))
    assert stage._compiled is not None
    assert {path.parent for paths in stage._compiled._files.values() for path in paths} == {cache_folder()}


def test_a_program_without_a_gpu_leaves_compiling_to_a_worker(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster whose workers have some."""
    compiled: list[str] = []
    monkeypatch.setattr(compiling, "compile_ahead", lambda *arguments: compiled.append("here") or {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = WorkerSpec(DECIDER, PaperLayout(1, 2, 1), describe(str(model_folder("llama"))), torch.bfloat16, "cuda", 1)
    config = RuntimeConfig(compile=True, device="cuda", bind_interface="10.0.0.1")
    assert startup.prepare([spec, replace(spec, rank=1)], config, "ray", compiled.append)[DECIDER].code == {}
    assert compiled == []


@pytest.mark.parametrize("interface", ["10.0.0.1", None])
def test_a_program_that_lacks_what_compiling_needs_leaves_it_to_workers_on_other_hosts(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, interface: str | None
) -> None:
    """A GPU without a toolkit, such as a cluster's head node may have; workers of this host lack it, too."""

    def refuse(*_: object) -> None:
        raise ValueError("compile: no toolkit")

    monkeypatch.setattr(compiling, "compile_ahead", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(startup, "share_weights", refuse if interface else lambda *_: None)
    spec = WorkerSpec(DECIDER, PaperLayout(1, 2, 1), describe(str(model_folder("llama"))), torch.bfloat16, "cuda", 1)
    config = RuntimeConfig(compile=True, device="cuda", bind_interface=interface)
    if interface is None:
        with pytest.raises(ValueError, match="no toolkit"):
            startup.prepare([spec], config, "ray", lambda line: None)
    else:
        assert startup.prepare([spec], config, "ray", lambda line: None)[DECIDER].code == {}
