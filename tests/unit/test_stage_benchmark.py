"""The arithmetic of `benchmarks.stages`: predictions beside what was measured."""

import pytest

from benchmarks import stages
from ppd_runtime.calibration.simulated_stages import StageTimes
from ppd_runtime.measure.prompt_files import read_prompts


def counted(boundary: int) -> dict[str, object]:
    return {"num_layers": 12, "first_boundary": [int(other == boundary) for other in (1, 2, 3, 4)]}


def test_the_planners_time_by_hand() -> None:
    times = StageTimes(layer=3.0, head=0.4, exit_head=0.5, hop=0.2)
    never = stages.planned_ms(times, (3, 6, 9), 3, 1, counted(4))
    assert never == pytest.approx(4 * (3 * 3.0 + 0.2) + 0.4, rel=0.02)
    busy = StageTimes(layer=3.0, besides=0.5)
    assert stages.planned_ms(busy, (3, 6, 9), 3, 1, counted(4)) == pytest.approx(4 * 9.5, rel=0.02)
    dear = StageTimes(layer=3.0, row_cost=0.05)
    assert stages.planned_ms(dear, (3, 6, 9), 1, 1, counted(1)) == pytest.approx(9)
    assert 9 < stages.planned_ms(dear, (3, 6, 9), 3, 8, counted(1)) <= 9 * 1.35, "eight rows cost seven times 5 % more"


def test_an_error_is_the_predicted_time_over_the_measured_one() -> None:
    found = stages._beside({"staged_ms": 10.0}, "planned", 9.0)
    assert found == {"planned_ms": 9.0, "planned_error": pytest.approx(-0.1)}
    shown = stages._with_error({"planned_ms": 9.0, "planned_error": -0.1}, "planned")
    assert shown == (9.0, "-10.0%")


def test_prompts_that_repeat_themselves_are_named() -> None:
    texts = [prompt.text for prompt in read_prompts(str(stages._REPEATING_FILE))]
    assert len(texts) == 6
    for text in texts:
        lines = [line for line in text.splitlines() if line.strip()]
        words = [word for line in lines for word in line.split()]
        assert len(set(words)) < 0.7 * len(words)
