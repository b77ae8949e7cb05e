"""The staged layout in processes of its own: ordinary decoding's texts by every launcher and transport."""

import json
import subprocess
import sys

import pytest
from grids import nightly

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.chunks import PROMPT_CHUNKS

pytestmark = pytest.mark.processes
PROMPT = "def read_lines(path):"
LONG_PROMPT = list(range(1, sum(PROMPT_CHUNKS[:2]) + 2))
SAMPLED = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def ordinary():
    """The oracle."""
    return OrdinaryDecoding("demo", dtype="float32")


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({"stages": 2}, {"launcher": "processes", "transport": "unix"}),
        ({"cuts": "2,5,9", "k": 2, "rows": 3, "guess_vocab": 200}, {"launcher": "processes", "transport": "zeromq"}),
        ({"stages": 3, "k": 1}, {"launcher": "processes", "transport": "collective"}),
        ({"stages": 2}, {"launcher": "ray"}),
    ],
    ids=str,
)
def test_texts_are_ordinary_decodings(ordinary, settings, way):
    with PPDRuntime("demo", dtype="float32", speculation="always", **settings, **way) as runtime:
        for prompt, sampling in ((PROMPT, {}), (PROMPT, SAMPLED), (LONG_PROMPT, SAMPLED)):
            expected = ordinary.generate(prompt, max_new_tokens=32, **sampling)
            result = runtime.generate(prompt, max_new_tokens=32, **sampling)
            assert result.token_ids == expected.token_ids
            assert result.finish_reason == expected.finish_reason
            assert sum(result.stats.first_boundary) == result.stats.new_tokens - 1


@pytest.mark.parametrize("rows", [pytest.param(1, marks=nightly), 4])
def test_compiled(ordinary, rows):
    compiled = OrdinaryDecoding("demo", dtype="float32", compile=True)
    with PPDRuntime("demo", stages=2, rows=rows, dtype="float32", compile=True, launcher="processes") as runtime:
        for prompt, sampling in ((PROMPT, {}), (PROMPT, SAMPLED), (LONG_PROMPT, SAMPLED)):
            expected = compiled.generate(prompt, max_new_tokens=48, **sampling)
            assert runtime.generate(prompt, max_new_tokens=48, **sampling).token_ids == expected.token_ids


def test_the_command_line(ordinary, tmp_path):
    out, timeline = tmp_path / "out.json", tmp_path / "timeline.png"
    settings = ["--stages", "3", "--k", "2", "--dtype", "float32", "--max-new-tokens", "16"]
    files = ["--out", str(out), "--timeline", str(timeline)]
    command = [sys.executable, "-m", "ppd_runtime.cli.entry", "generate", PROMPT, *settings, *files]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    expected = ordinary.generate(PROMPT, max_new_tokens=16)
    assert json.loads(out.read_text())["token_ids"] == list(expected.token_ids)
    assert timeline.stat().st_size


def test_a_text_that_repeats_itself_in_compiled_chains():
    prompt = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = ["
    compiled = OrdinaryDecoding("demo", dtype="float32", compile=True)
    expected = compiled.generate(prompt, max_new_tokens=64, ignore_eos=True)
    with PPDRuntime(
        "demo", stages=2, rows=8, dtype="float32", compile=True, launcher="processes", trace=True
    ) as runtime:
        result = runtime.generate(prompt, max_new_tokens=64, ignore_eos=True)
    assert result.token_ids == expected.token_ids
