"""Runs the state machines on a real stage and a real transport; in the staged layout, for several requests at once."""

import os
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import load_tokenizer
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.models.stage.emulation import emulated
from ppd_runtime.models.stage.graphs import current_device
from ppd_runtime.models.trained.exit_heads import ModelHead, OracleHead, ShortlistSampler, TrainedHead
from ppd_runtime.models.trained.heads import HeadInfo, load_head
from ppd_runtime.pipeline.messages import (
    Begin,
    Cancel,
    CatchUp,
    ExitState,
    Failed,
    Finished,
    Message,
    Missing,
    Peers,
    PromptStates,
    Rows,
    Shutdown,
    Token,
)
from ppd_runtime.pipeline.ports import Call, Computation, Machine, Work, give_result
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.sampler import Sampler, TimedSampler
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.transport import Endpoint
from ppd_runtime.workers.bits import NO_BITS, Bits, bits_of
from ppd_runtime.workers.joint_passes import JointPasses
from ppd_runtime.workers.message_validator import MessageValidator
from ppd_runtime.workers.open_requests import OpenRequests
from ppd_runtime.workers.refusals import Refusals
from ppd_runtime.workers.roles import AnyHead, role_of
from ppd_runtime.workers.session import Decider, Session, next_in_turn
from ppd_runtime.workers.spec import WorkerSpec

_ASK_AGAIN = 8  # messages of an unknown request, before a worker asks for it again
_MOST_EARLY = 64  # such messages kept


