"""What a calibration makes of stages' records; `tests/processes/test_plan.py` has real ones."""

from types import SimpleNamespace

import pytest

from ppd_runtime.calibration import stages_at_work
from ppd_runtime.calibration.stages_at_work import _Text, with_stages_at_work
from ppd_runtime.cost_model.machine_costs import Calibration, StagesAtWork
from ppd_runtime.measure.stage_ledgers import StageLedgers

TIMES = Calibration(layer_ms=1.5, head_ms=1.0, pass_ms=1.0, cpu_share=0.95)  # ordinary decoding: 20 ms a token


def ledgers(layer: float, head: float, besides: float) -> StageLedgers:
    """Of two stages that make a pass a token each."""
    of_first = {"layers": 6 * layer, "heads": head, "hops": besides / 2, "waiting": 1.0, "python": besides / 2}
    of_last = {**of_first, "heads": 100.0}
    alike = {"stage 1": layer, "stage 2": layer}
    ones = dict.fromkeys(alike, 1.0)
    return StageLedgers({"stage 1": of_first, "stage 2": of_last}, ones, alike, ones, {"stage 1": 0.1, "stage 2": 0.3})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of stages that texts are asked of: three each, on a machine whose speed changes."""
    sizes = list[int]()

    def texts(ordinary: object, conditions: object, size: int, computing: object) -> list[_Text]:
        sizes.append(size)
        found = [(ledgers(0.5 * size, 0.25, 0.125), 10.0), (ledgers(size, 0.5, 0.25), 20.0), (ledgers(9, 9, 9), 20.0)]
        return [_Text(one, 0.25, ordinary_ms) for one, ordinary_ms in found]

    monkeypatch.setattr(stages_at_work, "_texts", texts)
    monkeypatch.setattr(stages_at_work.LoadMeter, "probe", lambda self: None)
    return sizes


def ordinary(device: str = "cpu", threads: int = 1, num_layers: int = 12) -> SimpleNamespace:
    return SimpleNamespace(
        stage=SimpleNamespace(device=SimpleNamespace(type=device)),
        config=SimpleNamespace(threads_per_worker=threads),
        info=SimpleNamespace(num_layers=num_layers),
    )


def test_times_are_those_beside_ordinary_decodings(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_at_work, "available_cores", lambda: 3)
    found = with_stages_at_work(TIMES, ordinary(), None, [6, 2, 3, 4])
    assert asked == [2, 3], "as many as there are cores for"
    assert found.stages == {2: StagesAtWork(2.0, 0.5, 0.25, 0.25, 0.2), 3: StagesAtWork(3.0, 0.5, 0.25, 0.25, 0.2)}
    assert found.cpu_share == 0.95
    assert found.with_times(layer_ms=3.0).stages[2] == StagesAtWork(4.0, 0.5, 0.25, 0.25, 0.2)


@pytest.mark.parametrize(
    ("machine", "cores", "sizes"),
    [
        (ordinary("cuda"), 4, [2]),
        (ordinary(), 1, [2]),
        (ordinary(threads=2), 3, [2]),
        (ordinary(), 4, []),
    ],
)
def test_nothing_is_measured_without_cores_or_sizes(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace, cores: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(stages_at_work, "available_cores", lambda: cores)
    assert with_stages_at_work(TIMES, machine, None, sizes) == TIMES
    assert asked == []


def test_a_stage_has_a_layer_at_least(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_at_work, "available_cores", lambda: 8)
    assert list(with_stages_at_work(TIMES, ordinary(num_layers=2), None, [4]).stages) == asked == [2]
