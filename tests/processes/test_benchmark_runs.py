"""Each benchmark once, as small as it goes: what they start themselves are processes of their own."""

import datetime
import os

import pytest
from grids import nightly
from seeds import SEED

from benchmarks import __main__ as everything
from benchmarks import decode, faults, forms, hop, layouts, serving, startup
from benchmarks.recording import environment, slug


def figures(module, options):
    """What a benchmark finds; its table can be made of it."""
    before = _scheduling()
    found = module.measure(module.parser().parse_args(options))
    assert _scheduling() == before, "what the tests after it start would run before or beside whatever else there is"
    assert module.table(found).count("\n") >= 2
    return found


def _scheduling():
    """This thread's cores, policy and priority, which all that it starts will have, too."""
    return os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


def test_layouts_on_emulated_devices_with_slow_links():
    """Nothing is guessed right, so a token takes all layers, and of stages a hop to each."""
    asked = ["--layouts", "k=1;speculation=always,stages=2;repetitions=no;speculation=always,threads=2", "--eager"]
    asked += ["--model", "random:64x4", "--limit", "1", "--tokens", "6", "--never-right"]
    found = figures(layouts, [*asked, "--emulate-layer-ms", "5", "--hop-ms", "20"])
    paper, stages, threads = found["rows"]
    assert paper["identical"]
    assert stages["identical"]
    assert min(row["ms"][0] for row in found["rows"]) >= 4 * 5
    assert [(row["match_rate"], row["predicted"]) for row in (paper, stages)] == [(0, pytest.approx(1))] * 2
    assert stages["ms"][1] >= 4 * 5 + 2 * 20
    assert threads["ms"][1] >= 4 * (2.5 + 2 * 0.029)
    assert sum(paper["ledgers_ms"][0].values()) >= 20


@nightly
def test_layouts_with_default_settings():
    found = figures(layouts, ["--model", "random:64x4", "--limit", "2", "--tokens", "8", "--match-rate", "1"])
    assert [row["layout"] for row in found["rows"]] == ["stages=2", "k=1", "k=3"]
    assert all(row["identical"] and len(row["ratios"]) == 2 for row in found["rows"])


@nightly
def test_decode():
    asked = ["--model", "random:64x2", "--tokens", "4", "--rounds", "1", "--limit", "1", "--rows", "2", "--texts", "2"]
    found = figures(decode, asked)
    assert {row["engine"] for row in found["rows"]} == {"ours-eager", "ours-compiled", "transformers"}
    assert all(row["ms"] > 0 < row["share_of_bandwidth"] for row in found["rows"])
    assert [row["weights"] for row in found["quality"]] == ["float32 passes", "bfloat16 passes", "int8", "int4"]


@nightly
def test_hop():
    rows = figures(hop, ["--sizes", "1024,200000", "--pauses-ms", "1", "--count", "10"])["rows"]
    assert [(row["transport"], row["num_bytes"]) for row in rows] == [
        (transport, size) for transport in ("unix", "ring", "zeromq", "collective") for size in (1024, 200000)
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] and row["sender_us"] > 0 for row in rows)


@nightly
def test_forms():
    found = figures(forms, ["--model", "demo", "--rounds", "1", "--tokens", "12"])
    assert [len(row["pairs"]) for row in found["rows"]] == [1, 1]
    assert all(row["mask_us"] > 0 and row["tokens"] == 12 for row in found["rows"])


def test_startup():
    found = figures(startup, ["--rounds", "1", "--only", "help; k=1, threads", "--prompt-tokens", "300"])
    assert [len(row["seconds"]) for row in found["rows"]] == [2, 2]
    assert len(found["long"]) == 1


@nightly
@pytest.mark.parametrize(
    "asked",
    [
        ["--kill-every-s", "1", "--requests", "24", "--at-once", "6"],
        ["--kill-every-s", "5", "--minutes", "2", "--at-once", "12", "--stages", "4"],
    ],
)
def test_a_server_gives_every_client_its_own_text_or_an_honest_error(asked):
    asked += ["--model", "random:64x4", "--limit", "4", "--tokens", "12", "--bad-share", "0.2", "--leave-share", "0.2"]
    found = figures(serving, [*asked, "--seed", str(SEED)])
    print(serving.table(found))
    assert found["wrong"] == []
    (row,) = found["rows"]
    assert min(row["outcomes"][name] for name in ("right", "bad, refused", "client left")) >= 1


@nightly
@pytest.mark.parametrize("layout", ["k=2", "stages=3;rows=4"])
def test_every_text_is_ordinary_decodings_while_workers_are_killed_and_stopped(layout):
    wanted = int(os.environ.get("PPD_FAULTS", "2"))
    asked = ["--model", "random:64x4", "--layouts", layout, "--faults", str(wanted), "--seed", str(SEED)]
    found = figures(faults, [*asked, "--requests", "4", "--tokens", "20", "--every-s", "1", "--stop-share", "0.3"])
    print(faults.table(found))
    assert not faults.is_wrong(found)
    (row,) = found["rows"]
    assert row["killed"] + row["stopped"] >= wanted


COMMAND = "startup --rounds 1 --only tradeoff --prompt-tokens 0"


def test_a_report_tells_of_failures_and_leaves_the_good_one_alone(tmp_path, monkeypatch, capsys):
    earlier = tmp_path / f"{slug(environment())}.md"
    earlier.write_text("an earlier run's")
    outcome, good = everything._outcome, ("| command |\n| --- |\n| tradeoff | ", False)
    monkeypatch.setattr(everything, "_outcome", lambda command: good if command == COMMAND else outcome(command))
    monkeypatch.setattr(everything, "PLAN", (("Start-up", COMMAND), ("Nonsense", "startup --only dask")))
    monkeypatch.setattr("sys.argv", ["benchmarks", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        everything.main()
    assert ended.value.code == 1
    path = earlier.with_name(f"{earlier.stem}-failed.md")
    assert set(tmp_path.iterdir()) == {earlier, path}
    assert earlier.read_text() == "an earlier run's"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    assert f"## Start-up\n\n```\npython -m benchmarks.{COMMAND}  # " in text
    assert text.count("| tradeoff | ") == 1
    assert "FAILED with exit code 2: startup.py: error: argument --only: dask: choose from " in text
    assert "1 of 2 failed" in text
    assert f"{datetime.date.today()}, commit " in text
