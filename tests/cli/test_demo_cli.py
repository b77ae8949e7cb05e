"""What `ppd demo` says of the times that it took."""

from dataclasses import replace

import pytest
from commands import ppd, refused

from ppd_runtime.cli.demo import _layouts, _print_all
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.tune.layouts import Layout, LayoutFigures

FASTER = LayoutFigures(
    layout=Layout("stages", {"stages": 2}, 2),
    texts=3,
    tokens=100,
    ms_per_token=8.0,
    ordinary_ms_per_token=10.0,
    speedup=1.25,
    speedup_low=1.2,
    speedup_high=1.3,
    allowed_speedup=1 / 0.6,
    identical=True,
    cpu_share=0.99,
)
SLOWER = replace(FASTER, layout=Layout("papers", {"k": 1}, 2), speedup=0.8)


def said(capsys: pytest.CaptureFixture[str], *rows: LayoutFigures) -> str:
    _print_all(rows)
    return capsys.readouterr().out


def test_each_layout_has_a_row_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, FASTER, SLOWER)
    lines = [line.split() for line in text.splitlines()]
    assert ["ordinary", "decoding", "10.000", "1.00"] in lines
    assert ["stages", "8.000", "1.25", "(1.20–1.30)", "1.67", "50%", "yes"] in lines
    assert "stages: 1.25 times as fast.\n" in text
    assert "papers: slower, a token takes 25.0% longer.\n" in text
    assert "none" in next(line for line in lines if line[:1] == ["papers"])
    assert "computing" not in text


@pytest.mark.parametrize(
    ("k", "cores", "settings"),
    [
        (3, 1, [(2, 3), (None, 1)]),
        (3, 2, [(2, 3), (None, 1)]),
        (3, 5, [(4, 3), (None, 3)]),
        (9, 64, [(6, 9), (None, 9)]),
    ],
)
def test_both_layouts_are_for_the_cores_at_hand(k: int, cores: int, settings: list[tuple[int | None, int]]) -> None:
    found = [RuntimeConfig(**layout.settings) for layout in _layouts(k, cores)]  # type: ignore[arg-type]
    assert [(config.stages, config.k) for config in found] == settings


def test_no_difference_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for speedup in (0.996, 1.0, 1.004):
        assert "stages: as fast as ordinary decoding.\n" in said(capsys, replace(FASTER, speedup=speedup))


def test_other_tokens_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert " NO" in said(capsys, replace(FASTER, identical=False))


def test_load_of_other_programs_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, FASTER, replace(SLOWER, cpu_share=0.31))
    line = "Timing had 31% of the CPU time that it could use: others were computing as well. Times are rough.\n"
    assert text.endswith(line)
    assert text.count("computing") == 1


def test_one_token_is_refused_before_anything_starts() -> None:
    line = refused("demo", "--max-new-tokens", "1")
    assert "--max-new-tokens 1: times are for tokens after the first, give at least 2" in line


def test_without_options_it_times_the_usual_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make demo` gives no k, and a setting that is None is not handed on."""
    asked: list[int] = []

    def layouts(k: int, cores: int) -> list[Layout]:
        asked.append(k)
        raise ValueError("k is known: enough")

    monkeypatch.setattr("ppd_runtime.cli.demo._layouts", layouts)
    ppd("demo")
    assert asked == [3]
