"""The planner's arithmetic: beside Theorem 4.1, beside the simulated machines, and what it says to people."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from grids import nightly
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_runtime.calibration.simulate import Setting, draw_winners, simulate
from ppd_runtime.calibration.simulated_cluster import VirtualNetwork
from ppd_runtime.cost_model import theory
from ppd_runtime.cost_model.machine_costs import Calibration, StagesAtWork, read_calibration
from ppd_runtime.cost_model.planner import ahead_time, compute_per_token, ordinary_ms, plan, rank, token_time
from ppd_runtime.cost_model.run_ahead_model import BATCH, chances, entry_messages
from ppd_runtime.pipeline.messages import CLIENT, Entries, Message
from ppd_runtime.pipeline.paper import run_ahead

RATES = {(exit_layer, k): 0.6 + 0.05 * k for exit_layer in (6, 8, 11) for k in (1, 3, 5)}
LAYERS_ONLY = Calibration(layer_ms=0.4)
times = st.floats(0, 5)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, float]:
    num_layers = draw(st.integers(2, 40))
    return num_layers, draw(st.integers((num_layers + 1) // 2, num_layers - 1)), draw(st.floats(0, 1))


@given(layouts(), st.integers(1, 5))
def test_without_overheads_it_is_theorem_4_1(layout: tuple[int, int, float], k: int) -> None:
    num_layers, exit_layer, p = layout
    row = plan(num_layers, exit_layer, k, p, Calibration(layer_ms=1.0))
    assert row.ms_per_token == pytest.approx(theory.expected_latency(num_layers, exit_layer, p, 10**9) / 10**9)
    assert row.speedup == pytest.approx(row.ideal_speedup)


@given(layouts(), times, times, times)
def test_with_hops_and_heads_it_is_the_theorys_hit_and_miss(
    layout: tuple[int, int, float], head: float, exit_head: float, hop: float
) -> None:
    num_layers, exit_layer, p = layout
    calibration = Calibration(layer_ms=1.5, head_ms=head, exit_head_ms=exit_head, hop_ms=hop)
    known = theory.Times(1.5, head, exit_head, hop)
    miss = theory.miss_time(num_layers, known)
    hit = min(theory.hit_time(num_layers, exit_layer, known), miss)  # a start that comes later is not waited for
    expected = p * hit + (1 - p) * miss
    assert token_time(num_layers, exit_layer, 1, p, calibration).total == pytest.approx(expected)


def test_every_overhead_by_hand() -> None:
    calibration = Calibration(10, 4, 5, 3, pass_ms=2, message_ms=0.5, export_ms=1, import_ms=6, contention=1.2)
    deep = token_time(4, 3, 1, 0.5, calibration)
    assert (deep.layers, deep.head, deep.passes, deep.messages) == (35, 4, 4, 2)
    assert deep.contention == pytest.approx(
        (0.5 * 1 + 0.5 * 2) * 10 * 0.2
    )  # a hit runs one layer beside work, a miss two
    assert deep.entries == 0.5 * 0.5 * 6
    assert deep.waiting == 0.5 * (2 * 3 + 5 + 0.5 - 4 - 2 * 0.5)
    half = token_time(4, 2, 1, 0.5, calibration)
    assert half.passes == 0.5 * 2 + 0.5 * 4  # a hit begins after the exit layer
    assert half.waiting == 0.5 * (6.5 + 0.5 * (1 + 0.5))
    assert half.total == pytest.approx(sum((30, 4, 6, 3, 1.75, half.waiting, half.entries)))


@pytest.mark.parametrize("p", [*(pytest.param(p, marks=nightly) for p in (0.0, 0.05, 0.3, 0.85)), 0.6, 0.97, 1.0])
@pytest.mark.parametrize(
    ("num_layers", "head", "exit_head", "hop"),
    [(12, 1, 1, 0.1), (12, 1, 1.3, 0.1), (12, 1, 0.5, 1), (12, 1, 0, 3), (40, 1, 2, 1)],
)
def test_running_ahead_takes_what_the_machines_take(
    num_layers: int, head: float, exit_head: float, hop: float, p: float
) -> None:
    """Token by token over one pattern: waits after hits and misses, what comes too late, useless passes."""
    winners = [int(chance < p) for chance in chances()]
    setting = Setting(num_layers, num_layers // 2, 1, 1 + len(winners), theory.Times(1.0, head, exit_head, hop))
    run, realised = simulate(setting, winners), sum(winners) / len(winners)
    predicted = plan(num_layers, num_layers // 2, 1, p, Calibration(1.0, head, exit_head, hop))
    assert predicted.runs_ahead
    saved = (p - realised) * num_layers / 2
    assert run.time_per_token == pytest.approx(predicted.ms_per_token + saved, rel=0.01)
    passes = run.layer_passes + sum(run.sub_coherence_layer_passes) + run.main_recomputed_layer_passes
    assert passes / (num_layers * setting.num_new_tokens) == pytest.approx(predicted.compute_per_token, rel=0.01)


def test_running_ahead_over_other_patterns_takes_as_long() -> None:
    for p in (0.5, 0.7, 0.9):
        setting = Setting(12, 6, 1, 8000, theory.Times(1.0, 1.0, 1.2, 0.2))
        winners = draw_winners(setting, p, random.Random(3))
        predicted = plan(12, 6, 1, sum(winners) / len(winners), Calibration(1.0, 1.0, 1.2, 0.2))
        assert simulate(setting, winners).time_per_token == pytest.approx(predicted.ms_per_token, rel=0.01)


def test_the_machines_numbers_are_the_plans() -> None:
    assert (run_ahead._MOST_OWED, run_ahead._MOST_AHEAD) == (BATCH, 2)


@pytest.mark.parametrize(("p", "exit_head"), [(0.3, 1.2), (0.7, 0.8), (0.95, 1.2), (1.0, 1.0)])
def test_messages_of_running_ahead_are_those_of_the_machines(
    monkeypatch: pytest.MonkeyPatch, p: float, exit_head: float
) -> None:
    """What the main process sends and takes in, counted; the client's messages are everyone's."""
    counted = Counter[type[Message]]()
    send = VirtualNetwork.send

    def counting(network: VirtualNetwork, sender: int, addresses: Sequence[int], message: Message) -> None:
        counted[type(message)] += sum(address != CLIENT for address in addresses)
        send(network, sender, addresses, message)

    monkeypatch.setattr(VirtualNetwork, "send", counting)
    setting = Setting(12, 6, 1, 2000, theory.Times(1.0, 1.0, exit_head, 0.05))
    winners = draw_winners(setting, p, random.Random(3))
    simulate(setting, winners)
    realised = sum(winners) / len(winners)
    time, _ = ahead_time(12, realised, Calibration(1.0, 1.0, exit_head, 0.05, message_ms=1e-9))
    assert counted.total() / 2000 == pytest.approx(time.messages / 1e-9, rel=0.02)
    assert counted[Entries] / 2000 == pytest.approx(entry_messages(realised), rel=0.05)


def test_hits_of_running_ahead_wait_for_no_hop() -> None:
    calibration = Calibration(1.0, 1.0, 1.0, 1.5)
    assert plan(12, 6, 1, 1.0, calibration).ms_per_token == pytest.approx(7)
    assert plan(12, 6, 1, 1.0, calibration, run_ahead=False).ms_per_token == pytest.approx(7 + 2 * 1.5)
    assert [plan(12, *layout, 1.0, calibration).runs_ahead for layout in ((6, 1), (7, 1), (6, 2))] == [
        True,
        False,
        False,
    ]
    assert not plan(13, 7, 1, 1.0, calibration).runs_ahead


def test_the_verdict_says_whether_it_runs_ahead() -> None:
    rankings = [rank(12, LAYERS_ONLY, {(6, 1): 0.9}, 2, run_ahead=run_ahead) for run_ahead in (True, False)]
    assert ["with k=1 on 2 devices, running ahead:" in ranking.verdict for ranking in rankings] == [True, False]
    assert [ranking.run_ahead for ranking in rankings] == [row.plans[0].runs_ahead for row in rankings] == [True, False]


def test_layers_that_stay_in_caches_are_faster_in_hits() -> None:
    calibration = Calibration(10, half_factor=0.8)
    assert token_time(4, 2, 1, 0.5, calibration).layers == pytest.approx(0.5 * 2 * 8 + 0.5 * 40)
    assert token_time(4, 3, 1, 1.0, calibration).layers == pytest.approx(3 * 9)  # a quarter fewer layers: half as much


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("exit_layer", "p", "width"), [(6, 0.8, 1.0), (6, 0.8, 1.2), (6, 0.95, 1.4), (8, 0.6, 1.5)])
def test_fewer_workers_take_what_the_machines_take(exit_layer: int, p: float, width: float, workers: int) -> None:
    """Passes over several candidates make hits wait, and begin late after misses."""
    known = Calibration(1.0, 1.0, 1.0, 0.05, widths={4: width, 2: 1 + (width - 1) / 3})
    mean_width = known.width(4 // workers)
    setting = Setting(12, exit_layer, 4, 1500, theory.Times(1.0, 1.0, 1.0, 0.05, mean_width), workers=workers)
    winners = draw_winners(setting, p, random.Random(2))
    run, realised = simulate(setting, winners), sum(winner > 0 for winner in winners) / len(winners)
    predicted = plan(12, exit_layer, 4, realised, known, workers)
    assert (predicted.workers, predicted.devices) == (workers, workers + 1)
    assert run.time_per_token == pytest.approx(predicted.ms_per_token, rel=0.015)


def test_a_width_beside_or_between_those_measured() -> None:
    known = Calibration(1.0, widths={4: 1.4, 2: 1.1})
    assert [known.width(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1, 1.1, 1.25, 1.4, 1.7])
    assert Calibration(1.0).width(3) == 1
    assert Calibration(1.0, widths={2: 1.3, 4: 1.0}).width(6) == 1


def test_fewer_workers_are_ranked_where_their_passes_are_known() -> None:
    unknown, known = (rank(12, replace(LAYERS_ONLY, widths=widths), RATES, 2) for widths in ({}, {3: 1.05, 5: 1.1}))
    assert {(row.k, row.workers) for row in unknown.plans} == {(1, 1)}
    assert {(row.k, row.workers) for row in known.plans} == {(1, 1), (3, 1), (5, 1)}
    assert "with k=5, workers=1 on 2 devices" in known.verdict
    slow = rank(12, replace(LAYERS_ONLY, widths={3: 2.0, 5: 3.0}), RATES, 2)
    assert (slow.plans[0].k, slow.plans[0].exit_layer) == (1, 6)
    asked = rank(12, replace(LAYERS_ONLY, widths={3: 1.05}), RATES, 4, workers=[2])
    assert {(row.k, row.workers) for row in asked.plans} == {(3, 2), (5, 2)}


@pytest.mark.parametrize(("exit_layer", "k", "p"), [(6, 1, 0.7), (9, 3, 0.4), (6, 3, 0.3), (8, 2, 1.0)])
def test_compute_is_what_the_machines_run(exit_layer: int, k: int, p: float) -> None:
    setting = Setting(12, exit_layer, k, 2000)
    winners = draw_winners(setting, p, random.Random(1))
    run = simulate(setting, winners)
    passes = run.layer_passes + sum(run.sub_coherence_layer_passes) + run.main_recomputed_layer_passes
    realised = run.hits / len(winners)
    assert passes / (12 * 2000) == pytest.approx(compute_per_token(12, exit_layer, k, realised), rel=2e-3)


@given(st.lists(st.tuples(st.integers(6, 11), st.integers(1, 5), st.floats(0, 1)), min_size=1), st.integers(1, 6))
@settings(max_examples=50)
def test_the_ranking_is_sorted_and_fits(rows: list[tuple[int, int, float]], devices: int) -> None:
    rates = {(exit_layer, k): rate for exit_layer, k, rate in rows}
    ranking = rank(12, replace(LAYERS_ONLY, hop_ms=0.3), rates, devices)
    assert {(row.exit_layer, row.k) for row in ranking.plans} == {setting for setting in rates if setting[1] < devices}
    assert list(ranking.plans) == sorted(ranking.plans, key=lambda row: row.ms_per_token)
    assert ranking.gains == any(row.speedup >= 1.05 for row in ranking.plans)
    assert ranking.verdict.startswith("don't") != ranking.gains


def test_more_devices_than_one_are_named() -> None:
    ranking = rank(12, LAYERS_ONLY, RATES, 1)
    assert ranking.plans == ranking.parallel == ()
    assert ranking.verdict == "don't: a main process and its sub-processes need at least 2 devices, the limit is 1"


def test_low_match_rates_are_the_reason() -> None:
    verdict = rank(12, LAYERS_ONLY, {(6, 1): 0.05}, 2, efficiency=0.5).verdict
    assert "reaches 1.03 times ordinary decoding's speed, less than 1.05" in verdict
    assert "a match rate of 0.05 allows 1.03 times at the most, even if messages cost nothing" in verdict
    assert "tensor parallelism" not in verdict


@pytest.mark.parametrize(
    ("overhead", "words"),
    [
        (
            {"hop_ms": 2.0},
            "but waiting for early starts (a hop takes 2 ms) costs 1.56 ms a token beside 0.4 ms a layer",
        ),
        ({"message_ms": 0.5}, "sending and taking in messages (0.5 ms each)"),
        ({"contention": 2.0}, "the devices slowing each other down (100%)"),
        ({"pass_ms": 9.0}, "running the layers in two parts"),
    ],
)
def test_the_dearest_overhead_is_the_reason(overhead: dict[str, float], words: str) -> None:
    ranking = rank(12, replace(LAYERS_ONLY, **overhead), {(6, 1): 0.65}, 2, run_ahead=False)
    assert not ranking.gains
    assert "the match rate of 0.65 would allow 1.48 times, but" in ranking.verdict
    assert words in ranking.verdict


def test_tensor_parallelism_is_named_where_it_is_faster() -> None:
    known = replace(LAYERS_ONLY, parallel_speedups={2: 1.25, 3: 3.0, 7: 6.5})
    faster = rank(12, known, RATES, 6)
    assert faster.plans[0].devices == 6
    assert "tensor parallelism on 3 devices is faster: 1.6 ms a token, 3.00 times (measured)" in faster.verdict
    assert [(row.devices, row.speedup) for row in faster.parallel] == [(2, 1.25), (3, 3.0)]
    slower = rank(12, known, {(6, 1): 0.9}, 2)
    assert "tensor parallelism" not in slower.verdict
    assert slower.footnotes == ()
    given_one = rank(12, LAYERS_ONLY, {(6, 1): 0.9}, 2, efficiency=0.9).parallel[0]
    assert (given_one.speedup, given_one.source) == (1.8, "efficiency given")


@given(st.dictionaries(st.integers(2, 8), st.floats(0.01, 16)), st.integers(1, 8))
def test_figures_of_other_hardware_are_never_ranked(measured: dict[int, float], devices: int) -> None:
    ranking = rank(12, replace(LAYERS_ONLY, parallel_speedups=measured), RATES, devices)
    assert {row.devices: row.speedup for row in ranking.parallel} == {n: s for n, s in measured.items() if n <= devices}
    assert all(word not in ranking.verdict for word in ("published", "gpt-fast", "A100"))


def test_figures_of_other_hardware_are_a_footnote() -> None:
    nothing = rank(12, LAYERS_ONLY, RATES, 4)
    some = rank(12, replace(LAYERS_ONLY, parallel_speedups={2: 0.06}), RATES, 4)
    published = (
        "on A100 GPUs, gpt-fast published 1.60 times ordinary decoding's speed on 2 devices and 2.44 times on 4."
    )
    assert nothing.footnotes == (f"Tensor parallelism was not measured and is not ranked; {published}",)
    words = "Tensor parallelism on other numbers of devices was not measured and is not ranked"
    assert some.footnotes == (f"{words}; {published}",)


def test_more_devices_than_there_are_is_a_caution() -> None:
    known = replace(LAYERS_ONLY, widths={3: 1.1, 5: 1.2})
    ranking = rank(12, known, RATES, 4, devices_here=2)
    fitting = next(row for row in ranking.plans if row.devices == 2)
    assert ranking.plans[0].devices == 4
    (caution,) = ranking.cautions
    assert caution.startswith("The plan may have 4 devices, but there are 2: the others are taken to be like them; ")
    assert f"the best that fits is exit layer {fitting.exit_layer} with k={fitting.k} on 2 devices" in caution
    assert f"{fitting.ms_per_token:.3g} ms a token, {fitting.speedup:.2f} times" in caution
    assert ranking.verdict.endswith(f". {caution}")
    assert rank(12, known, {(6, 1): 0.9}, 4, devices_here=2).cautions == (
        "The plan may have 4 devices, but there are 2.",
    )
    none_fits = rank(12, known, RATES, 4, devices_here=1).cautions[0]
    assert none_fits.endswith("but there is 1: the others are taken to be like it; no plan fits.")
    for here in (4, 5, None):
        assert rank(12, known, RATES, 4, devices_here=here).cautions == ()


def test_the_callers_cautions_end_the_verdict() -> None:
    ranking = rank(12, LAYERS_ONLY, RATES, 4, devices_here=3, cautions=["Times are rough."])
    assert ranking.cautions[1] == "Times are rough."
    assert ranking.verdict.endswith(f". {ranking.cautions[0]} Times are rough.")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((12, LAYERS_ONLY, {(6, 1): 1.2}, 2), "match_rate=1.2"),
        ((12, LAYERS_ONLY, {(5, 1): 0.2}, 2), "exit_layer=5: with 12 layers choose 6 to 11"),
        ((0, LAYERS_ONLY, {(5, 1): 0.2}, 2), "num_layers=0"),
        ((12, LAYERS_ONLY, RATES, 0), "devices=0"),
        ((12, LAYERS_ONLY, RATES, 2, 0.0), "tensor_parallel_efficiency=0"),
        ((12, LAYERS_ONLY, RATES, 2, 1.5), "tensor_parallel_efficiency=1.5"),
    ],
)
def test_mistakes(arguments: tuple[object, ...], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        rank(*arguments)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"layer_ms": 0}, "layer_ms=0"),
        ({"layer_ms": 1, "hop_ms": -1}, "hop_ms=-1"),
        ({"layer_ms": 1, "head_ms": float("nan")}, "head_ms=nan"),
        ({"layer_ms": 1, "contention": 0.5}, "contention=0.5"),
        ({"layer_ms": 1, "widths": {1: 1.0}}, "candidates=1"),
        ({"layer_ms": 1, "widths": {3: 0.9}}, "width of 3 candidates=0.9"),
        ({"layer_ms": 1, "parallel_speedups": {2: -1}}, "speed-up on 2 devices=-1"),
        ({"layer_ms": 1, "parallel_speedups": {2: 0}}, "speed-up on 2 devices=0"),
        ({"layer_ms": 1, "devices": 0}, "devices=0"),
        ({"layer_ms": 1, "cpu_share": 1.5}, "cpu_share=1.5"),
        ({"layer_ms": 1, "stages": {1: StagesAtWork(1, 1, 1)}}, "stages=1"),
        ({"layer_ms": 1, "compiled": 1}, "compiled=1"),
    ],
)
def test_impossible_times(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Calibration(**values)


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    calibration = Calibration(1, 2, 3, 4, 5, 6, 7, 8, 1.5, 0.9, {2: 1.5, 4: 2.5}, "here", {3: 1.2}, 4, 0.8)
    calibration = replace(calibration, stages={2: StagesAtWork(1.2, 3.1, 0.4, 0.3)}, compiled=True)
    (tmp_path / "a.json").write_text(json.dumps(asdict(calibration)))
    assert read_calibration(tmp_path / "a.json") == calibration
    (tmp_path / "b.json").write_text(json.dumps({"layer_ms": 1, "hops": 2}))
    with pytest.raises(ValueError, match=r"b\.json: not a calibration"):
        read_calibration(tmp_path / "b.json")
    bad = {"2": {"layer_ms": 0, "exit_head_ms": 1, "besides_ms": 1}}
    dear = {"2": {"layer_ms": 1, "exit_head_ms": 1, "besides_ms": 1, "row_cost": 1.5}}
    none = ([], {"2": {"layer_ms": 1}})
    for stages, words in (*((row, "not a calibration") for row in none), (bad, "above 0"), (dear, "row_cost=1.5")):
        (tmp_path / "c.json").write_text(json.dumps({"layer_ms": 1, "stages": stages}))
        with pytest.raises(ValueError, match=rf"c\.json: .*{words}"):
            read_calibration(tmp_path / "c.json")
    assert ordinary_ms(10, calibration.with_times(layer_ms=0.5, head_ms=None)) == 5 + 10 * 0.5 + 2
