"""Every interleaving of messages, losses and deaths, for few processes and tokens: docs/design.md's invariants."""

import functools
import os
import random
from collections.abc import Callable

import pytest
from grids import nightly
from hypothesis import given, settings
from hypothesis import strategies as st
from model_check.automaton import NOTHING, Automaton
from model_check.cases import LONGER, QUICK, RUN_AHEAD_TWICE, Case, ahead, one_sub, several
from model_check.processes import Scenario, small_world
from model_check.search import (
    Counterexample,
    Explored,
    Search,
    check_hits,
    counterexample,
    fair_moves,
    moves_behind,
)
from model_check.staged_cases import TWO_STAGES, stages
from model_check.system import DEAD, Move, State, System
from model_check.toy import ToyModel

from ppd_runtime.client.request import RequestClient
from ppd_runtime.pipeline.messages import Begin
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.workers.worker import Worker

EXAMPLES = int(os.environ.get("PPD_WALKS", "0"))
"""Walks of chance, other ones each time; 0: the same few."""


@functools.cache
def kept_search(case: Case) -> tuple[System, Explored]:
    """A search whose states another test asks for, too."""
    return case.search()


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=nightly) for case in LONGER)], ids=lambda case: case.name
)
def test_every_interleaving(case: Case) -> None:
    _, explored = (kept_search if case in _MERGED else Case.search)(case)
    print(explored)
    assert explored.is_complete
    assert explored.ends


def _no_path(self: MainProcess, named, token: int) -> bool:
    return token in named.token_ids


def _first_sibling(self: SubProcess, position: int, token: int) -> bool:
    tokens, self._trial = self._trial, ()
    if tokens:
        self.stage.keep_candidate(position, 0) if token in tokens else self.stage.truncate(position)
    return token in tokens


def _kept_in_vain(self: SubProcess, position: int, token: int) -> bool:
    tokens, self._trial = self._trial, ()
    if tokens:
        self.stage.keep_candidate(position, tokens.index(token) if token in tokens else 0)
    return token in tokens


def _tokens_of_any_position(self: SubProcess, message) -> None:
    self.history += message.token_ids
    self._settle_trial(len(self.history), message.token_ids[0])


def _entries_one_off(self: SubProcess, entries, position: int) -> None:
    self._entries.update(enumerate(entries, position + 1))


def _nobody_asks(self: SubProcess | RunAheadSubProcess, position: int) -> None:
    pass


def _no_gaps_filled(self: MainProcess):
    return
    yield


def _waits_for_ever(settle: Callable) -> Callable:
    """A main process whose patience with a sub-process that named the right token never ends."""

    def patient(self: MainProcess, token: int):
        machine = settle(self, token)
        wanted = next(machine)
        while True:
            wanted.patience = wanted.patience and None
            try:
                wanted = machine.send((yield wanted))
            except StopIteration as end:
                return end.value

    return patient


def _replay_at_once(self: MainProcess, stop):
    """The prompt and what the client has in one pass: other bits than ordinary decoding's."""
    delivered = self.begin.delivered
    for token in delivered:
        stop.finish_reason(token)
    self.history += delivered
    self._told = len(self.history)
    return list(self.history)
    yield


def _again_on_top(self: SubProcess, position: int, tokens: tuple[int, ...]) -> None:
    """As it was before this search: an exit state that comes twice is not expected."""
    truncate, self.stage.truncate = self.stage.truncate, lambda length: None
    _START_CANDIDATES(self, position, tokens)
    self.stage.truncate = truncate


def _any_position(self: RequestClient, message) -> bool:
    return True


def _whatever_came(self: RequestClient, message) -> None:
    self.told.finished = message


def _repeats_nothing(self: MainProcess, delivered: int) -> None:
    pass


def _chain_kept(self: RunAheadSubProcess, position: int, token_ids: list[int]) -> None:
    self.chain[position:] = token_ids
    self._state = None


def _owes_all_that_it_won(self: RunAheadSubProcess, message) -> None:
    """The early starts of before a restart too."""
    _TAKE_TOKEN(self, message)
    if message.winner == self.rank and message.position not in self._owed:
        self._owed.append(message.position)


def _any_request(self: Worker, message) -> None:
    if self._sessions and not isinstance(message, Begin):
        self._step(next(iter(self._sessions.values())), message)
    else:
        _DISPATCH(self, message)


