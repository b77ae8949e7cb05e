"""What of a suspended process can still matter: two that are equal in it behave alike from there on.

It is read off the stack and the objects on it, times and counts for statistics left out. That what is left out never
matters is itself tested: `test_merged_states_behave_alike`.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import Enum
from types import CodeType, FrameType, GeneratorType

from guessing_turns import TakesTurns
from torch import Tensor

from model_check.processes import Caller, Process, SharedExchange
from model_check.toy import ToyStage
from model_check.toy_rows import ToyRows
from ppd_runtime.client.exchange import MessageExchange
from ppd_runtime.client.request import RequestClient
from ppd_runtime.pipeline.messages import Finished, Message
from ppd_runtime.pipeline.paper.main_process import MainProcess, _Heard
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.ports import WaitFor
from ppd_runtime.pipeline.speculation_policy import Always
from ppd_runtime.pipeline.staged.arrivals import Arrivals
from ppd_runtime.pipeline.staged.chances import GuessRecord, Successors
from ppd_runtime.pipeline.staged.decider import StagedDecider
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.prompt import ArrivingPrompt
from ppd_runtime.pipeline.staged.row_chooser import RowChooser
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.pipeline.staged.tree import Node, NodeTree, RowState, Text
from ppd_runtime.text import StopRule
from ppd_runtime.workers.open_requests import OpenRequests
from ppd_runtime.workers.roles import StagedRole
from ppd_runtime.workers.session import Session
from ppd_runtime.workers.worker import Worker

_COUNTS = {"layer_passes", "recomputed_layer_passes", "coherence_layer_passes", "first_boundary"}
_READ = (
    Worker,
    Session,
    OpenRequests,
    MessageExchange,
    MainProcess,
    SubProcess,
    RunAheadSubProcess,
    Always,
    TakesTurns,
    _Heard,
    StopRule,
    ToyStage,
    RequestClient,
    FirstStage,
    MiddleStage,
    LastStage,
    SingleStage,
    RowChooser,
    Arrivals,
    ArrivingPrompt,
    Successors,
    GuessRecord,
    ToyRows,
)
_CLOCKS = {"recorder", "last_turn", "patience", "_began", "_released", "_asked", "_first_token", "_stalled", "_told"}
_UNREAD: dict[type, set[str]] = {
    Worker: {"_active"},
    SharedExchange: {"_lock", "_free", "heard_at"},
    Session: _CLOCKS | {"_first_ledger"},
    RunAheadSubProcess: {"_forks"},
    FirstStage: {"rows"},
    SingleStage: {"rows", "asked", "foreseen"},
}
"""What only times and turns depend on, or what is told of elsewhere."""
_DEAD = {"caller", "message", "reply", "hidden", "now", "nodes", "root", "certain"}
"""Variables that are set again before they are read, wherever a process can wait."""
_LIVE = {"_go_on": {"token", "stop"}, "_next_message": {"self", "message"}}
"""Of a frame that holds much of the token before, or a message while it looks after the workers, what is read again."""


class Essence:
    """Reads processes; `number_of` gives the number of a message that is known already."""

    def __init__(self, number_of: Callable[[Message], int | None]) -> None:
        self._number_of = number_of
        self._seen: dict[int, int] = {}
        self._now = 0.0

    def of_process(self, process: Process) -> object:
        """Its stack, from the wait outwards, and all that hangs on it."""
        self._seen, self._now = {}, process.now
        frames = list(_frames(process.gr_frame.f_back))
        stack = [self._of_frame(frame) for frame in frames]
        return process.timeout, sorted(Counter(r for r, _ in process.delivered).items()), process.main_lives, stack

    def of_message(self, message: Message) -> object:
        """Its fields."""
        values = ((field.name, getattr(message, field.name)) for field in dataclasses.fields(message))
        if isinstance(message, Finished):
            return "Finished", message.request, message.reason, message.num_tokens
        return type(message).__name__, [self._of(value) for name, value in values if name not in _COUNTS]

    def _of_frame(self, frame: FrameType | None) -> object:
        if frame is None:
            return "over"
        code, variables = frame.f_code, dict(frame.f_locals)
        if "forks" in variables:  # only whether there were more since matters
            variables["forks"] = variables["forks"] == variables["self"]._forks
        kept = _LIVE.get(code.co_name, variables.keys() - _DEAD)
        return (
            *_name(code),
            frame.f_lasti,
            [(name, self._of(variables[name])) for name in sorted(kept & variables.keys())],
        )

    def _of_generator(self, generator: GeneratorType) -> object:
        inner = generator.gi_yieldfrom
        frame = self._of_frame(generator.gi_frame)
        return frame, self._of_generator(inner) if isinstance(inner, GeneratorType) else None

    def _of(self, value: object) -> object:
        if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
            return value
        if isinstance(value, Message):
            number = self._number_of(value)
            return self.of_message(value) if number is None else ("message", number)
        for kinds, read in self._READERS:
            if isinstance(value, kinds):
                return read(self, value)
        return type(value).__name__  # settings, endpoints, functions; a float is a time

    def _of_tensor(self, tensor: Tensor) -> object:
        return tensor.tolist()

    def _of_node(self, node: Node) -> object:
        if id(node) in self._seen or node.is_dropped:
            return "node", self._seen.get(id(node))
        self._seen[id(node)] = len(self._seen)
        return [self._of(getattr(node, field.name)) for field in dataclasses.fields(node)]

    def _of_tree(self, tree: NodeTree) -> object:
        """Its nodes in their order, which decides between guesses that are as good as each other."""
        return self._of(tree.history), [self._of(node) for node in tree.alive()]

    def _of_object(self, value: object) -> object:
        name = type(value).__name__
        if id(value) in self._seen:
            return name, self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        fields = vars(value)
        return name, [(key, self._of_field(value, key, fields[key])) for key in sorted(fields.keys() - _COUNTS)]

    def _of_field(self, owner: object, name: str, value: object) -> object:
        if isinstance(owner, RequestClient) and isinstance(value, float):
            return value <= self._now
        if isinstance(owner, MainProcess | StagedDecider) and name == "told":
            return [(message.position, message.token_id) for message in owner.told]
        if isinstance(owner, SubProcess) and name == "_winners":  # asked of positions that are not in the cache yet
            held = owner.stage.length(0)
            return sorted(item for item in owner._winners.items() if item[0] >= held)
        if isinstance(owner, Worker) and name in ("stage", "_role", "_turns", "_past"):
            return self._of_worker(owner, name)
        return None if name in _UNREAD.get(type(owner), ()) else self._of(value)

    def _of_worker(self, worker: Worker, name: str) -> object:
        if name == "stage":
            return None if worker._role.tree_range or not worker._sessions else self._of(worker.stage)
        if name == "_role":
            return self._of(worker._role._calibration) if isinstance(worker._role, StagedRole) else None
        if name == "_turns":
            return self._of_turns([*worker._sessions.items()])
        return [(request, self._of_past(session)) for request, session in sorted(worker._past.items())]

    @staticmethod
    def _of_turns(sessions: list[tuple[int, Session]]) -> object:
        """Whose turn comes before whose, and whose patience is over before whose."""
        by_turn = sorted(sessions, key=lambda item: item[1].last_turn)
        by_deadline = sorted(sessions, key=lambda item: item[1].wanted.deadline or 0.0)
        return [request for request, _ in by_turn], [request for request, _ in by_deadline]

    def _of_caller(self, caller: Caller) -> object:
        return "over" if caller.dead else [self._of_frame(frame) for frame in _frames(caller.gr_frame)]

    def _of_past(self, session: Session) -> object:
        """Only what it tells once more."""
        main = session.machine
        told = main and (len(main.begin.delivered), self._of_field(main, "told", None))
        return session.begin.epoch, told, session.finished and self.of_message(session.finished)

    _READERS: tuple[tuple[object, Callable[["Essence", object], object]], ...] = (
        (Tensor, _of_tensor),
        (RowState, lambda self, state: self._of_tensor(state.alone())),
        (Node, _of_node),
        (NodeTree, _of_tree),
        (GeneratorType, _of_generator),
        (Caller, _of_caller),
        (list | tuple | deque | range | Text, lambda self, values: [self._of(value) for value in values]),
        (dict, lambda self, values: [(key, self._of(values[key])) for key in sorted(values)]),
        (WaitFor, lambda self, wanted: wanted.patience),
        (_READ, _of_object),
    )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno
