"""The programs of examples/, as a reader runs them: what they print, and the texts that they say are equal."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compilers import needs_compiler
from grids import nightly

from ppd_runtime import OrdinaryDecoding

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 40
STREAMED = "class Reader:"
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> Path:
    """A small model."""
    return model_folder("llama", num_layers=4, quiet_from=2)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example in this process, where much is imported and workers are soon forked: what it prints."""
    monkeypatch.setattr("ppd_runtime.launch.choice.ray_is_initialized", lambda: False)  # by other tests it may be

    def example(name: str, *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return example


def test_they_are_short() -> None:
    programs = list(EXAMPLES.glob("*.py"))
    assert len(programs) == 5
    assert all(len(program.read_text().splitlines()) <= MOST_LINES for program in programs)


def test_stream_a_completion(run: Callable[..., str]) -> None:
    text = run("stream_a_completion.py", STREAMED)
    expected = OrdinaryDecoding("demo").generate(STREAMED, max_new_tokens=48)
    assert text.startswith(STREAMED + expected.text)
    assert f"{len(expected.token_ids)} tokens, " in text


@needs_compiler
def test_compiled_model(folder: Path, run: Callable[..., str]) -> None:
    text = run("compiled_model.py", folder, "The quick")
    expected = OrdinaryDecoding(str(folder), compile=True).generate("The quick", max_new_tokens=24)
    assert text.startswith("The quick" + expected.text)
    assert text.endswith("same tokens: True\n")


@nightly
def test_same_text_three_layouts(run: Callable[..., str]) -> None:
    lines = run("same_text_three_layouts.py", "11").splitlines()
    texts = {line.split(": ", 1)[1] for line in lines[:3]}
    assert lines[3] == "same text: True"
    settings = {"max_new_tokens": 40, "temperature": 0.8, "top_p": 0.95}
    ordinary = OrdinaryDecoding("demo", dtype="float32")
    asked, other = (ordinary.generate("class Reader:", seed=seed, **settings).text for seed in (11, 12))
    assert texts == {repr(asked)} and asked != other


@nightly
def test_compare_methods(run: Callable[..., str]) -> None:
    lines = run("compare_methods.py", "import os\n").splitlines()
    assert [line.split()[0] for line in lines] == ["autoregressive", "layerskip", "adaspeed", "kangaroo", "ppd"]
    assert all(line.endswith("same texts: True") for line in lines)


@nightly
def test_batch_on_ray(tmp_path: Path) -> None:
    """By night: a Ray node of its own, and workers that import for themselves, take 15 s of a core."""
    prompts, results = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("import os\ndef area(radius):\n")
    command = [sys.executable, str(EXAMPLES / "batch_on_ray.py"), str(prompts), str(results)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["import os", "def area(radius):"]
    ordinary = OrdinaryDecoding("demo")
    for line in lines:
        expected = ordinary.generate(line["prompt"], max_new_tokens=32)
        assert (tuple(line["token_ids"]), line["text"]) == (expected.token_ids, expected.text)
    assert "2/2: " in printed
