"""What `layout="auto"` takes by the figures of a plan; nothing here runs a model."""

from typing import Any

import pytest

from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.tune.quick_plan import finding
from ppd_runtime.tune.verdict import Plan, Verdict


def plan(best: str | None, settings: dict[str, int] | None = None, processes: int = 2) -> Plan:
    row = {"name": best or "k=1", "settings": settings, "processes": processes, "ms_per_token": 6.0, "speedup": 1.5}
    other = {"name": "k=3", "settings": {"k": 3}, "processes": 4, "ms_per_token": 9.0, "speedup": 0.9}
    return Plan("", {"threads": 1, "layouts": [row, other]}, (), (), Verdict(best, "don't: nothing gains"))


@pytest.mark.parametrize(
    ("found", "settings"),
    [
        (plan("2 stages", {"stages": 2}), {"stages": 2, "threads_per_worker": 1}),
        (plan("k=1", {"k": 1}), {"k": 1, "threads_per_worker": 1}),
        (plan("one stage", {"stages": 1, "threads": 2}, 1), {"stages": 1, "threads_per_worker": 2}),
        (plan("4 threads", {"threads": 4}, 1), {"stages": 1, "threads_per_worker": 4}),
        (plan(None), {"stages": 1, "threads_per_worker": 1}),
    ],
)
def test_what_a_plan_advises_becomes_settings(found: Plan, settings: dict[str, Any]) -> None:
    assert finding(found)["settings"] == settings
    assert RuntimeConfig(**settings)


def test_the_figures_are_told() -> None:
    found = finding(plan("2 stages", {"stages": 2}))
    assert found["told"] == "2 stages, 6 ms a token, 1.50 times ordinary decoding's speed"
    found = finding(plan("4 threads", {"threads": 4}, 1))
    assert found["told"] == ("one stage, 4 threads, 6 ms a token without guesses, 1.50 times ordinary decoding's speed")
    assert finding(plan(None))["told"] == "one stage, for no layout is worth more: nothing gains"
