"""Each benchmark once, as small as it goes, in this process: what they start themselves are processes of their own.

`decode` is in test_compiled_runtime.py, which has compiled a model.
"""

import datetime
import os

import pytest
from compilers import needs_compiler
from grids import nightly
from seeds import SEED

from benchmarks import __main__ as everything
from benchmarks import (
    contention,
    endurance,
    equal_devices,
    first_token,
    hop,
    pass_ledger,
    passes,
    pipeline,
    recovery,
    siblings,
    stages,
    startup,
    tracing,
)
from benchmarks.recording import environment, slug
from ppd_runtime.host import available_cores


def figures(module, options):
    """What a benchmark finds; its table can be made of it."""
    before = _scheduling()
    found = module.measure(module.parser().parse_args(options.split()))
    assert _scheduling() == before, "what the tests after it start would run before or beside whatever else there is"
    assert module.table(found).count("\n") >= 2
    return found


def _scheduling():
    """This thread's cores, policy and priority, which all that it starts will have, too."""
    return os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=nightly)])
def test_pipeline(launcher, request):
    if launcher == "ray":
        request.getfixturevalue("ray_node")
    options = "--model random:64x4 --match-rate 1 --tokens 6 --rounds 1 --emulate-layer-ms 5"
    found = figures(pipeline, f"{options} --launcher {launcher}")
    assert found["identical"]
    assert found["emulated_layer_ms"] == 5
    assert sum(found["ledger_ms"]["ordinary"].values()) >= 20
    assert found["autoregressive_ms"] >= 20
    assert found["launcher"] == launcher
    assert {"ppd_ms", "ratio", "predicted_ratio", "realised_saving", "match_rate", "k"} <= set(found)


def test_first_token():
    found = figures(first_token, "--model random:64x4 --tokens 700 --rounds 1")
    assert found["identical"]
    assert (found["chunks"], found["least_ratio"]) == (4, 5 / 8)
    assert len({row["before"] for row in found["rows"]}) == 2
    assert all(row["ratio"] > 0 and len(row["ordinary_ms"]) == 1 for row in found["rows"])
    assert len(found["slowdown_at_once"]) == 2


@nightly
def test_hop():
    rows = figures(hop, "--sizes 1024,200000 --pauses-ms 1 --count 10")["rows"]
    assert [(row["transport"], row["num_bytes"]) for row in rows] == [
        (transport, size) for transport in ("unix", "zeromq", "collective") for size in (1024, 200000)
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] and row["sender_us"] > 0 for row in rows)


@nightly
def test_equal_devices():
    rows = figures(equal_devices, "--model random:64x4 --match-rate 0.5 --tokens 6 --rounds 1")["rows"]
    assert [row["way"] for row in rows] == ["1 device, ordinary", "tensor parallel", "PPD", "stages"]
    assert all(row["identical"] for row in rows if row["way"] != "tensor parallel")
    assert all(len(row["tokens_per_second"]) == 3 for row in rows)


@nightly
def test_equal_devices_that_are_emulated():
    found = figures(equal_devices, "--model random:64x4 --devices 4 --tokens 6 --rounds 1 --emulate-layer-ms 20")
    one, parallel, *pipelined = found["rows"]
    assert max(one["tokens_per_second"]) <= 1 / (4 * 0.020)
    assert max(parallel["tokens_per_second"]) <= 1 / (4 * (0.005 + 2 * 0.000029))
    assert all(row["identical"] for row in (one, parallel, *pipelined))
    assert [row["devices"] for row in found["rows"]] == [1, 4, 4, 4]


@nightly
def test_stages_on_slow_links_that_nobody_foresees():
    """Nothing is guessed, so every token takes all layers and a hop to each stage."""
    options = "--model random:64x4 --stages 2 --tokens 6 --limit 1 --rounds 1 --emulate-layer-ms 5 --hop-ms 20"
    found = figures(stages, f"{options} --match-rate 0 --no-repetitions")
    assert found["identical"]
    assert found["first_boundary"] == [0, 5]
    assert (found["emulated_layer_ms"], found["hop_ms"], found["beside"], found["contention"]) == (5, 20, [], None)
    assert found["bound"] == 1
    assert found["realised_saving"] is None
    assert found["staged_ms"] >= 4 * 5 + 2 * 20


@nightly
@pytest.mark.skipif(available_cores() < 2, reason="contention is between two cores")
def test_stages_beside_other_ways_of_using_two_cores():
    options = "--model random:64x4 --stages 2 --k 1 --tokens 6 --limit 1 --rounds 1 --beside --contention"
    found = figures(stages, options)
    assert [way["way"] for way in found["beside"]] == ["2 threads", "PPD, k=1", "PPD, k=3 on 1 sub-process"]
    assert all(way["identical"] for way in found["beside"])
    assert found["contention"]["match_rate"] == found["first_boundary"][0] / 5


