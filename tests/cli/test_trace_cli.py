"""`ppd generate --trace --timeline`: both files, or one line about a mistake before anything starts."""

import json
import os
import re
import sys

import pytest
from commands import ppd, refused

from ppd_runtime import OrdinaryDecoding

GENERATE = ("generate", "The quick")
NOWHERE = (*GENERATE, "--model", "no/such/model")


@pytest.mark.parametrize(
    "layout",
    [("--method", "autoregressive"), ("--transport", "local", "--k", 1), ("--transport", "local", "--stages", 3)],
    ids=str,
)
def test_both_files_are_written_and_the_text_stays(folder, tmp_path, layout):
    pytest.importorskip("matplotlib")
    trace, timeline = tmp_path / "t.json", tmp_path / "t.png"
    options = ("--model", folder, *layout, "--max-new-tokens", 6, "--ignore-eos", "--json")
    result = ppd(*GENERATE, *options, "--trace", trace, "--timeline", timeline)
    assert (result.exit_code, result.stderr) == (0, "")
    expected = OrdinaryDecoding(folder).generate("The quick", max_new_tokens=6, ignore_eos=True)
    assert tuple(json.loads(result.stdout)["token_ids"]) == expected.token_ids
    events = json.loads(trace.read_text())["traceEvents"]
    passes = [event["args"] for event in events if event["name"].startswith("layers") and event["pid"] == 1]
    main_passes = json.loads(result.stdout)["stats"]["main_layer_passes"]
    assert sum(args["last_layer"] - args["first_layer"] for args in passes) >= main_passes
    assert timeline.read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == [trace, timeline]


def test_a_timeline_has_a_line_for_each_stage(folder, tmp_path):
    pytest.importorskip("matplotlib")
    timeline = tmp_path / "t.svg"
    options = ("--model", folder, "--transport", "local", "--stages", 3, "--max-new-tokens", 6, "--ignore-eos")
    assert ppd(*GENERATE, *options, "--timeline", timeline).exit_code == 0
    words = re.findall("<!-- (.*) -->", timeline.read_text())
    heights = re.findall(r"<!-- (stage \d) -->\s*<g [^>]*translate\(\S+ ([\d.]+)\)", timeline.read_text())
    from_the_top = sorted(heights, key=lambda pair: float(pair[1]))
    assert [name for name, _ in from_the_top] == ["stage 1", "stage 2", "stage 3"]
    assert len({height for _, height in heights}) == 3
    assert "first 6 tokens, 4 layers, 3 stages" in words
    assert {"a certain token", "tokens in flight", "head and choice"} <= {*words}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--trace", "missing/t.json"), "missing/t.json: give a file in a folder that exists"),
        (("--timeline", "missing/t.png"), "missing/t.png: give a file in a folder that exists"),
        (("--trace", "."), ".: give a file in a folder that exists"),
        (("--trace", "x.png", "--timeline", "./x.png"), "x.png: is to be written twice; give each its own file"),
        (("--timeline", "t.txt"), "t.txt: no kind of image; choose one of"),
    ],
)
def test_mistaken_files_are_refused_before_anything_starts(options, complaint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert refused(*NOWHERE, *options).startswith(f"ppd: {complaint}")
    assert not list(tmp_path.iterdir())


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or a pipe" in refused(*NOWHERE, "--trace", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written to" in refused(*NOWHERE, "--trace", tmp_path / "t.json")


def test_a_timeline_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(*NOWHERE, "--timeline", tmp_path / "t.png")
    assert line == 'ppd: plots need matplotlib: run pip install ".[plots]" in the project\'s folder\n'
