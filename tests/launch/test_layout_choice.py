"""Cuts, rows and candidates that are not given: chosen by measured times, which here are made up."""

import json
from itertools import combinations, pairwise

import pytest
import torch
from machine_network import MachineNetwork
from pipeline_runs import Bench, begin_message

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch.layout_choice import StageCosts, balanced_cuts, choose_layout, chosen_rows
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import even_cuts
from ppd_runtime.settings.layouts import StagedLayout


def test_stages_with_heads_alike_are_even():
    for layers in range(4, 40):
        for stages in range(2, 5):
            for head in (0.0, 0.25, 3.0):
                assert balanced_cuts(layers, stages, StageCosts(head, head, 0.0)) == even_cuts(layers, stages)


@pytest.mark.parametrize("heads", [(0.0, 3.0), (0.25, 3.0), (2.5, 0.0), (0.0, 40.0), (0.0, 0.25), (1.0, 2.0)])
@pytest.mark.parametrize(("layers", "stages"), [(12, 2), (12, 3), (14, 4)])
def test_the_longest_stage_takes_least(layers, stages, heads):
    def longest(cuts):
        ends = [0, *cuts, layers]
        return max(b - a + heads[b == layers] for a, b in pairwise(ends))

    found, even = balanced_cuts(layers, stages, StageCosts(*heads, 0.0)), even_cuts(layers, stages)
    best = min(map(longest, combinations(range(1, layers), stages - 1)))
    assert longest(found) == best or (found == even and best > 0.95 * longest(even))


def test_cuts_that_are_not_even():
    assert balanced_cuts(32, 4, StageCosts(0.0, 3.0, 0.0)) == (9, 18, 27)
    assert balanced_cuts(12, 2, StageCosts(0.0, 0.25, 0.0)) == (6,)


def test_rows_by_what_they_cost():
    assert [chosen_rows(StageCosts(0, 0, row)) for row in (0.0, 0.05, 0.2, 0.5, 0.55, 1.0)] == [16, 8, 6, 3, 1, 1]


def test_what_is_given_is_obeyed_and_the_rest_is_chosen():
    costs = StageCosts(0.0, 3.0, 0.1)
    assert choose_layout(12, 2, costs) == StagedLayout((8,), 8, 5, 0.1)
    assert choose_layout(12, 2, costs, (6,), 2, 1) == StagedLayout((6,), 2, 1, 0.1)
    assert choose_layout(12, 2, costs, rows=1) == StagedLayout((8,), 1, 3, 0.1)
    assert choose_layout(12, 2, None) == StagedLayout((6,), 1, 3, 0.0)
    assert choose_layout(12, 2, costs, most_k=2).k == 2
    assert choose_layout(12, 2, StageCosts(0.0, 3.0, 0.0)) == StagedLayout((8,), 16, 8, 0.0)


def test_noise_changes_nothing():
    assert StageCosts.rounded(0.52, 2.9, 0.048) == StageCosts.rounded(0.45, 3.1, 0.052) == StageCosts(0.5, 3.0, 0.05)
    assert StageCosts.rounded(0.0, 0.0, -0.2).row == 0
    assert StageCosts.rounded(0.0, 0.0, 6.0).row == 1


def test_a_further_row_has_to_promise_what_it_costs(model_folder):
    bench = Bench.of(model_folder("llama"))
    begin = begin_message([1, 2, 3], SamplingParams(max_new_tokens=8))
    for row_cost, tokens in ((0.0, [5, 6, 7]), (0.25, [5, 6]), (0.95, [5])):
        stage = TreeRange(bench.stage(2), 8)
        first = FirstStage(stage, None, 2, 3, 4, MachineNetwork(None).send, begin, row_cost=row_cost)
        first._begin_attempt()
        first.chooser.name(first.tree.prompt, 1, [(5, 0.6), (6, 0.3), (7, 0.1)])
        assert [node.token for node in first.chooser.choose(first.rows)] == tokens


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that findings of this test are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ppd_runtime"


def _found(cache, **numbers):
    """Change the only finding."""
    (path,) = cache.glob("stages-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | numbers))


def _layout(folder, **settings):
    with PPDRuntime(folder, transport="local", dtype="float32", **settings) as runtime:
        return runtime.generate("word1 word2", max_new_tokens=12, ignore_eos=True)


def test_a_runtime_measures_once_and_chooses_by_what_was_found(cache, model_folder):
    folder = model_folder("llama", num_layers=6)
    threads = torch.get_num_threads()
    expected = OrdinaryDecoding(folder).generate("word1 word2", max_new_tokens=12, ignore_eos=True).token_ids
    assert _layout(folder, stages=2).token_ids == expected
    assert torch.get_num_threads() == threads
    _found(cache, guess_head=0.0, head=2.1, row=0.24)
    result = _layout(folder, stages=2, trace=True)
    assert result.token_ids == expected
    assert result.stats.layout == StagedLayout((4,), 5, 5, 0.25)
    assert result.trace.layout == StagedLayout((4,), 5, 5, 0.25)
    assert result.to_dict()["stats"]["layout"] == {
        "cuts": [4],
        "rows": 5,
        "k": 5,
        "row_cost": 0.25,
        "guess_vocab": None,
        "repetitions": True,
        "drafts": False,
    }
    assert _layout(folder, stages=2, rows=2).stats.layout == StagedLayout((4,), 2, 3, 0.25)
    assert _layout(folder, cuts="2", rows=2, k=1).stats.layout == StagedLayout((2,), 2, 1, 0.25)
    assert len(list(cache.glob("stages-*.json"))) == 1


def test_where_nothing_can_be_kept_cuts_are_even(tmp_path, monkeypatch, model_folder, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _layout(model_folder("llama"), stages=2).stats.layout == StagedLayout((2,), 1, 3)
    assert "even cuts, and passes of one row" in caplog.text


def test_emulated_devices_are_measured(cache, model_folder):
    folder, device = model_folder("llama", num_layers=6), EmulatedDevice(3.0, head_ms=6.0, row_cost=0.2)
    layout = _layout(folder, stages=2, emulate=device).stats.layout
    assert (layout.cuts, layout.rows > 1) == ((3,), True)
    assert 0.1 < layout.row_cost < 0.5, (
        "the emulated device's 0.2, but for what else this machine does; its own is near 1"
    )
    assert len(list(cache.glob("stages-*.json"))) == 1
