"""Whatever lies in the current folder, a downloaded model's for instance: no process of ours imports it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from grids import nightly
from hostile_folder import HostileFolder

PPD = """
import contextlib
from ppd_runtime.cli.entry import main
with contextlib.suppress(SystemExit):
    main()
"""
OTHERS = """
from ppd_runtime.launch.ray.session import _probe
from ppd_runtime.models.compiled.compiler_apart import compiler_apart
from torch._inductor import cpu_vec_isa
cpu_vec_isa.supported_vec_isa_list[:] = cpu_vec_isa.supported_vec_isa_list[3:]  # each costs a compiler's run of seconds
with contextlib.suppress(RuntimeError):  # where no Ray runs here
    _probe("auto")
with compiler_apart():
    print("compiling")
"""
"""Starts what asks a cluster, and what looks for the CPU's instructions: AVX2 of them, or ARM's."""
NOT_FORKED = "import ppd_runtime.launch.processes as launch; launch.can_fork = lambda: False\n"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs a program, whose folder is another, in the hostile folder: what it prints."""
    hostile = HostileFolder(tmp_path)

    def in_the_folder(source: str, model: str, *options: object, **environment: str) -> str:
        program = tmp_path / "program" / "program.py"
        program.parent.mkdir()
        program.write_text(source)
        asked = ("generate", "The quick", "--model", model, "--max-new-tokens", 4, *options)
        command = [sys.executable, str(program), *map(str, asked)]
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | environment
        shown = subprocess.run(command, cwd=hostile.path, env=plain, capture_output=True, text=True, timeout=300)
        assert hostile.was_run() == []
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    return in_the_folder


def test_what_is_started_imports_none_of_it(run: Callable[..., str], folder: str, tmp_path: Path) -> None:
    """The compiler's folder is a new one, for what has been found out there is not looked for again."""
    shown = run(PPD + OTHERS, folder, "--k", 1, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "compiled"))
    assert shown.startswith("The quick")
    assert shown.endswith("compiling\n")


@nightly
@pytest.mark.parametrize(
    ("before", "options"),
    [("", ("--k", 1, "--launcher", "ray")), ("", ("--stages", 2)), (NOT_FORKED, ("--k", 1))],
    ids=str,
)
def test_other_workers_import_none_of_it(
    run: Callable[..., str], folder: str, before: str, options: tuple[object]
) -> None:
    assert run(before + PPD, folder, *options).startswith("The quick")
