"""Each process as an automaton that its real code writes while it is explored.

A process is deterministic: it is its first state and the messages it took. So it is run once for each state and
message, and remembered; states that are equal in essence are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from model_check.essence import Essence
from model_check.processes import Process, Scenario, start_client, start_worker, without_counts
from model_check.toy import ToyModel, ToyStage
from model_check.toy_rows import ToyRows
from ppd_runtime.pipeline.messages import Message
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.staged.decider import StagedDecider
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.tree import NodeTree
from ppd_runtime.settings.layouts import CLIENT, DECIDER

NOTHING = -2
"""Taken in the place of a message: the wait is over without one."""
_MOST_ALIVE = 500  # processes kept where they were; others are run again from their beginning


class Violation(AssertionError):
    """An invariant does not hold."""


class Edge(NamedTuple):
    """What a process does with a message."""

    target: int
    sent: tuple[tuple[int, int], ...]
    """Address and message."""


@dataclass
class Node:
    """A state of one process."""

    origin: tuple[int, tuple[int, int]] | None
    """The state before it, and what it took; None for the first."""
    timeout: float | None
    over: bool
    progress: int
    """Tokens of the text, prompt and all, that the main process has chosen."""
    edges: dict[tuple[int, int], Edge] = field(default_factory=dict)


class Automaton:
    """Everything that one process can do; the client takes with each message how many main processes there were."""

    def __init__(self, scenario: Scenario, address: int, messages: "Messages") -> None:
        self._scenario, self._address, self._messages = scenario, address, messages
        self._numbers: dict[object, int] = {}
        self._alive: dict[int, Process] = {}
        self.nodes: list[Node] = []
        process = self._start()
        self.first_sent = self.sent_by(process)
        self.runs = 0
        """Of real code, from one wait to the next."""
        self._add(process, None)
        self.merged: list[tuple[int, tuple[int, tuple[int, int]]]] = []
        """States that were reached in another way before: that state, and where from."""

    def edge(self, number: int, taken: tuple[int, int]) -> Edge:
        """What a state does with a message.

        Raises:
            Violation: where the process fails or an invariant of its own does not hold.
        """
        edges = self.nodes[number].edges
        if taken not in edges:
            alive = self._alive.pop(number, None)
            process = self.replay(number) if alive is None or alive.dead else alive
            self.resume(process, taken)
            sent = self.sent_by(process)  # first: what a process keeps of it is known by its number
            edges[taken] = Edge(self._add(process, (number, taken)), sent)
        return edges[taken]

    def replay(self, number: int) -> Process:
        """A process in a state, from its beginning."""
        path, node = [], self.nodes[number]
        while node.origin is not None:
            before, taken = node.origin
            path.append(taken)
            node = self.nodes[before]
        process = self._start()
        for taken in reversed(path):
            self._step(process, taken)
        return process

    def sent_by(self, process: Process) -> tuple[tuple[int, int], ...]:
        """What it sent since it was resumed: addresses and messages' numbers."""
        return self._messages.numbers(process.sent)

    def _start(self) -> Process:
        return start_client(self._scenario) if self._address == CLIENT else start_worker(self._scenario, self._address)

    def resume(self, process: Process, taken: tuple[int, int]) -> None:
        """Let a process go on, and look at what it holds then.

        Raises:
            Violation: where it fails, or an invariant of its own does not hold.
        """
        try:
            self._step(process, taken)
            check_process(self._scenario, process)
        except Exception as error:
            raise Violation(f"{name_of(self._address)}: {type(error).__name__}: {error}") from error
        self.runs += 1

    def _step(self, process: Process, taken: tuple[int, int]) -> None:
        message, process.main_lives = taken
        process.resume(None if message == NOTHING else self._messages[message])

    def _add(self, process: Process, origin: tuple[int, tuple[int, int]] | None) -> int:
        essence = "over" if process.dead else repr(self._messages.essence.of_process(process))
        number = self._numbers.setdefault(essence, len(self._numbers))
        if number == len(self.nodes):
            self.nodes.append(Node(origin, process.timeout, process.dead, _progress(process)))
        elif origin is not None:
            self.merged.append((number, origin))
        if number in self._alive:
            process.end()
        elif not process.dead:
            self._alive[number] = process
            if len(self._alive) > _MOST_ALIVE:
                self._alive.pop(next(iter(self._alive))).end()
        return number


def _progress(process: Process) -> int:
    sessions = [*process.worker._sessions.values(), *process.worker._past.values()] if process.worker else []
    machines = [session.machine for session in sessions if isinstance(session.machine, MainProcess | StagedDecider)]
    return max((len(machine.history) for machine in machines), default=0)