_MOST_MOVES = 20_000
_DISPATCH = Worker._dispatch
_START_CANDIDATES = SubProcess._start_candidates
_TAKE_TOKEN = RunAheadSubProcess._take_token
_QUICK = {case.name: case for case in QUICK}
_FAULT = _QUICK["one sub, a fault"]
_COMES_BACK = _QUICK["one sub comes back after a fault"]
MUTANTS = (
    (MainProcess, "_is_right", _no_path, Case("", ahead(3, 0, 1))),
    (MainProcess, "_fill_gaps", _no_gaps_filled, Case("", one_sub(4, 1, 0))),
    (MainProcess, "_settle", _waits_for_ever(MainProcess._settle), _FAULT),
    (MainProcess, "_replay", _replay_at_once, _FAULT),
    (MainProcess, "repeat", _repeats_nothing, _FAULT),
    (MainProcess, "_answer_missing", lambda self: None, _COMES_BACK),
    (SubProcess, "_settle_trial", _first_sibling, Case("", several(3, 2, 1, 2, 1))),
    (SubProcess, "_settle_trial", _kept_in_vain, Case("", one_sub(3, 0, 1))),
    (SubProcess, "_take_missed", _tokens_of_any_position, _FAULT),
    (SubProcess, "_keep", _entries_one_off, Case("", several(3, 2, 2, 1, 2))),
    (SubProcess, "_ask", _nobody_asks, _COMES_BACK),
    (SubProcess, "_start_candidates", _again_on_top, _FAULT),
    (RunAheadSubProcess, "_go_on_from", _chain_kept, Case("", ahead(3, 0, 1))),
    (RunAheadSubProcess, "_ask", _nobody_asks, _QUICK["run ahead comes back after a fault"]),
    (RunAheadSubProcess, "_take_token", _owes_all_that_it_won, RUN_AHEAD_TWICE),
    (RequestClient, "_is_next", _any_position, _FAULT),
    (RequestClient, "_finish", _whatever_came, _FAULT),
    (Worker, "_dispatch", _any_request, _QUICK["one sub, two requests, a fault"]),
)


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "case"),
    [pytest.param(*mutant, marks=nightly if mutant[-1] in LONGER else ()) for mutant in MUTANTS],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, owner, name, mutant, case) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Counterexample) as found:
        case.search()
    print(found.value)


def test_without_a_mistake_none_is_found() -> None:
    for case in {case for *_, case in MUTANTS} - {*QUICK, *LONGER}:  # those are searched above
        assert case.search()[1].is_complete


_MERGED = (_QUICK["one sub and rests, a fault"], _QUICK["run ahead, a fault"], _FAULT, TWO_STAGES)


@pytest.mark.parametrize("case", _MERGED, ids=lambda case: case.name)
def test_merged_states_behave_alike(case: Case) -> None:
    """What the search takes for the same state answers alike, whatever comes."""
    system, _ = kept_search(case)
    choose = random.Random(5)
    with small_world():
        for automaton in system.automata:
            for number, origin in choose.sample(automaton.merged, min(len(automaton.merged), 60)):
                _same_future(automaton, number, origin, choose)


def _same_future(automaton: Automaton, number: int, origin: tuple[int, tuple[int, int]], choose: random.Random) -> None:
    before, taken = origin
    process = automaton.replay(before)
    automaton.resume(process, taken)
    for _ in range(40):
        if not (edges := automaton.nodes[number].edges):
            return
        taken = choose.choice(sorted(edges))
        automaton.resume(process, taken)
        assert automaton.sent_by(process) == edges[taken].sent
        number = edges[taken].target
        assert (process.timeout, process.dead) == (automaton.nodes[number].timeout, automaton.nodes[number].over)


@pytest.mark.parametrize(
    ("scenario", "faults"),
    [(one_sub(2, 1, 0), 1), (ahead(2, 1, layers=2), 1), (several(2, 2, 2, 2), 0), (stages(2, 2, 1), 1)],
)
def test_what_is_left_out_makes_no_difference(scenario: Scenario, faults: int) -> None:
    """Every end of every order is an end of the orders that are searched where no fault is left."""
    ends = []
    for reduces in (True, False):
        with small_world():
            system = System(scenario, faults)
            system.reduces = reduces
            search = Search(system)
            search.run()
            ends.append({_readable(system, state) for state in search.ends})
    assert ends[0] == ends[1]


def _readable(system: System, state: State) -> str:
    """An end in words that hold for every search: who ended, and what workers never take."""
    links = [[system.messages.essence.of_message(system.messages[number]) for number in link] for link in state.links]
    return f"{links[: system.client * system.size]} {[node == DEAD for node in state.nodes]} {state.main_starts}"


@given(
    layout=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (5, 5)]),
    pattern=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    tokens=st.integers(8, 20),
    runs_ahead=st.booleans(),
    rests=st.booleans(),
    surprises=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10**6)), max_size=30),
)
@settings(max_examples=EXAMPLES or 20, deadline=None, derandomize=not EXAMPLES, print_blob=True)
def test_many_surprises(layout, pattern, tokens, runs_ahead, rests, surprises) -> None:
    """Longer texts and more processes, in fair order but for as many faults and odd turns as you like."""
    k, workers = layout
    winners = tuple(min(winner, k) for winner in pattern)
    scenario = Scenario(ToyModel(2, 1, winners=winners), k, workers, tokens, run_ahead=runs_ahead, rests=rests)
    with small_world():
        _walk(System(scenario, len(surprises)), surprises)


def test_subs_come_back_after_many_surprises() -> None:
    """Every candidate right: some tokens behind the last fault, every early start is in time."""
    choose = random.Random(11)
    for k in (1, 3):
        scenario = Scenario(ToyModel(2, 1, winners=(1, k, min(2, k))), k, k, 36)
        surprises = [(choose.randrange(8), choose.randrange(10**6)) for _ in range(20)]
        with small_world():
            _walk(System(scenario, len(surprises)), surprises, hits_behind=28)


def _walk(system: System, surprises: list[tuple[int, int]], hits_behind: int | None = None) -> None:
    path = [Move("starts", 0, NOTHING, NOTHING, (), system.first())]
    for fair, choice in surprises:
        for _ in range(fair):
            path += moves_behind(system, path)[:1]
        moves = moves_behind(system, path)
        if moves:
            path.append(moves[choice % len(moves)])
    while moves := fair_moves(system, path):
        if hits_behind is not None:
            check_hits(system, path, moves, hits_behind)
        path += moves
        if len(path) > _MOST_MOVES:
            raise counterexample(system, path, "no end")
