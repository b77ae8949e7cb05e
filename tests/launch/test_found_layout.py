"""`layout="auto"`: what is kept of a measurement, when it is taken, and the settings that it becomes."""

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppd_runtime.files.findings import only_one_measures
from ppd_runtime.host import UNDISTURBED
from ppd_runtime.launch import found_layout
from ppd_runtime.launch.found_layout import keep, with_found_layout
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.settings.config import RuntimeConfig

STAGES = {"settings": {"stages": 2, "threads_per_worker": 1}, "told": "2 stages, 1.50 times"}
ONE = {"settings": {"stages": 1, "threads_per_worker": 1}, "told": "one stage"}
PAPER = {"settings": {"k": 1, "threads_per_worker": 1}, "told": "k=1"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that findings of this test are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ppd_runtime"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Findings that are measured in turn; the last one is measured from then on."""
    found = [STAGES]

    def measure(config: RuntimeConfig, progress: Any) -> dict[str, Any]:
        return answer_of(found.pop(0) if len(found) > 1 else found[0])

    monkeypatch.setattr(found_layout, "measured_layouts", measure)
    return found


def answer_of(found: dict[str, Any], cpu_share: float = 1.0) -> dict[str, Any]:
    """What the process that measures tells."""
    return {"found": found, "cpu_share": cpu_share, "plan": {"cautions": []}}


def auto(folder: Path, **settings: Any) -> tuple[RuntimeConfig, str]:
    return with_found_layout(RuntimeConfig(folder, layout="auto", **settings), lambda line: None)


def test_it_is_measured_once(cache: Path, model_folder: Callable[..., Path], measured: list[dict[str, Any]]) -> None:
    measured[:] = [STAGES, ONE]
    folder = model_folder("llama")
    assert [auto(folder)[0].stages for _ in range(2)] == [2, 2]
    assert auto(folder, dtype="bfloat16")[0].stages == 1
    assert auto(folder)[0].stages == 2
    assert len(list(cache.glob("layout-*.json"))) == 2


def test_a_plan_takes_its_place(cache: Path, model_folder: Callable[..., Path], measured: list[dict[str, Any]]) -> None:
    folder = model_folder("llama")
    assert auto(folder)[0].stages == 2
    keep(RuntimeConfig(folder, compile=False), describe(str(folder)), PAPER, 1.0)  # as ordinary decoding has it
    assert (auto(folder)[0].k, auto(folder)[0].stages) == (1, None)
    assert measured == [STAGES]


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[1]",
        '{"found": 5}',
        '{"found": {"settings": {"stages": 2}}}',
        '{"found": {"settings": {"stages": "2", "threads_per_worker": 1}, "told": ""}}',
        '{"found": {"settings": {"k": 0, "threads_per_worker": 1}, "told": ""}}',
        '{"found": {"settings": {"k": 1, "model": 1}, "told": ""}}',
    ],
)
def test_a_damaged_finding_is_measured_again(
    cache: Path, model_folder: Callable[..., Path], measured: list[dict[str, Any]], damaged: str
) -> None:
    measured[:] = [PAPER, STAGES]
    folder = model_folder("llama")
    auto(folder)
    (file,) = cache.glob("layout-*.json")
    file.write_text(damaged)
    assert auto(folder)[0].stages == 2
    assert json.loads(file.read_text())["found"] == STAGES


def test_settings_of_stages_hold_where_stages_are_chosen(
    cache: Path, model_folder: Callable[..., Path], measured: list[dict[str, Any]]
) -> None:
    room = {"max_requests": 3, "max_cache_tokens": 500, "prefix_cache_tokens": 0, "draft_memory_mb": 0}
    for found, expected in ((STAGES, room), (ONE, room), (PAPER, dict.fromkeys(room))):
        measured[:] = [found]
        config, _ = auto(model_folder("llama"), exit_head="shared", max_restarts=1, **room)
        assert {name: getattr(config, name) for name in room} == expected
        assert (config.layout, config.dtype, config.max_restarts) == (None, "float32", 1)
        assert config.in_threads == (found is ONE)
        assert config.launcher == ("auto" if found is ONE else "processes")
        next(cache.glob("layout-*.json")).unlink()


