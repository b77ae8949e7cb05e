"""The formulas for devices that are not here, by hand and beside Theorem 4.1 and E[J]."""

import pytest

from ppd_runtime.cost_model import devices
from ppd_runtime.cost_model.devices import Parts
from ppd_runtime.cost_model.match_rates import MatchRates

ALONE = Parts(1.0)
PARTS = Parts(layer_ms=2.0, head_ms=1.0, exit_head_ms=0.5, hop_ms=0.75, row_cost=0.1)
SHARES = (0.8, 0.1, 0.05, 0.05)


@pytest.mark.parametrize(("k", "match_rate"), [(1, 0.2163), (3, 0.6837), (5, 0.7415)])
def test_layers_alone_are_equations_3_and_6(k: int, match_rate: float) -> None:
    found = devices.paper(40, 20, k, match_rate, ALONE)
    assert found.ms_per_token == pytest.approx(40 * (1 - match_rate / 2))
    assert found.speedup == pytest.approx(found.allowed_speedup) == pytest.approx(1 / (1 - match_rate / 2))
    assert found.compute_per_token == pytest.approx((2 + k - match_rate) / 2)
    assert found.devices == k + 1


def test_the_papers_layout_with_heads_and_hops_by_hand() -> None:
    """A hit takes 6 layers, the head, and two hops and an exit head less the head; a miss 12 layers and the head."""
    found = devices.paper(12, 6, 1, 0.5, PARTS)
    assert found.ms_per_token == pytest.approx(0.5 * (12 + 1 + (1.5 + 0.5 - 1)) + 0.5 * (24 + 1))
    assert found.speedup == pytest.approx(25 / found.ms_per_token)
    assert found.options == "--k 1 --exit-layer 6"


def test_stages_take_as_many_stage_times_as_boundaries() -> None:
    found = devices.stages(12, (3, 6, 9), 1, SHARES, ALONE)
    boundary = 0.8 + 2 * 0.1 + 3 * 0.05 + 4 * 0.05
    assert found.ms_per_token == pytest.approx(3 * boundary)
    assert found.speedup == pytest.approx(found.allowed_speedup) == pytest.approx(4 / boundary)
    assert (found.name, found.devices, found.options) == ("4 stages, k=1", 4, "--cuts 3,6,9 --k 1")


def test_two_stages_are_theorem_4_1_at_half_depth() -> None:
    staged, paper = devices.stages(12, (6,), 1, (0.7, 0.3), ALONE), devices.paper(12, 6, 1, 0.7, ALONE)
    assert staged.ms_per_token == pytest.approx(paper.ms_per_token)
    assert staged.compute_per_token == pytest.approx(paper.compute_per_token)


def test_rows_heads_and_hops_slow_stages_down() -> None:
    times = [devices.stages(12, (3, 6, 9), 3, SHARES, parts).ms_per_token for parts in (Parts(2.0), PARTS)]
    boundary, dropped = 1.35, 3 * (1.35 - 0.05) - 0.95
    width = 1 + 0.1 * ((1 + dropped) / boundary - 1)
    assert times[0] == pytest.approx(6 * boundary)
    assert times[1] == pytest.approx((6 * width + 0.75) * boundary + 0.95 * 0.5 + 0.05 * 1.0)


def test_uneven_stages_are_named_by_their_cuts() -> None:
    found = devices.stages(12, (2, 6, 9), 1, SHARES, ALONE)
    assert found.name == "4 stages cut after 2, 6, 9, k=1"
    assert found.allowed_speedup == pytest.approx(12 / (4 * 1.35))


RATES = MatchRates(
    "a file",
    {(6, 1): 0.7, (6, 3): 0.9, (8, 1): 0.8},
    12,
    {((6,), 1): (0.7, 0.3), ((3, 6, 9), 3): SHARES},
)


@pytest.mark.parametrize(("number", "names"), [(2, 3), (3, 3), (4, 5)])
def test_what_fits_is_ranked_by_its_time(number: int, names: int) -> None:
    found = devices.rank(12, RATES, PARTS, number)
    assert len(found) == names
    assert max(row.devices for row in found) <= number
    assert [row.ms_per_token for row in found] == sorted(row.ms_per_token for row in found)


def test_tensor_parallelism_is_ranked_with_its_all_reduces() -> None:
    found = [row for row in devices.rank(12, RATES, PARTS, 4, all_reduce_ms=0.05) if not row.options]
    by_name = {row.name: row.ms_per_token for row in found}
    assert by_name == {
        "tensor parallelism on 2": pytest.approx(24 / 2 + 24 * 0.05 + 1),
        "tensor parallelism on 4": pytest.approx(24 / 4 + 24 * 0.05 + 1),
    }
