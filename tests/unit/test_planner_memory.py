"""The planner and memory: what each layout holds on its fullest device, and what is left out where that is too much."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.calibration.model_memory import measured_memory
from ppd_runtime.calibration.staged_plans import rank_stages
from ppd_runtime.config import FORMATS
from ppd_runtime.cost_model.machine_costs import Calibration, read_calibration
from ppd_runtime.cost_model.memory import GB, GivenMemory, Memory
from ppd_runtime.cost_model.planner import rank
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.native.linear import QuantisedLinear
from ppd_runtime.models.native.packing import packed_bytes
from ppd_runtime.models.native.quantising import FORMAT_OF

PARTS = Memory(layer=10, head=4, entry=0.5, tokens=6)
"""A layer holds 10 of weights and 3 of entries."""
RATES = {(6, 3): 0.9, (8, 1): 0.8}
BOUNDARIES = {((6,), 3): (0.9, 0.1), ((2, 6, 9), 3): (0.7, 0.2, 0.05, 0.05)}
SPEEDUPS = {2: 1.2, 4: 1.5}


def ranked(memory, devices=4):
    times = Calibration(0.4, parallel_speedups=SPEEDUPS, memory=memory)
    return rank(12, times, RATES, devices, staged=rank_stages(12, times, BOUNDARIES, devices, [1]))


def test_every_layout_by_hand():
    assert PARTS.ordinary(12) == 12 * 13 + 2 * 4
    assert PARTS.paper(12, 8, 1) == PARTS.paper(12, 6, 3) == PARTS.ordinary(12), "the main process has all of it"
    assert PARTS.stages(12, [2, 6, 9]) == 4 * 13 + 4, "the longest stage, with its boundary's head"
    assert PARTS.stages(12, [5, 10]) == 5 * 13 + 8, "the first stage, with the embedding beside"
    assert PARTS.parallel(12, 4) == 3 * 13 + 8
    tied = replace(PARTS, tied=True)
    assert tied.ordinary(12) == 12 * 13 + 4
    assert tied.stages(12, [5, 10]) == 5 * 13 + 4
    apart = replace(PARTS, embedding=9)
    assert (apart.ordinary(12), apart.stages(12, [5, 10])) == (12 * 13 + 4 + 9, 5 * 13 + 4 + 9)
    assert replace(apart, tied=True).ordinary(12) == tied.ordinary(12)


@given(st.integers(6, 11), st.integers(1, 5))
def test_processes_of_one_host_map_the_weights_once(exit_layer, workers):
    host = replace(PARTS, shared=True)
    entries = (12 + workers * (12 - exit_layer)) * 3
    assert host.paper(12, exit_layer, workers) == 12 * 10 + 8 + entries, "d + k(d − d̄) layers' entries"
    assert host.stages(12, [3, 6]) == host.parallel(12, 2) == host.ordinary(12) == 12 * 13 + 8


def test_where_memory_is_not_known_nothing_is_left_out():
    ranking = ranked(None)
    assert (ranking.cautions, ranking.ordinary.memory_gb, ranking.ordinary.fits) == ((), None, True)
    sized = ranked(PARTS)
    assert sized.cautions == ()
    assert len(sized.plans) == len(ranking.plans)
    assert [row.memory_gb for row in sized.staged] == [56 / GB, (6 * 13 + 8) / GB]
    assert [row.memory_gb for row in sized.parallel] == [(6 * 13 + 8) / GB, (3 * 13 + 8) / GB]


def test_what_does_not_fit_is_left_out_with_a_line():
    ranking = ranked(replace(PARTS, device=60))
    assert ranking.plans == ()
    assert [(row.devices, row.cuts) for row in ranking.staged] == [(4, (2, 6, 9))]
    assert [row.devices for row in ranking.parallel] == [4]
    assert (ranking.ordinary.fits, ranking.gains) == (False, True)
    line = (
        "Too little memory, for a device has 6e-08 GB: ordinary decoding (1.64e-07 GB), the paper's layout "
        "(1.64e-07 GB), 2 stages (8.6e-08 GB), tensor parallelism on 2 devices (8.6e-08 GB)."
    )
    assert ranking.cautions == (line,)
    assert ranking.verdict.startswith("4 stages (cut after layers 2, 6 and 9) with k=3")
    assert ", which does not fit one device" in ranking.verdict
    assert ranking.verdict.endswith(f". {line}")
    assert ranked(replace(PARTS, device=164)).plans != (), "exactly enough"


def test_stages_that_gain_nothing_are_advised_where_nothing_else_fits():
    slow = Calibration(0.4, hop_ms=9, memory=replace(PARTS, device=60))
    ranking = rank(12, slow, RATES, 4, staged=rank_stages(12, slow, BOUNDARIES, 4, [1]))
    assert ranking.staged[0].speedup < 1.05
    assert ranking.gains
    assert "don't" not in ranking.verdict


def test_where_nothing_fits_the_verdict_says_so():
    ranking = ranked(replace(PARTS, device=20))
    assert (ranking.plans, ranking.staged, ranking.parallel, ranking.gains) == ((), (), (), False)
    assert ranking.verdict.startswith("don't: no layout fits the memory. Too little memory, for a device has 2e-08 GB")
    shared = ranked(replace(PARTS, device=20, shared=True))
    assert "for the cores share 2e-08 GB" in shared.verdict


def test_given_memory_takes_the_place_of_what_was_measured():
    measured = replace(PARTS, device=99, shared=True, tied=True)
    assert GivenMemory().over(measured) == measured
    assert GivenMemory(cache_tokens=7).over(measured) == replace(measured, tokens=7)
    found = GivenMemory(memory_gb=2, layer_mb=3, cache_tokens=5).over(measured)
    assert found == Memory(3e6, 4, 0.5, 2e9, tied=True, tokens=5), "a device's, no host's"
    assert GivenMemory(memory_gb=2, layer_mb=3, head_mb=1, entry_kb=4).over(None) == Memory(3e6, 1e6, 4e3, 2e9)
    assert GivenMemory().over(None) is None
    assert GivenMemory(head_mb=1).over(replace(PARTS, embedding=9)) == replace(PARTS, head=1e6), "each of them"


@pytest.mark.parametrize(
    ("given_values", "named"),
    [
        ({"memory_gb": 16}, "memory_gb=16: nothing says how large a layer is; give a layer's size too, or"),
        ({"entry_kb": 2}, "entry_kb=2: nothing says how large a layer is"),
        ({"memory_gb": 0, "layer_mb": 1}, "memory_gb=0: give a number above 0"),
        ({"layer_mb": -1}, "layer_mb=-1: give a finite number of at least 0"),
        ({"layer_mb": 1, "cache_tokens": 0}, "cache_tokens=0: give a whole number of at least 1"),
    ],
)
def test_mistakes(given_values, named):
    with pytest.raises(ValueError) as error:
        GivenMemory(**given_values).over(None)
    assert named in str(error.value)


def test_a_memory_comes_back_from_its_file(tmp_path: Path):
    calibration = Calibration(1, memory=replace(PARTS, device=7, shared=True))
    (tmp_path / "a.json").write_text(json.dumps(asdict(calibration)))
    assert read_calibration(tmp_path / "a.json") == calibration
    (tmp_path / "b.json").write_text(json.dumps({"layer_ms": 1, "memory": {"layer": -1}}))
    with pytest.raises(ValueError, match=r"b\.json: layer=-1"):
        read_calibration(tmp_path / "b.json")


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma2", True)])
def test_a_models_parts_are_measured(model_folder, family, tied):
    with OrdinaryDecoding(str(model_folder(family, num_layers=3)), dtype="float32") as ordinary:
        found, model = measured_memory(ordinary), ordinary.stage.model
    assert (found.tied, found.shared) == (tied, True)
    weights, _ = found.process(3)
    assert weights == sum(tensor.numel() * 4 for tensor in model.parameters())
    config = model.config
    assert found.entry == 2 * 4 * config.num_key_value_heads * config.head_dim
    assert found.device > 1e8


@pytest.mark.parametrize("weights", FORMATS)
def test_weights_of_few_bits_take_what_their_folder_takes(model_folder, tmp_path, weights):
    folder = str(model_folder("llama", tied=True))
    quantise_model(folder, tmp_path / "out", weights)
    decodings = (OrdinaryDecoding(folder, weights=weights), OrdinaryDecoding(tmp_path / "out"))
    found, theirs = map(measured_memory, decodings)
    assert found == theirs
    layer = decodings[0].stage.model.model.layers[0]
    matrices = [(m.out_features, m.in_features) for m in layer.modules() if isinstance(m, QuantisedLinear)]
    norms = 2 * 32 * 4
    assert found.layer == norms + sum(packed_bytes(FORMAT_OF[weights], *shape) for shape in matrices)
    assert (found.head, found.embedding) == (packed_bytes(FORMAT_OF["int8"], 300, 32) + 32 * 4, 300 * 32 * 4)
    assert not found.tied, "the embedding stays in floats"