class Worker:
    """One process of the pipeline: loads its layers when made, then serves requests.

    Each request has a machine of its own. A message goes to its request's machine at once. Machines that could compute
    wait for a turn: first those with needed work (certain tokens, prompts), then those that only speculate, and among
    equals the request whose last turn is longest ago. So no request starves, and a prompt's chunks alternate with the
    others' tokens.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        if spec.cores:
            os.sched_setaffinity(0, spec.cores)
        torch.set_num_threads(spec.threads)
        with current_device(spec.device):
            stage = load_stage(
                spec.info,
                spec.num_layers,
                spec.dtype,
                spec.device,
                spec.code,
                spec.first_layer,
                spec.guess_tokens,
                spec.rows_on,
            )
            self.stage = emulated(stage, spec.emulate)
            head = None if spec.rank == DECIDER else spec.exit_head
            self._trained_head = (
                load_head(head, self.stage.model, spec.guess_tokens) if isinstance(head, HeadInfo) else None
            )
            self._final_head = self.stage.head_over(self._trained_head.final) if self._trained_head else None
            self._role = role_of(spec, self.stage)
        self._refusals = Refusals(spec, MessageValidator(self.stage, spec))
        self._tokenizer = load_tokenizer(spec.info) if spec.rank == DECIDER else None
        self._policy = spec.new_policy()
        self._joint = JointPasses(self.stage, self._role.tree_range)
        self._requests = OpenRequests()
        self._sessions: dict[int, Session] = {}
        """Sessions of running requests, the oldest first."""
        self._past: dict[int, Session] = {}
        """Sessions that have ended here, and perhaps not everywhere."""
        self._active: Session | None = None
        self._turns = 0
        self._unknown = 0  # messages of later requests
        self._early: deque[Message] = deque(maxlen=_MOST_EARLY)  # from stages

    def bits(self) -> Bits:
        """Bits that must equal the other workers', with the model's files: hosts may have other files at one path."""
        if self.spec.rank == self.spec.layout.drafter:
            return NO_BITS  # another model's
        with current_device(self.spec.device):
            bits = bits_of(self.stage, with_head=not self.spec.guess_tokens)
        return replace(bits, hashes={**bits.hashes, "the model's files": model_fingerprint(self.spec.info)})

    def serve(self, endpoint: Endpoint) -> None:
        """Serve requests until told to shut down; an error is reported to the client and raised."""
        self._endpoint = endpoint
        torch.set_num_threads(self.spec.threads)
        try:
            with current_device(self.spec.device):  # this may be another thread than the one that has loaded
                self._serve_requests()
        except Exception as error:
            endpoint.send(CLIENT, Failed(self.spec.rank, 0, f"{type(error).__name__}: {error}"[:10_000]))
            raise

    def _serve_requests(self) -> None:
        while True:
            message = self._receive(self._time_left)
            if isinstance(message, Shutdown):
                return
            if message is not None:
                self._dispatch(message)
            elif self._sessions:
                self._give_turn()

    def _receive(self, time_left: Callable[[], float | None]) -> Message | None:
        """The next message that fits this worker, within `time_left`; peers' locations go to the endpoint."""
        while (message := self._endpoint.receive(time_left())) is not None:
            if isinstance(message, Peers):
                for address, location in zip(message.addresses, message.locations, strict=True):
                    self._endpoint.introduce(address, location)
                if self._role.resends_to_peers:
                    return message  # a new process there lacks what is under way
            elif not self._refusals.refuses(message, self._endpoint):
                return message
        return None

    def _time_left(self) -> float | None:
        """Seconds until a machine goes on without a message: 0 if one can now, None if none will."""
        earliest: float | None = None
        for session in self._sessions.values():
            if session.wanted.patience == 0:
                return 0
            if (deadline := session.wanted.deadline) is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        return None if earliest is None else max(earliest - time.perf_counter(), 0)

    def _give_turn(self) -> None:
        """Resume a machine without a message, and others whose rows fit into the same pass."""
        if len(self._sessions) == 1:
            (only,) = self._sessions.values()
            self._go_on(only, self._role.rows)
        else:
            self._choose_turn()
        self._compute()

    def _choose_turn(self) -> None:
        sessions = list(self._sessions.values())
        works = {session: session.wanted.work() for session in sessions if session.wanted.patience == 0}
        first = next_in_turn(sessions, works)
        work = works.pop(first, Work.NEEDED)
        if self._role.most_rows == 1:
            works.clear()
        self._go_on(first, self._room(work, works.values()))
        self._join(works, only_little=work == Work.LITTLE)

    def _join(self, works: dict[Session, Work], only_little: bool) -> None:
        """Resume others: those that also have little to do, or whose rows fit into the pass that is asked for."""
        while works and (only_little or self._joint):
            session = min(works, key=lambda session: (works[session], session.last_turn))
            work = works.pop(session)
            if (work == Work.LITTLE) == only_little:
                if (room := self._room(work, works.values())) <= 0:
                    return
                self._go_on(session, room)
            elif only_little:
                return

    def _room(self, work: Work, later: Collection[Work]) -> int:
        """Rows that a machine may have in the next pass if `later` works follow; certain tokens come first."""
        taken = self._joint.num_rows
        if work == Work.SPECULATION:
            return -(-(self._role.rows - taken) // (1 + len(later)))
        needed = sum(other == Work.NEEDED for other in later)
        return max(self._role.rows - taken - needed, min(self._role.most_rows - taken, 1))

    def _go_on(self, session: Session, rows: int) -> None:
        self._turns += 1
        session.last_turn = self._turns
        self._role.take_turn(session, rows, is_alone=len(self._sessions) == 1)
        session.note_reply(None, self._active is not session)
        self._resume(session, None)

    def _dispatch(self, message: Message) -> None:
        current = self._sessions.get(message.request)
        if current is not None and not isinstance(message, (Begin, Peers)):
            self._step(current, message)
            return
        if isinstance(message, Peers):
            for session in list(self._sessions.values()):
                self._step(session, message)
            return
        if isinstance(message, Begin):
            self._learn(message)
            current = self._sessions.get(message.request)
        if isinstance(message, Begin) and current is None and self._is_new(message):
            self._begin(message)
        elif current is not None and self._role.keeps_requests:  # asked, or attempted, once more
            current.show_progress()
            self._step(current, message)
        elif self.spec.rank != DECIDER:
            self._ask_for(message)
        else:
            self._answer(message)

    def _learn(self, begin: Begin) -> None:
        """Drop requests that are over but whose ends have not come; the client has moved on."""
        self._requests.learn(begin)
        for request in [request for request in self._sessions if request not in self._requests]:
            self._leave(self._sessions[request])
        self._past = {request: session for request, session in self._past.items() if request in self._requests}

    def _is_new(self, begin: Begin) -> bool:
        """Whether a request is new here, or begins again because the last stage was lost after its end here."""
        if begin.request in self._past:
            return self._role.follows and begin.epoch > self._past[begin.request].begin.epoch
        return begin.request in self._requests

    def _begin(self, begin: Begin) -> None:
        self._unknown = 0
        due = [message for message in self._early if message.request == begin.request]
        others = (message for message in self._early if message.request != begin.request)
        self._early = deque((message for message in others if message.request in self._requests), _MOST_EARLY)
        self._past.pop(begin.request, None)
        session = self._sessions[begin.request] = Session(
            self._endpoint, self.spec.rank, begin, self.spec.layout.tells_hits
        )
        self._policy.together(len(self._sessions))
        session.last_turn = self._turns
        sampler, fault = self._sampler(session)
        session.running = (
            self._decode(session, sampler, fault) if self.spec.rank == DECIDER else self._help(session, sampler)
        )
        self._resume(session, None)
        self._compute()
        for message in due:
            if begin.request in self._sessions:
                self._step(session, message)

    def _step(self, session: Session, reply: Message | None) -> None:
        """Resume a machine with a message, or without one, until its next wait."""
        session.note_reply(reply, self._active is not session)
        self._resume(session, reply)
        self._compute()

    def _compute(self) -> None:
        """Compute for the machines, and resume them, until all wait for messages."""
        while self._joint:
            for session, result in self._joint.results():
                self._resume(session, result)

    def _resume(self, session: Session, reply: Any) -> None:
        """Resume a machine until its next wait, or its end."""
        self._active, self.stage.recorder = session, session.recorder
        assert session.running is not None
        try:
            wanted = session.running.send(reply)
            alone = Computation if len(self._sessions) == 1 else Call  # nothing of another request can join it
            while isinstance(wanted, alone):
                wanted = give_result(session.running, wanted)
        except StopIteration:
            self._end(session)
            return
        except RequestError as error:  # from the decider: guesses fail nobody
            self._end(session, str(error))
            return
        if isinstance(wanted, Computation):
            session.ask()
            self._joint.add(session, wanted)
            return
        waits = wanted.patience and len(self._sessions) > 1
        others = sum(other.patience for other in self._sessions.values() if other is not session) if waits else 0
        session.wait_for(wanted, self.stage.layer_seconds, others)

    def _end(self, session: Session, error: str = "") -> None:
        """End a request whose machine has ended, or which has failed with `error`."""
        machine = session.machine
        if isinstance(machine, Decider):
            session.finish(machine, error)
        elif machine is not None:
            session.report(machine)
        self._past[session.begin.request] = session
        self._leave(session)
        if self.spec.rank != DECIDER:
            session.machine = None

    def _leave(self, session: Session) -> None:
        assert session.running is not None
        session.running.close()
        del self._sessions[session.begin.request]
        self._policy.together(len(self._sessions))
        self._active = None
        self._role.release(session)

    def _answer(self, message: Message) -> None:
        """Answer a client that has missed a request's end, or whose request this process has never seen."""
        session = self._past.get(message.request)
        if isinstance(message, Begin | Cancel) and session and isinstance(session.machine, Decider):
            session.finish_again(session.machine, message)
        elif isinstance(message, Cancel) and message.request in self._requests:
            self._endpoint.send(CLIENT, Finished.cut_short(message.request))

    def _ask_for(self, message: Message) -> None:
        """Ask the main process for the `Begin` of a running request, if it has not come or the request is over here."""
        request = message.request
        if isinstance(message, Begin) and self._role.follows and request in self._past:
            epoch = self._past[request].begin.epoch
            self._endpoint.send(DECIDER, Missing(self.spec.rank, request, 0, epoch))
        if request not in self._requests or request in self._past:
            return
        if isinstance(message, Token | ExitState | CatchUp | PromptStates | Rows):
            if self._unknown % _ASK_AGAIN == 0:
                self._endpoint.send(DECIDER, Missing(self.spec.rank, request, 0))
            self._unknown += 1
            if isinstance(message, PromptStates | Rows):
                self._early.append(message)

    def _sampler(self, session: Session) -> tuple[TimedSampler, str]:
        """A request's sampler; without what the text has to look like if that cannot be used here, and then why not."""
        info, begin, fault = self.spec.info, session.begin, ""
        params, size = begin.params, len(begin.prompt_ids)
        try:
            constraint = constraint_of(info, params, size)
        except ValueError as error:
            params, constraint, fault = params.without_form(), None, str(error)
        return TimedSampler(params, session.recorder, size, info.eos_token_ids, constraint), fault

    def _decode(self, session: Session, sampler: Sampler, fault: str) -> Machine:
        """The running machine of the process that decides tokens; with a `fault` it fails."""
        stop = StopRule(sampler.params, self.spec.info.eos_token_ids, self._tokenizer, session.begin.prompt_ids)
        session.machine = decider = self._role.decider(session, sampler, self._policy)
        return _fail(fault) if fault else decider.decode(sampler, stop)

    def _help(self, session: Session, sampler: Sampler) -> Machine:
        """The running machine of any other process."""
        session.machine = helper = self._role.helper(session, self._exit_head(sampler, session.recorder), sampler)
        return helper.serve()

    def _exit_head(self, sampler: Sampler, recorder: Recorder | None = None) -> AnyHead:
        spec = self.spec
        if isinstance(spec.exit_head, OracleHead):
            return spec.exit_head
        ranking = ShortlistSampler(sampler, spec.guess_tokens, spec.info.vocab_size) if spec.guess_tokens else sampler
        if self._trained_head is not None:
            return TrainedHead(self._trained_head, ranking, recorder, self._final_head, self.stage)
        return ModelHead(self.stage, ranking)


def _fail(fault: str) -> Machine:
    """A machine of a request that cannot be decoded."""
    raise RequestError(fault)
    yield  # makes it a generator
