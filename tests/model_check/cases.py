"""What is searched: by the tests, and by `python -m model_check` at greater length."""

from dataclasses import dataclass, replace

from model_check.processes import Scenario, small_world
from model_check.search import EVERYTHING, Bounds, Explored, Search
from model_check.system import System
from model_check.toy import ToyModel


@dataclass(frozen=True)
class Case:
    """A scenario, how many faults, and what is left out."""

    name: str
    scenario: Scenario
    faults: int = 0
    bounds: Bounds = EVERYTHING

    def search(self) -> tuple[System, Explored]:
        """Go through all of it; raises Counterexample."""
        with small_world():
            system = System(self.scenario, self.faults)
            return system, Search(system, self.bounds).run()


def _model(*winners: int, layers: int = 2, exit_layer: int = 1) -> ToyModel:
    return ToyModel(layers, exit_layer, winners=winners)


def one_sub(tokens: int, *winners: int, layers: int = 2, rests: bool = False, requests: int = 1) -> Scenario:
    """One sub-process with one candidate."""
    return Scenario(_model(*winners, layers=layers, exit_layer=layers - 1), 1, 1, tokens, requests, rests=rests)


def ahead(tokens: int, *winners: int, rests: bool = False, layers: int = 4) -> Scenario:
    """One sub-process that runs ahead and looks for messages between its layers, where it has several."""
    model = _model(*winners, layers=layers, exit_layer=layers // 2)
    return Scenario(model, 1, 1, tokens, run_ahead=True, rests=rests)


def several(tokens: int, k: int, workers: int, *winners: int) -> Scenario:
    """Several candidates, of several sub-processes or as siblings of one."""
    return Scenario(_model(*winners), k, workers, tokens)


_CANCELLED = replace(one_sub(2, 1, requests=2), cancelled_behind=1)
QUICK = (
    Case("one sub", one_sub(4, 1, 0)),
    Case("one sub, a fault", one_sub(3, 1, 0), 1),
    Case("one sub and rests, a fault", one_sub(4, 0, 0, 1, rests=True), 1, Bounds(deviations=3)),
    Case("one sub, two requests, a fault", one_sub(2, 1, requests=2), 1),
    Case("one sub, cancelled, then another request, a fault", _CANCELLED, 1),
    Case("one sub, tokens held back, a fault", replace(one_sub(3, 1, 0), live=False), 1),
    Case("one sub, an end of the text, a fault", replace(one_sub(6, 1), eos=6), 1, Bounds(deviations=2)),
    Case("one sub comes back after a fault", one_sub(9, 1), 1, Bounds(fair_behind=3, hits_behind=7)),
    Case("run ahead, a fault", ahead(3, 1, 1, 0), 1),
    Case("run ahead and rests", ahead(5, 0, 0, 1, rests=True)),
    Case("run ahead comes back after a fault", ahead(9, 1, layers=2), 1, Bounds(3, 3, 7)),
    Case("two candidates as siblings, a fault", several(3, 2, 1, 2, 1, 0), 1),
    Case("two subs", several(3, 2, 2, 1, 2, 0)),
    Case("two subs, a fault, a deviation", several(3, 2, 2, 1, 2, 0), 1, Bounds(deviations=1)),
    Case("three candidates on two subs, a fault, a deviation", several(3, 3, 2, 3, 1, 0), 1, Bounds(deviations=1)),
)
"""Half a minute on a slow core."""
RUN_AHEAD_TWICE = Case("run ahead, two faults, a deviation", ahead(3, 1, 0, layers=2), 2, Bounds(deviations=1))
LONGER = (
    RUN_AHEAD_TWICE,
    Case("one sub, a fault, three layers", one_sub(3, 1, 0, layers=3), 1),
    Case("one sub, two faults", one_sub(2, 1), 2),
    Case("two subs come back after a fault", several(9, 2, 2, 2, 1), 1, Bounds(1, 3, 7)),
    Case("two subs, a fault, two deviations", several(3, 2, 2, 1, 2, 0), 1, Bounds(deviations=2)),
    Case("three subs", several(2, 3, 3, 3, 0)),
    Case("three subs, a fault, a deviation", several(3, 3, 3, 3, 1, 0), 1, Bounds(deviations=1)),
)
"""What the tests of the night search besides."""

_MOST = Bounds(most_states=1_000_000)
DEEP = (
    Case("one sub, six tokens", one_sub(6, 1, 0), 0, _MOST),
    Case("one sub, a fault, four tokens", one_sub(4, 1, 0), 1, _MOST),
    Case("one sub, two faults, three tokens", one_sub(3, 1, 0), 2, _MOST),
    Case("one sub, three faults, two tokens", one_sub(2, 1), 3, _MOST),
    Case("one sub and rests, a fault, five tokens", one_sub(5, 0, 0, 1, rests=True), 1, _MOST),
    Case("one sub, two requests, two faults", one_sub(2, 1, requests=2), 2, _MOST),
    Case("one sub, three tokens, cancelled, then another, a fault", replace(_CANCELLED, new_tokens=3), 1, _MOST),
    Case("one sub comes back after two faults", one_sub(11, 1), 2, Bounds(None, 3, 9, 1_000_000)),
    Case("run ahead, a fault, four tokens", ahead(4, 1, 1, 0), 1, _MOST),
    Case("run ahead, two faults", ahead(2, 1, 0), 2, _MOST),
    Case(
        "run ahead, two faults, three tokens, three deviations",
        ahead(3, 1, 0, layers=2),
        2,
        Bounds(3, None, None, 1_000_000),
    ),
    Case("run ahead and rests, a fault", ahead(5, 0, 0, 1, rests=True, layers=2), 1, _MOST),
    Case("run ahead comes back after two faults", ahead(11, 1, layers=2), 2, Bounds(None, 3, 9, 1_000_000)),
    Case("two candidates as siblings, two faults", several(2, 2, 1, 2, 1), 2, _MOST),
    Case("two subs, four tokens", several(4, 2, 2, 1, 2, 0), 0, _MOST),
    Case("two subs, a fault, two tokens", several(2, 2, 2, 2, 1), 1, _MOST),
    Case(
        "two subs, a fault, three tokens, six deviations",
        several(3, 2, 2, 1, 2, 0),
        1,
        Bounds(6, None, None, 1_000_000),
    ),
    Case(
        "two subs, two faults, three tokens, two deviations",
        several(3, 2, 2, 1, 2, 0),
        2,
        Bounds(2, None, None, 1_000_000),
    ),
    Case("three subs, three tokens, six deviations", several(3, 3, 3, 3, 1, 0), 0, Bounds(6, None, None, 1_000_000)),
    Case("three subs, a fault, three deviations", several(3, 3, 3, 3, 1, 0), 1, Bounds(3, None, None, 1_000_000)),
    Case("three subs, two faults, a deviation", several(3, 3, 3, 3, 1, 0), 2, Bounds(1, None, None, 1_000_000)),
)
"""An hour on a free core."""
