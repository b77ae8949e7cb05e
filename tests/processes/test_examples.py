"""The programs of examples/, as a reader runs them: what they print, and the texts that they say are equal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import needs_compiler
from grids import nightly

from ppd_runtime import OrdinaryDecoding

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES = 40
STREAMED = "class Reader:"
pytestmark = pytest.mark.processes


RUN_ALL = """
import contextlib, io, json, runpy, sys
from ppd_runtime.imports import quick_imports
from ppd_runtime.launch.fork_server import open_fork_server
server = open_fork_server()  # for the workers of them all
with quick_imports():
    from ppd_runtime import PPDRuntime
printed = {}
for path, *sys.argv[1:] in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printing:
        runpy.run_path(path, run_name="__main__")
    printed[path] = printing.getvalue()
server.close()
print(json.dumps(printed))
"""


def run(name: str, *arguments: object) -> str:
    """What an example prints."""
    return done(EXAMPLES / name, *arguments)


def done(*command: object) -> str:
    """What a program of Python's prints."""
    ended = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def folder(model_folder) -> Path:
    """A small model."""
    return model_folder("llama", num_layers=4, quiet_from=2)


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    """What examples print that run one after the other in one program, spared each one's imports."""
    commands = [
        ("stream_a_completion.py", STREAMED),
        ("same_text_three_layouts.py", "11"),
        ("compare_methods.py", "import os\n"),
    ]
    if needs_compiler.args == (False,):
        commands.append(("compiled_model.py", str(folder), "The quick"))
    commands = [(str(EXAMPLES / name), *arguments) for name, *arguments in commands]
    found = json.loads(done("-c", RUN_ALL, json.dumps(commands)))
    return {Path(path).name: text for path, text in found.items()}


def test_they_are_short() -> None:
    programs = list(EXAMPLES.glob("*.py"))
    assert len(programs) == 5
    assert all(len(program.read_text().splitlines()) <= MOST_LINES for program in programs)


def test_stream_a_completion(printed: dict[str, str]) -> None:
    text = printed["stream_a_completion.py"]
    expected = OrdinaryDecoding("demo").generate(STREAMED, max_new_tokens=48)
    assert text.startswith(STREAMED + expected.text)
    assert f"{len(expected.token_ids)} tokens, " in text


@needs_compiler
def test_compiled_model(folder: Path, printed: dict[str, str]) -> None:
    text = printed["compiled_model.py"]
    expected = OrdinaryDecoding(str(folder), compile=True).generate("The quick", max_new_tokens=24)
    assert text.startswith("The quick" + expected.text)
    assert text.endswith("same tokens: True\n")


def test_same_text_three_layouts(printed: dict[str, str]) -> None:
    lines = printed["same_text_three_layouts.py"].splitlines()
    texts = {line.split(": ", 1)[1] for line in lines[:3]}
    assert lines[3] == "same text: True"
    settings = {"max_new_tokens": 40, "temperature": 0.8, "top_p": 0.95}
    ordinary = OrdinaryDecoding("demo", dtype="float32")
    asked, other = (ordinary.generate("class Reader:", seed=seed, **settings).text for seed in (11, 12))
    assert texts == {repr(asked)} and asked != other


def test_compare_methods(printed: dict[str, str]) -> None:
    lines = printed["compare_methods.py"].splitlines()
    assert [line.split()[0] for line in lines] == ["autoregressive", "layerskip", "adaspeed", "kangaroo", "ppd"]
    assert all(line.endswith("same texts: True") for line in lines)


@nightly
def test_batch_on_ray(tmp_path: Path) -> None:
    """By night: a Ray node of its own, and workers that import for themselves, take 15 s of a core."""
    prompts, results = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("import os\ndef area(radius):\n")
    printed = run("batch_on_ray.py", prompts, results)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["import os", "def area(radius):"]
    ordinary = OrdinaryDecoding("demo")
    for line in lines:
        expected = ordinary.generate(line["prompt"], max_new_tokens=32)
        assert (tuple(line["token_ids"]), line["text"]) == (expected.token_ids, expected.text)
    assert "2/2: " in printed
