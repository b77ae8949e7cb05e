"""Layouts beside ordinary decoding, text by text in turn: what `ppd plan` and `ppd demo` time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from busy_cores import busy, cores
from commands import printed
from grids import nightly

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.host import UNDISTURBED, available_cores
from ppd_runtime.tune import plan as planning
from ppd_runtime.tune.layouts import Layout, LayoutFigures, fitting, measured, opened
from ppd_runtime.tune.plan import plan_here
from ppd_runtime.tune.subject import Subject, loaded, message_ids

PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True)
PROMPTS = [[5, 9, 200], [31, 7]]
THREADS, ONE, STAGES = (
    Layout("2 threads", {"threads": 2}),
    Layout("k=1", {"k": 1}, 2),
    Layout("2 stages", {"stages": 2}, 2),
)


@pytest.fixture(scope="module")
def subject(model_folder: Callable[..., Path]) -> Subject:
    """A small model and two prompts."""
    return Subject(OrdinaryDecoding(str(model_folder("llama"))), PROMPTS, PARAMS)


def figures(subject: Subject, layout: Layout, **others: Any) -> LayoutFigures:
    with opened(layout, subject.ordinary, **others) as way:
        found = measured(layout, way, subject, 0.0)
    assert found.identical
    assert (found.texts, found.tokens) == (3, 27)
    assert 0 < found.speedup_low <= found.speedup <= found.speedup_high
    assert found.ms_per_token > 0
    return found


def test_the_papers_layout_is_allowed_what_theorem_4_1_says(subject: Subject) -> None:
    found = figures(subject, ONE, launcher="processes", speculation="always")
    assert found.allowed_speedup is not None
    assert 1 <= found.allowed_speedup <= 2
    assert 0 < (found.cpu_share or 0) <= 1


def test_stages_are_allowed_what_their_first_boundaries_say(subject: Subject) -> None:
    found = figures(subject, STAGES, transport="local", speculation="always")
    assert found.allowed_speedup is not None
    assert 1 <= found.allowed_speedup <= 2


@pytest.mark.skipif(available_cores() < 2, reason="two threads need two cores")
def test_threads_are_allowed_anything(subject: Subject) -> None:
    assert figures(subject, THREADS).allowed_speedup is None


@nightly
def test_other_programs_are_noticed_on_the_sub_process_core(subject: Subject) -> None:
    """Ordinary decoding runs on the main process' core, which no other program wants here."""
    with opened(ONE, subject.ordinary, launcher="processes") as way, busy(cores()[:2][-1]):
        found = measured(ONE, way, subject, 0.0)
    assert found.cpu_share is not None
    assert 0 < found.cpu_share < UNDISTURBED


def test_a_layout_has_the_models_settings(model_folder: Callable[..., Path]) -> None:
    ordinary = OrdinaryDecoding(str(model_folder("llama")), weights="int8", generation_config=False)
    with opened(STAGES, ordinary, transport="local") as way:
        assert isinstance(way, PPDRuntime)
        assert (way.dtype, way.config.weights, way.config.generation_config) == (ordinary.dtype, "int8", False)
        assert way.config.compile == ordinary.config.compile


def test_a_plan_measures_what_fits_and_goes_on_behind_what_fails(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Layout("none", {"stages": 99}, 99)
    monkeypatch.setattr(planning, "fitting", lambda *_: [broken, STAGES])
    told: list[str] = []
    found = plan_here(subject, 0.0, progress=told.append)
    data = found.as_dict()
    assert list(data["left_out"]) == ["none"]
    assert "stages=99" in data["left_out"]["none"]
    assert found.cautions[0].startswith("none was left out: ")
    assert "measuring 2 stages beside ordinary decoding, 2 of 2" in told
    assert json.loads(json.dumps(data)) == data
    assert [row["settings"] for row in data["layouts"]] == [{"stages": 2}]
    assert data["gains"] == (data["best"] is not None)
    assert data["verdict"].startswith("don't" if data["best"] is None else data["best"])


def test_the_command_on_a_small_model(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts, out = (tmp_path / name for name in ("prompts.txt", "plan.json"))
    prompts.write_text("The quick brown fox\nA model writes\n")
    asked = ["--model", model_folder("llama"), "--prompts", prompts, "--max-new-tokens", 9, "--seconds", 0]
    shown = printed("plan", *asked, "--out", out)
    data = json.loads(out.read_text())
    assert data["verdict"] in shown
    names = {row["name"] for row in data["layouts"]} | set(data["left_out"])
    assert names == {layout.name for layout in fitting(data["devices"], 4, 1, True)}
    speeds = [row["speedup"] for row in data["layouts"]]
    assert speeds == sorted(speeds, reverse=True)


def test_prompts_are_messages_where_there_is_a_template(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("fox\n")
    folder = str(model_folder("llama"))
    (plain,) = loaded(folder, str(file), None, PARAMS).prompts
    ordinary = OrdinaryDecoding(folder)
    ordinary.tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    (asked,) = message_ids(ordinary, ["fox"], 9)
    assert asked == ordinary.tokenizer.encode("user fox", add_special_tokens=False)
    assert plain == ordinary.tokenizer.encode("fox")
