"""Layouts beside ordinary decoding, text by text in turn: what `ppd plan` and `ppd demo` time."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from busy_cores import busy, cores
from grids import nightly
from typer.testing import CliRunner

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.cli.plan import plan
from ppd_runtime.host import available_cores
from ppd_runtime.tune import plan as planning
from ppd_runtime.tune.layouts import Layout, LayoutFigures, fitting, measured, opened
from ppd_runtime.tune.machine_load import UNDISTURBED
from ppd_runtime.tune.parts import measured_parts, measured_rates
from ppd_runtime.tune.plan import plan_here
from ppd_runtime.tune.subject import Subject, loaded, prompt_ids

PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True)
PROMPTS = [[5, 9, 200], [31, 7]]
THREADS, ONE, STAGES = (
    Layout("2 threads", {"threads": 2}),
    Layout("k=1", {"k": 1}, 2),
    Layout("2 stages", {"stages": 2}, 2),
)
app = typer.Typer()
app.command()(plan)


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
    assert [row.layout for row in found.layouts] == [STAGES]
    assert list(found.left_out) == ["none"]
    assert "stages=99" in found.left_out["none"]
    assert found.cautions[0].startswith("none was left out: ")
    assert "measuring 2 stages beside ordinary decoding, 2 of 2" in told
    data = found.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["layouts"][0]["settings"] == {"stages": 2}
    assert data["gains"] == (data["best"] is not None)
    assert data["verdict"].startswith("don't" if data["best"] is None else data["best"])


def test_the_command_on_a_small_model(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    prompts, out, chart = (tmp_path / name for name in ("prompts.txt", "plan.json", "plan.png"))
    prompts.write_text("The quick brown fox\nA model writes\n")
    asked = ["--model", model_folder("llama"), "--prompts", prompts, "--max-new-tokens", 9, "--seconds", 0]
    result = CliRunner().invoke(app, [*map(str, asked), "--out", str(out), "--plot", str(chart)])
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert data["verdict"] in result.stdout
    assert chart.stat().st_size > 1000 or not data["layouts"]
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
    (asked,) = prompt_ids(ordinary, ["fox"], 9)
    assert asked == ordinary.tokenizer.encode("user fox", add_special_tokens=False)
    assert plain == ordinary.tokenizer.encode("fox")


def test_parts_and_rates_are_measured_for_devices_that_are_not_here(subject: Subject) -> None:
    parts = measured_parts(subject)
    assert 0 < parts.layer_ms < 1000
    assert parts.exit_head_ms == parts.head_ms > 0
    assert (parts.hop_ms, 0 <= parts.row_cost <= 1) == (0, True)
    rates = measured_rates(subject, [1, 2], most_stages=3)
    assert set(rates.rates) == set(itertools.product((2, 3), (1, 2)))
    assert set(rates.first_boundary) == {(cuts, k) for cuts in ((2,), (1, 2)) for k in (1, 2)}
    assert rates.source == "2 prompts, 16 tokens", "the first token of a text has no candidates"
    for k in (1, 2):  # at half depth, a match and a first boundary are one
        assert rates.first_boundary[(2,), k][0] == pytest.approx(rates.rates[2, k])


def test_rates_are_those_that_the_runtime_finds(subject: Subject) -> None:
    rates = measured_rates(subject, [2], most_stages=1).rates
    layout = {"k": 2, "exit_layer": 3, "transport": "local", "speculation": "always"}
    with PPDRuntime(subject.ordinary.config.model, dtype=subject.ordinary.dtype, **layout) as runtime:
        results = [runtime.generate(prompt, PARAMS) for prompt in PROMPTS]
    hits = sum(result.stats.hits for result in results)  # a late candidate is a miss there, a right one never wrong
    assert hits <= round(rates[3, 2] * 16)
