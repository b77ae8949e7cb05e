"""`benchmarks.peers` and `servers`: the same tokens in processes of their own, and words for what is not measured."""

from importlib.util import find_spec

import pytest
from grids import nightly
from smollm2 import needs_smollm2

from benchmarks import peers, servers
from benchmarks.engines import EngineProcess, Task
from ppd_runtime.models.checkpoint.hub import DEMO
from ppd_runtime.tune.compare import CannotDecodeError


def measured(options):
    found = peers.measure(peers.parser().parse_args(options.split()))
    assert peers.table(found).count("\n") == len(found["rows"]) + 1
    return found["rows"]


@nightly
def test_transformers_has_a_time_and_what_is_not_installed_a_reason():
    rows = measured("--model random:64x2 --threads 1 --tokens 4 --rounds 1 --limit 1 --engines transformers,llama.cpp")
    (library, *missing) = rows
    assert library["ms"] > 0 < library["floor_ms"]
    assert [row["weights"] for row in missing] == ["bfloat16", "int8", "int4"]
    if find_spec("llama_cpp") is None:
        assert {row["reason"] for row in missing} == {
            "ValueError: llama.cpp is not installed: run pip install '.[peers]' in the project's folder"
        }


@nightly
def test_an_engine_that_cannot_open_a_model_says_why(tmp_path):
    engine = EngineProcess(Task("ours-eager", "float32", 1, str(tmp_path / "none"), str(tmp_path), 8))
    with pytest.raises(CannotDecodeError, match="none"):
        engine.generate([1], 2)


@nightly
def test_llama_cpp_gives_our_tokens():
    if find_spec("llama_cpp") is None:
        pytest.skip("llama.cpp is not installed: pip install -e '.[peers]'")
    rows = measured(f"--model {DEMO} --threads 1 --tokens 12 --rounds 1 --limit 1 --engines ours-eager,llama.cpp")
    assert not [row["reason"] for row in rows if row["reason"]]
    starts = [row["equal_start"] for row in rows if "equal_start" in row]
    assert len(starts) > 3
    assert min(starts[:3]) == 1
    assert max(starts[3:]) == 1


@nightly
@needs_smollm2
def test_a_servers_texts_are_the_same_with_others_at_once():
    options = "--engines ours-threads,ours-stages,llama.cpp --at-once 1,3 --tokens 6 --rounds 1 --requests 3"
    found = servers.measure(servers.parser().parse_args(options.split()))
    rows = [row for row in found["rows"] if row["server"] != "llama.cpp"]
    assert len(rows) == 2 * 2 * 2
    assert {row["right"] for row in rows} == {"3 of 3"}
    assert min(min(row["tokens_per_second"]) for row in rows) > 0
    assert servers.table(found).count("| ours-stages |") == 4
    if find_spec("llama_cpp") is None:
        assert "No module named" in found["left_out"]["llama.cpp"]