class Messages:
    """Every message of a scenario, once."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._by_essence: dict[str, int] = {}
        self._by_id: dict[int, int] = {}
        self.essence = Essence(self._known)

    def __getitem__(self, number: int) -> Message:
        return self._messages[number]

    def numbers(self, sent: Sequence[tuple[int, Message]]) -> tuple[tuple[int, int], ...]:
        """Of what a process sent: addresses and messages' numbers."""
        return tuple((address, self._number(without_counts(address, message))) for address, message in sent)

    def _known(self, message: Message) -> int | None:
        """A message's number, where it or one like it was sent."""
        number = self._by_id.get(id(message))
        return self._by_essence.get(repr(self.essence.of_message(message))) if number is None else number

    def _number(self, message: Message) -> int:
        number = self._by_essence.setdefault(repr(self.essence.of_message(message)), len(self._messages))
        if number == len(self._messages):
            self._messages.append(message)
            self._by_id[id(message)] = number
        return number


def name_of(address: int) -> str:
    """What a counterexample calls a process."""
    return {CLIENT: "client", DECIDER: "main"}.get(address, f"sub {address}")


Stage = FirstStage | MiddleStage | StagedDecider


def check_process(scenario: Scenario, process: Process) -> None:
    """Raise AssertionError where a process holds or has delivered what it must not."""
    if process.worker is None:
        check_delivered(scenario, process)
        return
    for session in process.worker._sessions.values():
        machine = session.machine
        if isinstance(machine, Stage):
            tree = machine._tree if isinstance(machine, StagedDecider) else machine.tree
            _check_tree(scenario.model, machine.stage, tree, tuple(machine.begin.prompt_ids))
            if scenario.mendable and isinstance(machine, LastStage):
                assert machine.epoch <= 1, "another attempt begins, for what could be sent again"
        else:
            _check_caches(scenario.model, machine)


def check_delivered(scenario: Scenario, client: Process) -> None:
    """The caller has ordinary decoding's tokens, each once and in order; in the end all of them."""
    for request in range(1, scenario.requests + 1):
        expected, got = ([t for r, t in of_all if r == request] for of_all in (scenario.expected(), client.delivered))
        assert got == expected[: len(got)], f"the caller got {got}, ordinary decoding gives {expected}"
        assert not client.dead or got == expected, f"the request ended with {got} instead of {expected}"
    in_order = [request for request, _ in client.delivered]
    assert scenario.at_once or in_order == sorted(in_order), "one request after the other"


def _check_caches(model: ToyModel, machine: MainProcess | SubProcess | RunAheadSubProcess) -> None:
    """Every token is certain or marked as a candidate, and every entry is that of its token in its text."""
    certain = text = tuple(machine.chain if isinstance(machine, RunAheadSubProcess) else machine.history)
    if isinstance(machine, RunAheadSubProcess):
        certain = text[: machine._certain]
    assert certain == model.text(tuple(machine.begin.prompt_ids), len(certain)), f"{certain} is taken for certain"
    tried = machine._trial if isinstance(machine, SubProcess) else ()
    for layer, entries in enumerate(machine.stage.entries):
        _check_layer(model, machine.stage, layer, text)
        expected = [model.ordinary((*text, token)).entries[layer][-1] for token in tried]
        assert entries[len(text) :] == expected, f"layer {layer} holds something behind {text} on trial for {tried}"


def _check_layer(model: ToyModel, stage: ToyStage, layer: int, text: tuple[int, ...]) -> None:
    held = stage.entries[layer][: len(text)]
    expected = list(model.ordinary(text).entries[layer][: len(held)])
    assert held == expected, f"layer {layer} holds entries of another text than {text}"


def _check_tree(model: ToyModel, stage: ToyRows, tree: NodeTree, prompt: tuple[int, ...]) -> None:
    """Every certain token is ordinary decoding's, and what is held is that of nodes that may come true, and theirs."""
    certain, layers = tuple(tree.history), range(stage.first, stage.first + stage.num_layers)
    assert certain == model.text(prompt, len(certain)), f"{certain} is taken for certain"
    kept = certain[: len(stage.kept[0])]
    expected = [list(model.ordinary(kept).entries[layer]) if kept else [] for layer in layers]
    assert stage.kept == expected, f"kept entries are not those of {kept}"
    texts = {node.number: tuple(tree.text(node)) for node in tree.alive()}
    wrong = [text for text in texts.values() if text[: len(certain)] != certain[: len(text)]]
    assert not wrong, f"{wrong} are in flight behind {certain}"
    nodes = {node.number: texts[node.number] for node in tree.alive() if node.has_run and not node.is_kept}
    assert stage.nodes.keys() == nodes.keys(), f"{stage.nodes.keys()} are held, {nodes} have run and may come true"
    assert texts.keys() >= stage.begun.keys(), f"{stage.begun.keys()} run on, and {texts.keys()} may come true"
    for number, entries in (stage.nodes | stage.begun).items():
        text = texts[number]
        held = [model.ordinary(text).entries[layer][-1] for layer in layers]
        assert entries == held[: len(entries)], f"a node holds entries of another text than {text}"
