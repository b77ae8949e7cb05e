"""`layout="auto"` from the first start, which measures, to a text."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ppd
from heads_for_tests import make_drafter, make_head

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.files import findings
from ppd_runtime.launch import found_layout
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.heads import AFFINE
from ppd_runtime.settings.config import RuntimeConfig

pytestmark = pytest.mark.processes
PROMPT = [5, 9, 200, 31]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that findings of this test are kept in, however busy the machine is; compiled code is shared."""
    own = tmp_path / "findings"
    own.mkdir()
    monkeypatch.setattr(findings, "cache_folder", lambda: own)
    monkeypatch.setattr(found_layout, "SECONDS", 0.0)
    monkeypatch.setattr(found_layout, "UNDISTURBED", -1.0)
    return own


def test_the_first_start_measures_and_later_ones_know(cache: Path, model_folder: Callable[..., Path]) -> None:
    folder, told = model_folder("llama"), list[str]()
    with PPDRuntime(folder, layout="auto", progress=told.append) as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=12)
        threads, found = runtime.config.threads_per_worker, runtime.layout_found
    assert any(line.startswith("measuring one stage") for line in told)
    assert found.startswith("layout auto: ")
    assert found.endswith(f"(`ppd plan --model {folder}` shows why)")
    with OrdinaryDecoding(folder, threads=threads) as ordinary:
        assert result.token_ids == ordinary.generate(PROMPT, max_new_tokens=12).token_ids
    (file,) = cache.glob("layout-*.json")
    before, told = file.read_text(), []
    again = PPDRuntime(folder, layout="auto", progress=told.append)
    assert (again.layout_found, told, file.read_text()) == (found, [], before)
    again.close()


def test_commands_take_it_and_a_plan_measures_again(cache: Path, model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    planned = ppd("plan", "--model", folder, "--max-new-tokens", 9, "--seconds", 0)
    assert planned.exit_code == 0, planned.stderr
    (file,) = cache.glob("layout-*.json")
    before = file.read_text()
    shown = ppd("generate", "fox", "--model", folder, "--layout", "auto", "--max-new-tokens", 5, "--quiet")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stderr.startswith("layout auto: ")
    assert file.read_text() == before


def test_stages_are_measured_with_the_parts_of_a_folder(
    cache: Path, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, parts = model_folder("llama"), tmp_path / "parts"
    parts.mkdir()
    for layer in (1, 2, 3):
        make_head(parts / f"layer-{layer}", folder, AFFINE, layer)
    make_drafter(parts / "drafter", str(folder))
    plan = found_layout.measured_layouts(RuntimeConfig(folder), lambda line: None, str(parts))["plan"]
    drafts = {"drafter": str(parts / "drafter")}
    expected = {"one stage": drafts, "2 stages": {"exit_head": str(parts), **drafts}, "k=1": {}}
    found = {row["name"].partition(",")[0]: row["settings"] for row in plan["layouts"]}
    for name in expected.keys() & found.keys():
        assert {key: found[name][key] for key in found[name].keys() & {"drafter", "exit_head"}} == expected[name]
    assert "one stage" in found
    assert plan["left_out"] == {}
    assert [row[0] for row in plan["rows"]] == ["ordinary decoding", *(row["name"] for row in plan["layouts"])]


def test_a_measurement_that_fails_is_told(
    cache: Path, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_layout, "SECONDS", "soon")
    with pytest.raises(RuntimeError, match=r"layout='auto': the process that measures ended with code 1; give the"):
        PPDRuntime(model_folder("llama"), layout="auto")
    with pytest.raises(ValueError, match=r"emulate with layout='auto', which times this machine: drop one"):
        PPDRuntime(model_folder("llama"), layout="auto", emulate=EmulatedDevice(1.0))
    monkeypatch.setattr(sys, "executable", "/none")
    with pytest.raises(OSError, match="/none"):
        PPDRuntime(model_folder("llama"), layout="auto")
