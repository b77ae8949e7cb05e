"""The results of a job: what a rerun skips, repairs and refuses."""

import json
from pathlib import Path

import pytest

from cluster.job import lasting
from cluster.results import ResultsFile

PROMPTS = ["one", "two", "one"]
SETTINGS = {"model": "demo", "k": 3, "seed": 0, "stop": ("end",)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A file with the results of the first prompt and the last."""
    path = tmp_path / "new" / "out.jsonl"
    with ResultsFile(path, PROMPTS, SETTINGS) as results:
        assert results.done == set()
        results.append(2, {"text": "c"})
        results.append(0, {"text": "a"})
    return path


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_rerun_knows_what_is_done(out: Path) -> None:
    with ResultsFile(out, PROMPTS, SETTINGS) as results:
        assert results.done == {0, 2}
        results.append(1, {"text": "b"})
    assert [(row["index"], row["text"]) for row in rows(out)] == [(2, "c"), (0, "a"), (1, "b")]
    assert rows(out)[0]["settings"] == {**SETTINGS, "stop": ["end"]}


def test_a_result_is_in_the_file_before_the_next_begins(tmp_path: Path) -> None:
    with ResultsFile(tmp_path / "out", PROMPTS, SETTINGS) as results:
        results.append(0, {"text": "a"})
        assert rows(tmp_path / "out")[0]["text"] == "a"


@pytest.mark.parametrize("size", range(1, 80, 13))
def test_a_line_that_was_cut_short_is_taken_off(out: Path, size: int) -> None:
    whole = out.read_bytes()
    second = whole.index(b"\n") + 1
    out.write_bytes(whole[: second + size])
    with ResultsFile(out, PROMPTS, SETTINGS) as results:
        assert results.done == {2}
        results.append(0, {"text": "a"})
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        (PROMPTS, {**SETTINGS, "k": 2}, "line 1: was made with k=3, not 2; run it with those"),
        (PROMPTS, {**SETTINGS, "temperature": 1.0}, "was made with temperature=None, not 1.0"),
        (["one", "two", "three"], SETTINGS, "line 1: is the result of another prompt 2"),
        (["one"], SETTINGS, "line 1: is the result of another prompt 2"),
    ],
)
def test_another_batch_is_refused_and_nothing_touched(
    out: Path, prompts: list[str], settings: dict[str, object], words: str
) -> None:
    before = out.read_bytes()
    with pytest.raises(ValueError, match=words):
        ResultsFile(out, prompts, settings)
    assert out.read_bytes() == before


@pytest.mark.parametrize("line", ["Once upon a time", "{}", "[1]", "3", '{"index": "0", "id": "", "settings": {}}'])
def test_what_is_no_result_is_refused_and_nothing_touched(tmp_path: Path, line: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(f"{line}\n{{")
    with pytest.raises(ValueError, match="line 1: no result of a job; give another file"):
        ResultsFile(path, PROMPTS, SETTINGS)
    assert path.read_text() == f"{line}\n{{"


@pytest.mark.parametrize("text", ["all that is in this file", '{"prompt": "no newline"}', "{'index': 1"])
def test_what_looks_like_no_cut_result_is_not_taken_off(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 1: no result of a job; give another file"):
        ResultsFile(path, PROMPTS, SETTINGS)
    assert path.read_text() == text


def test_one_job_writes_at_a_time(out: Path) -> None:
    with ResultsFile(out, PROMPTS, SETTINGS), pytest.raises(ValueError, match="another job writes it"):
        ResultsFile(out, PROMPTS, SETTINGS)
    with ResultsFile(out, PROMPTS, SETTINGS):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a file that can be written"):
        ResultsFile(tmp_path, PROMPTS, SETTINGS)


def test_results_outlast_rays_copy_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(copy)
    assert lasting(Path("out.jsonl")) == tmp_path / "home" / "out.jsonl"
    assert lasting(Path("/data/out.jsonl")) == Path("/data/out.jsonl")
    monkeypatch.chdir(tmp_path)
    assert lasting(Path("out.jsonl")) == Path("out.jsonl")
