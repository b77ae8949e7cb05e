"""The staged machines over a real model on virtual clocks."""

import pytest

from ppd_runtime import SamplingParams
from ppd_runtime.calibration.simulated_stages import SimulatedStages, StageTimes
from ppd_runtime.cost_model.staged import expected_first_boundary
from ppd_runtime.models.checkpoint.description import describe

PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def info(model_folder):
    """A small model of four layers."""
    return describe(str(model_folder("llama", num_layers=4)))


def simulated(info, cuts, k, rows, times=StageTimes()):  # noqa: B008 (it is frozen)
    return SimulatedStages(info, cuts, k, rows, compiled=False).decode(PROMPT, PARAMS, times)


def test_what_every_boundary_names_costs_one_stage_a_token(info):
    text = simulated(info, (1, 2, 3), k=info.vocab_size, rows=60)
    assert text.first_boundary == (19, 0, 0, 0)
    assert text.time_per_token >= 1


def test_a_boundary_that_names_nothing_right_costs_ordinary_decodings_time(info, monkeypatch):
    monkeypatch.setattr(
        "ppd_runtime.models.trained.exit_heads.SharedHead.guesses",
        lambda self, hidden, texts, k: [[(0, 1e-3)] for _ in texts],
    )
    text = simulated(info, (1, 3), k=1, rows=1)
    assert text.first_boundary == (0, 0, 19)
    assert text.time_per_token == 4


def test_two_stages_take_what_the_formula_says(info, monkeypatch):
    monkeypatch.setattr("ppd_runtime.pipeline.staged.first_stage._LEAST_CHANCE", 0.0)
    text = simulated(info, (2,), k=3, rows=3)
    shares = [told / sum(text.first_boundary) for told in text.first_boundary]
    assert text.time_per_token == pytest.approx(2 * expected_first_boundary(shares), rel=0.1)


def test_a_hop_and_a_head_lie_on_every_tokens_way(info):
    free, paid = (simulated(info, (2,), 3, 3, times) for times in (StageTimes(), StageTimes(hop=0.25, head=0.5)))
    assert paid.first_boundary == free.first_boundary
    assert free.time_per_token + 0.5 <= paid.time_per_token <= free.time_per_token + 0.5 + 4 * 0.25


def test_rows_that_cost_a_pass_each_are_left_out(info):
    few, free, dear = (
        simulated(info, (1, 2, 3), 3, rows, StageTimes(row_cost=cost)) for rows, cost in ((1, 0), (8, 0), (8, 1))
    )
    assert dear == few
    assert free.rows_per_token > few.rows_per_token