def test_a_line_tells_the_finding_and_the_command(
    cache: Path, model_folder: Callable[..., Path], measured: list[dict[str, Any]]
) -> None:
    folder = model_folder("llama")
    _, told = auto(folder)
    assert told == f"layout auto: 2 stages, 1.50 times (`ppd plan --model {folder}` shows why)"
    _, told = auto(folder, weights="int8", compile=False, dtype="float32")
    assert f"`ppd plan --model {folder} --dtype float32 --weights int8 --no-compile`" in told


def test_what_cannot_be_kept_is_measured_each_time(
    model_folder: Callable[..., Path],
    measured: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    measured[:] = [STAGES, ONE]
    with caplog.at_level(logging.WARNING):
        assert [auto(model_folder("llama"))[0].stages for _ in range(2)] == [2, 1]
    assert "the layout that was found is not kept: cache folder" in caplog.text


def test_a_model_of_one_layer_and_heads_that_are_not_there_are_refused_before_anything_is_measured(
    cache: Path, model_folder: Callable[..., Path], measured: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match="has 1 layer: pipelined decoding needs at least 2"):
        auto(model_folder("llama", num_layers=1))
    with pytest.raises(ValueError, match="no-heads"):
        auto(model_folder("llama"), exit_head="no-heads")
    assert not list(cache.glob("layout-*.json"))


def test_what_a_busy_machine_gave_is_used_and_not_kept(
    cache: Path,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = [answer_of(STAGES, UNDISTURBED), answer_of(ONE, 0.95), answer_of(PAPER, 1.0)]
    monkeypatch.setattr(found_layout, "measured_layouts", lambda config, progress: answers.pop(0))
    folder = model_folder("llama")
    assert auto(folder)[0].stages == 2
    (line,) = caplog.messages
    assert line == "the layout that was found is not kept, but measured again next time: other programs computed"
    assert [auto(folder)[0].stages for _ in range(2)] == [1, 1]
    keep(RuntimeConfig(folder, compile=False), describe(str(folder)), PAPER, 0.5)
    assert auto(folder)[0].stages == 1
    assert len(answers) == 1
    assert len(caplog.messages) == 2


def test_of_two_starts_at_once_one_measures_and_the_other_waits_for_it(
    cache: Path, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, begun, waited, measures = model_folder("llama"), threading.Event(), threading.Event(), list[int]()

    def measure(config: RuntimeConfig, progress: Any) -> dict[str, Any]:
        measures.append(1)
        begun.set()
        assert waited.wait(60)
        return answer_of(STAGES)

    def tell(line: str) -> None:
        assert line == "another start measures which layout is the fastest here: waiting for it"
        waited.set()

    monkeypatch.setattr(found_layout, "measured_layouts", measure)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(auto, folder)
        assert begun.wait(60)
        config, told = with_found_layout(RuntimeConfig(folder, layout="auto"), tell)
        assert (config.stages, first.result()[0].stages, measures) == (2, 2, [1])
    assert told.startswith("layout auto: 2 stages, 1.50 times, as another start has just found (`ppd plan")
    assert "another start" not in first.result()[1] + auto(folder)[1]


def test_a_start_measures_too_if_another_one_takes_too_long(
    cache: Path,
    model_folder: Callable[..., Path],
    measured: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = RuntimeConfig(model_folder("llama"), layout="auto")
    about = found_layout._about(config, describe(config.model))
    monkeypatch.setattr(found_layout, "PATIENCE_S", 0.05)
    with only_one_measures("layout", about, 0.0):
        assert auto(model_folder("llama"))[0].stages == 2
    assert caplog.messages == ["layout auto: another start has measured for 0 s: measuring, too"]