@nightly
def test_startup():
    rows = figures(startup, "--rounds 1 --layouts threads-1")["rows"]
    assert [row["state"] for row in rows] == ["cold", "warm"]
    for row in rows:
        seconds = {name: values[0] for name, values in row["seconds"].items()}
        parts = [seconds.pop(part) for part in ("description", "tokenizer", "weights")]
        assert sum(seconds.values()) == pytest.approx(2 * seconds["whole"])
        assert 0 < sum(parts) < seconds["settings"] + seconds["workers"]


COMMAND = "startup --rounds 1 --layouts 'ppd tradeoff'"


def test_a_report_tells_of_failures_and_leaves_the_good_one_alone(tmp_path, monkeypatch, capsys):
    earlier = tmp_path / f"{slug(environment())}.md"
    earlier.write_text("an earlier run's")
    monkeypatch.setattr(everything, "PLAN", (("Start-up", COMMAND), ("Nonsense", "startup --layouts dask")))
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
    assert text.count("| ppd tradeoff | warm |") == 1
    assert "FAILED with exit code 2: startup.py: --layouts dask: choose from " in text
    assert "1 of 2 failed" in text
    assert f"{datetime.date.today()}, commit " in text


def test_siblings():
    found = figures(siblings, "--model random:64x4 --dtype float32 --limit 2 --tokens 8 --prompt-tokens 20")
    assert (found["k"], found["workers"], found["texts"], found["tokens"]) == (3, 1, 2, 16)
    assert (found["identical_texts"], found["identical_tokens"], found["rate"]) == (2, 16, 1.0)


@nightly
@pytest.mark.skipif(available_cores() < 2, reason="contention is between two cores")
def test_contention():
    found = figures(contention, "--model random:64x3 --dtype float32 --seconds 0.2 --rounds 1 --match-rate 1")
    assert found["exit_layer"] == 2
    products = ["main: layers 2 to 3", "sub: layers 1 to 1", "main: layers 1 to 3"]
    assert [row["products"] for row in found["rows"]] == products
    assert [row["megabytes"] for row in found["rows"]] == [
        pytest.approx(found["rows"][1]["megabytes"] * n) for n in (2, 1, 3)
    ]
    slower = max(found["rows"][0]["beside_ms"][0], found["rows"][1]["beside_ms"][0])
    assert found["bounds"]["rows"][0]["ratio"] == [pytest.approx(slower / found["rows"][2]["alone_ms"][0])]
    assert found["bounds"]["theorem"] == pytest.approx(2 / 3)


@nightly
@needs_compiler
def test_passes():
    found = figures(passes, "--model random:64x2 --tokens 1,3 --position 70 --rounds 1")
    assert [row["tokens"] for row in found["rows"]] == [1, 3]
    assert all(row["same_bits"] for row in found["rows"])
    for row in found["rows"]:
        assert row["us"]["our own, bfloat16"] > 0
        assert 0 < row["us"]["PyTorch's products"] < 1e6
    packed = figures(passes, "--model random:64x2 --weights int4 --tokens 1,3 --position 70 --rounds 1")
    assert [set(row["us"]) for row in packed["rows"]] == [{"our own", "a pass"}] * 2
    assert all(row["same_bits"] for row in packed["rows"])


@nightly
@needs_compiler
@pytest.mark.parametrize("weights", ["", "--weights int8"])
def test_pass_ledger(weights):
    found = figures(pass_ledger, f"--model random:64x2 --rounds 3 --position 70 {weights}")
    parts = [found["us"][name] for name in (*pass_ledger.PARTS, "attention", "the rest of the layers")]
    assert sum(parts) == pytest.approx(found["us"]["layers"])
    per_weight = 8.5 / 8 if weights else 2
    assert found["bytes"]["attention's output"] == 2 * 64 * 64 * per_weight


def test_tracing():
    found = figures(tracing, "--model random:64x3 --dtype float32 --tokens 4 --rounds 2")
    assert {way: len(times) for way, times in found["ms_a_token"].items()} == dict.fromkeys(tracing.WAYS, 2)
    assert found["identical"]
    assert found["spans_a_token"] == 3
    assert all(spent > 0 for spent in found["calls_us_a_token"].values())


@nightly
def test_endurance():
    faults = int(os.environ.get("PPD_FAULTS", "2"))
    options = f"--model random:64x4 --k 2 --requests 12 --tokens 20 --fault-every-s 2 --faults {faults} --seed {SEED}"
    found = figures(endurance, f"{options} --stop-share 0.5")  # which prints its seed
    print(found)
    assert found["texts equal"] == found["requests"] >= 12
    assert found["tokens"] == 20 * found["requests"]
    assert found["killed"] + found["stopped"] >= faults
    assert found["left"] == {"processes": 0, "temporary files": 0, "in /dev/shm": 0}
    for name in ("open files", "threads"):
        first, _, last, _ = found["held"][name]
        assert last <= first + 3, f"{name}: a socket and two pipes may be on their way"
    assert found["lives"]["main process"][0][1][0] >= 1, "no main process was looked at"


@nightly
def test_recovery():
    found = figures(recovery, "--rounds 1 --tokens 300")
    assert found["texts equal"] == found["texts"] == 1
