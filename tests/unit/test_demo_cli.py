"""What `ppd demo` says of the times that it took."""

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from ppd_runtime.cli.demo import _layouts, _print_all, demo
from ppd_runtime.config import RuntimeConfig
from ppd_runtime.measure.against_ordinary import Comparison

FASTER = Comparison(
    new_tokens=100,
    hits=90,
    misses=10,
    ordinary_time_per_token_s=0.010,
    ppd_time_per_token_s=0.008,
    ratio=0.8,
    predicted_ratio=0.6,
    identical=True,
    cpu_share=0.99,
)
SLOWER = replace(FASTER, ratio=1.25)
STAGES = replace(FASTER, first_boundary=(70, 20, 10), ratio=0.5)


def said(capsys: pytest.CaptureFixture[str], **comparisons: Comparison) -> str:
    _print_all(comparisons)
    return capsys.readouterr().out


def test_faster_is_said_to_be_faster(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, here=FASTER)
    assert "PPD is 1.25 times as fast.\n" in text
    assert "slower" not in text
    assert "50%" in text
    assert "computing" not in text


def test_slower_is_said_to_be_slower(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, here=SLOWER, there=replace(SLOWER, ratio=1.414))
    assert "PPD is slower: a token takes 25.0% longer.\n" in text
    assert "With there PPD is slower: a token takes 41.4% longer (ratio 1.414).\n" in text
    assert "times as fast" not in text
    assert "realised saving                   │ none" in text


def test_the_faster_layout_is_shown_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, stages=STAGES, papers=FASTER)
    assert "Pipelined beside ordinary decoding, stages" in " ".join(text.split())
    assert "first named at boundary 2         │ 20" in text
    assert "that no boundary named            │ 10" in text
    assert "ratio that E[J]/N predicts" in text
    assert "ordinary decoding, time per token │ 10.00 ms" in text
    assert "Shown is the faster layout in these measurements, stages.\n" in text
    assert "With papers PPD is 1.25 times as fast (ratio 0.800).\n" in text
    other = said(capsys, stages=replace(STAGES, ratio=0.9), papers=FASTER)
    assert "in these measurements, papers.\n" in other
    assert "hits, misses" in other
    assert "boundary" not in other


@pytest.mark.parametrize(
    ("k", "cores", "layouts"),
    [
        (3, 1, {"2 stages, k=3": (2, 3), "the paper's layout, k=1": (None, 1)}),
        (3, 2, {"2 stages, k=3": (2, 3), "the paper's layout, k=1": (None, 1)}),
        (3, 5, {"4 stages, k=3": (4, 3), "the paper's layout, k=3": (None, 3)}),
        (9, 64, {"6 stages, k=9": (6, 9), "the paper's layout, k=9": (None, 9)}),
    ],
)
def test_both_layouts_are_for_the_cores_at_hand(k: int, cores: int, layouts: dict[str, tuple[int | None, int]]) -> None:
    found = {name: RuntimeConfig(**layout) for name, layout in _layouts(k, cores).items()}  # type: ignore[arg-type]
    assert {name: (config.stages, config.k) for name, config in found.items()} == layouts


def test_no_difference_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for ratio in (0.996, 1.0, 1.004):
        assert "PPD is as fast as ordinary decoding.\n" in said(capsys, here=replace(FASTER, ratio=ratio))


def test_load_of_other_programs_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    busy = replace(SLOWER, hits=10, misses=90, cpu_share=0.31)
    text = said(capsys, here=busy, there=FASTER)
    line = "Timing had 31% of the CPU time that it could use: others were computing as well. Times are rough.\n"
    assert text.endswith(line)
    assert text.count("computing") == 1
    assert "The match rate is low" in said(capsys, here=replace(busy, cpu_share=0.95))


def test_one_token_is_refused_before_anything_starts() -> None:
    app = typer.Typer()
    app.command()(demo)
    result = CliRunner().invoke(app, ["--max-new-tokens", "1"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--max-new-tokens 1: times are for tokens after the first, give at least 2" in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_options_it_times_the_usual_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` gives no k, and a setting that is None is not handed on."""
    asked: list[int] = []

    def layouts(k: int, cores: int) -> dict[str, dict[str, int]]:
        asked.append(k)
        raise ValueError("k is known: enough")

    monkeypatch.setattr("ppd_runtime.cli.demo._layouts", layouts)
    app = typer.Typer()
    app.command()(demo)
    CliRunner().invoke(app, [])
    assert asked == [3]
