"""What is searched of the staged layout: by the tests, and by `python -m model_check` at greater length."""

from dataclasses import replace

from model_check.cases import Case
from model_check.processes import Scenario
from model_check.search import Bounds
from model_check.toy import ToyModel
from ppd_runtime.pipeline.messages import Guesses, Rows, Token


def stages(
    tokens: int,
    size: int,
    *winners: int,
    k: int = 1,
    boundaries: tuple[int, ...] = (1,),
    rows: int = 1,
    trees: bool = False,
    requests: int = 1,
    repeats: bool = False,
    layers: int = 1,
) -> Scenario:
    """Stages of so many layers each: of several, passes may be left between them.

    `repeats`: the prompts repeat themselves, so that boundary 0 has something to name.
    """
    prompts = ((3, 1, 5, 3, 1), (2, 6, 2, 6, 2)) if repeats else ((3, 1), (2, 6))
    model = ToyModel(layers * size, 1, prompts, winners, boundaries)
    cuts = tuple(range(layers, layers * size, layers))
    return Scenario(model, k, size - 1, tokens, requests, cuts=cuts, single=size == 1, rows=rows, trees=trees)


def mendable(scenario: Scenario) -> Scenario:
    """Only what is sent once more within an attempt is lost, doubled or late."""
    return replace(scenario, mendable=(Rows, Token, Guesses))


def at_once(scenario: Scenario) -> Scenario:
    """Two requests in flight."""
    return replace(scenario, requests=2, at_once=True)


_REFINED = (2, 1)  # every other token is named by the second boundary first
_CANCELLED = replace(stages(2, 2, 1, requests=2), cancelled_behind=1)
TWO_STAGES = Case("two stages, a fault", stages(2, 2, 1), 1)
TWO_CANDIDATES = Case("two stages, two candidates", stages(3, 2, 2, 1, k=2))
REFINED = Case("three stages, a fault, a deviation", stages(2, 3, 1, boundaries=_REFINED), 1, Bounds(deviations=1))
MENDED = Case("two stages, what is sent again", mendable(stages(3, 2, 1, 0)), 1, Bounds(deviations=2))
MISSED = Case("two stages, a wrong guess, a fault, two deviations", stages(3, 2, 0, 1), 1, Bounds(deviations=2))
TWO_AT_ONCE = Case("two stages, two requests at once, a fault, a deviation", at_once(stages(2, 2, 1)), 1, Bounds(1))
LEFT = Case("two stages of two layers, passes that are left", stages(2, 2, 0, k=2, rows=2, trees=True, layers=2))
ONE_CANCELLED = Case(
    "two stages, two requests at once, one cancelled, a deviation",
    replace(at_once(stages(2, 2, 1)), cancelled_behind=1),
    0,
    Bounds(1),
)
ONE_STAGE = Case("one stage, two faults", stages(4, 1, 0, rows=3, repeats=True), 2)
STAGED_QUICK = (
    ONE_STAGE,
    Case("one stage, two requests at once, a fault", at_once(stages(2, 1, 0, rows=2, repeats=True)), 1),
    Case(
        "one stage, cancelled, then another request, a fault",
        replace(stages(3, 1, 0, rows=2, requests=2, repeats=True), cancelled_behind=1),
        1,
    ),
    LEFT,
    Case("two stages of two layers, wrong guesses, a fault", stages(2, 2, 0, layers=2), 1, Bounds(1)),
    TWO_AT_ONCE,
    ONE_CANCELLED,
    Case("two stages, two requests at once, eight deviations", at_once(stages(2, 2, 1)), 0, Bounds(8)),
    TWO_STAGES,
    TWO_CANDIDATES,
    REFINED,
    MENDED,
    MISSED,
    Case("two stages, two faults", stages(2, 2, 1), 2, Bounds(deviations=0)),
    Case("two stages, two candidates, a fault", stages(3, 2, 2, 1, k=2), 1, Bounds(deviations=0)),
    Case(
        "two stages, trees and repetitions, a fault",
        stages(3, 2, 2, 1, k=2, rows=3, trees=True, repeats=True),
        1,
        Bounds(0),
    ),
    Case("two stages, heads that rest, a fault", replace(stages(4, 2, 0, 0, 1), rests=True), 1, Bounds(0)),
    Case("two stages, repetitions", stages(3, 2, 0, rows=3, repeats=True)),
    Case("two stages, cancelled, then another request, a fault", _CANCELLED, 1, Bounds(deviations=1)),
    Case("three stages, two deviations", stages(3, 3, 1, boundaries=_REFINED), 0, Bounds(deviations=2)),
    Case("three stages, what is sent again", mendable(stages(3, 3, 1, boundaries=_REFINED)), 1, Bounds(0)),
)
STAGED_LONGER = (
    Case(
        "three stages, two requests at once, two deviations",
        at_once(stages(2, 3, 1, boundaries=_REFINED)),
        0,
        Bounds(2),
    ),
    Case("three stages, a fault, one token", stages(1, 3, 1, boundaries=_REFINED), 1),
    Case("three stages, two candidates, a fault", stages(3, 3, 1, 2, k=2, boundaries=_REFINED), 1, Bounds(0)),
)
"""What the tests of the night search besides."""

_MOST = 1_000_000
STAGED_DEEP = (
    Case("two stages, two requests at once, a fault, three deviations", at_once(stages(2, 2, 1, 0)), 1, Bounds(3)),
    Case("three stages, two requests at once, a fault", at_once(stages(2, 3, 1, boundaries=_REFINED)), 1, Bounds(1)),
    Case("two stages, a fault, four tokens", stages(4, 2, 1, 0), 1, Bounds(most_states=_MOST)),
    Case("two stages, two faults, all turns", stages(2, 2, 1), 2, Bounds(most_states=_MOST)),
    Case("two stages, two candidates, a fault, three deviations", stages(3, 2, 2, 1, k=2), 1, Bounds(3)),
    Case("two stages, cancelled, then another request, a fault, all turns", _CANCELLED, 1, Bounds(most_states=_MOST)),
    Case("three stages", stages(2, 3, 1, boundaries=_REFINED), 0, Bounds(most_states=_MOST)),
    Case("three stages, a fault, three deviations", stages(3, 3, 1, boundaries=_REFINED), 1, Bounds(3)),
    Case("three stages, two faults, a deviation", stages(2, 3, 1, boundaries=_REFINED), 2, Bounds(1)),
)
