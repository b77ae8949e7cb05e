"""Runs the state machines on a real stage and a real transport, request after request."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ppd_runtime.models.checkpoint.description import load_tokenizer
from ppd_runtime.models.compiled.graphs import current_device
from ppd_runtime.models.opening import load_stage
from ppd_runtime.models.stage.row_stage import RowStage
from ppd_runtime.models.trained.exit_heads import OracleHead, SharedHead, TrainedHead
from ppd_runtime.models.trained.heads import HeadInfo, load_head
from ppd_runtime.pipeline.machine import Machine, WaitFor
from ppd_runtime.pipeline.messages import (
    CLIENT,
    MAIN,
    NOT_ASKED,
    Begin,
    Cancel,
    CatchUp,
    Entries,
    ExitState,
    Failed,
    Finished,
    HeadStart,
    Message,
    Missing,
    Peers,
    PromptStates,
    Report,
    Rows,
    Shutdown,
    Token,
    Tokens,
)
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.span_messages import pack
from ppd_runtime.pipeline.speculation_backoff import SpeculationBackoff
from ppd_runtime.pipeline.staged.chances import Calibration
from ppd_runtime.pipeline.staged.first_stage import MOST_NODES, FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.process_names import named_process
from ppd_runtime.results import PathStats
from ppd_runtime.sampling import Sampler, ShortlistSampler, TimedSampler
from ppd_runtime.text import StopRule
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tracing.spans import Kind
from ppd_runtime.transport import Endpoint
from ppd_runtime.workers.bits import Bits, bits_of
from ppd_runtime.workers.message_validator import MessageValidator
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
_LONGEST_HOLD_S = 1.0
_MOST_HELD = 2**16
_STAMPED = (HeadStart, Entries, Rows)
"""What the main process waits for."""
_ASK_AGAIN = 8  # messages of a request that it knows nothing of, before a worker asks for it again
_MOST_EARLY = 64  # of them that it keeps


class ShutdownRequested(Exception):
    """The client wants the worker to end."""


@dataclass
class _Clock:
    """Times of one request, taken where the machine waits and sends."""

    began: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    first_ledger: LatencyBreakdown | None = None
    stalled: float = 0.0


class Worker:
    """One process of the pipeline: loads its layers when made, then serves requests."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        if spec.cores:
            os.sched_setaffinity(0, spec.cores)
        torch.set_num_threads(spec.threads)
        with current_device(spec.device):
            self.stage = load_stage(
                spec.info,
                spec.num_layers,
                spec.dtype,
                spec.device,
                spec.code,
                spec.emulate,
                spec.first_layer,
                spec.guess_tokens,
            )
            head = None if spec.rank == MAIN else spec.exit_head
            self._trained_head = (
                load_head(head, self.stage.model, spec.guess_tokens) if isinstance(head, HeadInfo) else None
            )
        head_start = spec.info.num_layers - spec.exit_layer
        self._validator = MessageValidator(self.stage, spec.dtype, spec.info.vocab_size, head_start, spec.num_subs)
        self._recorder = self.stage.recorder
        self._subs = range(1, spec.num_subs + 1)
        self._tokenizer = load_tokenizer(spec.info) if spec.rank == MAIN else None
        self._backoff = SpeculationBackoff()
        self._row_stage = RowStage(self.stage, 2 * MOST_NODES) if spec.cuts else None
        self._calibration = Calibration() if spec.cuts else None
        self._request = 0  # the newest that has begun
        self._pending: Begin | None = None
        self._main: MainProcess | LastStage | None = None
        self._finished: Finished | None = None
        self._unknown = 0  # messages of later requests
        self._early: deque[Message] = deque(maxlen=_MOST_EARLY)  # stages' of them …
        self._due: deque[Message] = deque()  # … and of the request that has begun since
        self._attempt = 0  # the newest of the newest request, at a stage that is not the last
        self._hold_tokens = False
        self._held: list[Token] = []  # one behind the other
        self._released = 0.0

    def bits(self) -> Bits:
        """What to compare with the other workers' before it serves."""
        with current_device(self.spec.device):
            return bits_of(self.stage)

    def serve(self, endpoint: Endpoint) -> None:
        """Serve requests until told to shut down; an error is reported to the client and raised."""
        self._endpoint = endpoint
        torch.set_num_threads(self.spec.threads)
        try:
            with current_device(self.spec.device):  # this may be another thread than the one that has loaded
                self._serve_requests()
        except ShutdownRequested:
            return
        except Exception as error:
            endpoint.send(CLIENT, Failed(self.spec.rank, 0, f"{type(error).__name__}: {error}"[:10_000]))
            raise

    def _serve_requests(self) -> None:
        while True:
            message, self._pending = self._pending or self._receive(lambda: None), None
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Begin) and self._is_new(message):
                self._serve_request(message)
            elif message is not None:
                self._answer(message)

    def _is_new(self, begin: Begin) -> bool:
        """Whether a request has not ended here; a last stage that is lost behind its end has it begin again."""
        if begin.request > self._request:
            return True
        return begin.request == self._request and self._follows and begin.epoch > self._attempt

    def _receive(self, time_left: Callable[[], float | None]) -> Message | None:
        """The next message that fits this worker, in so many seconds; where peers are is the endpoint's business."""
        while (message := self._endpoint.receive(time_left())) is not None:
            if isinstance(message, Peers):
                for address, location in zip(message.addresses, message.locations, strict=True):
                    self._endpoint.introduce(address, location)
                if self._row_stage and self.spec.rank == MAIN:
                    return message  # whoever is new there lacks what is under way
            elif self._validator.takes(message):
                return message
            else:
                sender, kind = named_process(message.sender, self.spec.num_stages), type(message).__name__
                logger.warning("left out what %s sent, a %s: not of this model", sender, kind)
        return None

    def _answer(self, message: Message) -> None:
        """Between requests: the client may have missed the last one's end, or this process the next one's beginning."""
        if self.spec.rank != MAIN:
            self._ask_for(message)
        elif isinstance(message, Cancel) and message.request > self._request:
            self._endpoint.send(CLIENT, Finished.cut_short(message.request))
        elif isinstance(message, Begin | Cancel) and self._finished and message.request == self._request:
            if isinstance(message, Begin) and self._main:
                self._main.repeat(len(message.delivered))
                self._release_tokens()
            self._endpoint.send(CLIENT, self._finished)

    def _ask_for(self, message: Message) -> None:
        """Ask the main process for a request that it has begun, where its `Begin` has not come or this is over."""
        if isinstance(message, Begin) and self._follows and message.request == self._request:
            self._endpoint.send(MAIN, Missing(self.spec.rank, message.request, 0, self._attempt))
        if message.request > self._request and isinstance(message, Token | ExitState | CatchUp | PromptStates | Rows):
            if self._unknown % _ASK_AGAIN == 0:
                self._endpoint.send(MAIN, Missing(self.spec.rank, message.request, 0))
            self._unknown += 1
            if isinstance(message, PromptStates | Rows):
                self._early.append(message)

    def _serve_request(self, begin: Begin) -> None:
        self._request, self._unknown, self._finished = begin.request, 0, None
        self._due = deque(message for message in self._early if message.request == begin.request)
        self._early.clear()
        self._clock = _Clock()
        self._recorder.begin(begin.traced)
        sampler = TimedSampler(begin.params, self._recorder, len(begin.prompt_ids))
        if self.spec.rank == MAIN:
            self._decode(begin, sampler)
        else:
            self._help(begin, sampler)

    def _decode(self, begin: Begin, sampler: Sampler) -> None:
        main = self._main = self._decider(begin)
        stop = StopRule(sampler.params, self.spec.info.eos_token_ids, self._tokenizer, begin.prompt_ids)
        held = not begin.live and begin.params.logprobs is None
        self._hold_tokens, self._released = held, time.perf_counter()
        self._drive(main.decode(sampler, stop), begin.request)
        self._release_tokens()
        self._recorder.pause()
        ledger = self._recorder.ledger()
        finished = Finished(
            sender=MAIN,
            request=begin.request,
            reason=main.finish_reason,
            num_tokens=len(main.history) - len(begin.prompt_ids),
            path=PathStats(
                latency_s=time.perf_counter() - self._clock.began,
                time_to_first_token_s=self._clock.first_token,
                stall_s=self._clock.stalled,
                main_layer_passes=main.layer_passes,
                main_recomputed_layer_passes=main.recomputed_layer_passes,
                ledger=ledger,
                first_token_ledger=self._clock.first_ledger or ledger,
            ),
        )
        self._ship_spans(begin.request)
        self._endpoint.send(CLIENT, finished)
        self._finished = finished

    def _decider(self, begin: Begin) -> MainProcess | LastStage:
        spec = self.spec
        if self._row_stage:
            return LastStage(self._row_stage, spec.info.num_layers, self._subs, self._send, begin)
        asked = not spec.runs_ahead
        return MainProcess(self.stage, spec.exit_layer, self._subs, self._send, begin, asked, self._backoff)

    def _help(self, begin: Begin, sampler: Sampler) -> None:
        report = self._speculate(begin, sampler) if self._row_stage is None else self._follow(begin, sampler)
        self._ship_spans(begin.request)
        self._endpoint.send(CLIENT, report)

    def _speculate(self, begin: Begin, sampler: Sampler) -> Report:
        """As one of the paper's sub-processes."""
        spec, head = self.spec, self._exit_head(sampler)
        sub: SubProcess | RunAheadSubProcess
        if spec.runs_ahead:
            sub = RunAheadSubProcess(self.stage, head, spec.rank, self._send, begin)
        else:
            sub = SubProcess(self.stage, head, spec.rank, self._subs, spec.k, self._send, begin, ranks_ahead=True)
        self._drive(sub.serve(), begin.request)
        return Report(spec.rank, begin.request, sub.layer_passes, sub.coherence_layer_passes)

    def _follow(self, begin: Begin, sampler: Sampler) -> Report:
        """As one of several stages, but the last."""
        spec, stage, head = self.spec, self._row_stage, self._exit_head(sampler)
        assert stage is not None
        if spec.rank == 1:
            first = FirstStage(
                stage,
                head,
                spec.num_stages,
                spec.k,
                spec.rows,
                self._send,
                begin,
                self._calibration,
                spec.repetitions,
                only_chains=spec.emulate is None and stage.most_together == 1,
                row_cost=spec.row_cost,
            )
            self._drive(first.serve(), begin.request)
            self._attempt = first.begin.epoch
            return Report(spec.rank, begin.request, first.layer_passes, 0, tuple(first.first_boundary))
        middle = MiddleStage(stage, head, spec.rank, spec.num_stages, spec.k, self._send, begin)
        self._drive(middle.serve(), begin.request)
        self._attempt = middle.begin.epoch
        return Report(spec.rank, begin.request, middle.layer_passes, 0)

    def _ship_spans(self, request: int) -> None:
        recorded = self._recorder.spans(self.spec.rank)
        for message in pack(recorded, request) if recorded else ():
            self._endpoint.send(CLIENT, message)

    def _exit_head(self, sampler: Sampler) -> OracleHead | TrainedHead | SharedHead:
        spec = self.spec
        if isinstance(spec.exit_head, OracleHead):
            return spec.exit_head
        tokens = spec.guess_tokens
        ranking = ShortlistSampler(sampler, tokens, spec.info.vocab_size) if tokens else sampler
        if self._trained_head is not None:
            return TrainedHead(self._trained_head, ranking, self._recorder)
        return SharedHead(self.stage, ranking)

    def _drive(self, machine: Machine, request: int) -> None:
        """Run a machine to its end: grant its wishes with messages of its request."""
        reply: Message | None = None
        while True:
            try:
                wanted = machine.send(reply)
            except StopIteration:
                return
            reply = self._grant(wanted, request)
            if self._pending:
                machine.close()  # the client has moved on to another request
                return

    def _grant(self, wanted: WaitFor, request: int) -> Message | None:
        began = time.perf_counter()
        if wanted.patience and wanted.deadline is None:
            wanted.deadline = began + max(wanted.patience * self.stage.layer_seconds, wanted.least_s)
        while True:
            message = self._due.popleft() if self._due else self._receive(lambda: self._time_left(wanted))
            if message is None or isinstance(message, Peers):
                break
            if isinstance(message, Shutdown):
                raise ShutdownRequested
            if isinstance(message, Begin) and message.request > request:
                self._pending, message = message, None
                break
            if message.request == request and (self._takes_begin or not isinstance(message, Begin)):
                break
            if self.spec.rank != MAIN:
                self._ask_for(message)
        self._note_receipt(wanted, began, time.perf_counter(), message)
        return message

    @property
    def _follows(self) -> bool:
        """Whether this is a stage that is not the last."""
        return self._row_stage is not None and self.spec.rank != MAIN

    @property
    def _takes_begin(self) -> bool:
        """Whether a request that is served may begin again: the client asks, or the stages attempt it once more."""
        return self.spec.rank == MAIN or self._row_stage is not None

    def _note_receipt(self, wanted: WaitFor, began: float, ended: float, message: Message | None) -> None:
        """Of a wait, what came before the message was sent was its sender's time, the rest was its way's."""
        if wanted.patience != 0:
            self._clock.stalled += ended - began
            sent = message.sent_at if isinstance(message, _STAMPED) else ended
            sent = min(max(sent, began), ended)
            self._recorder.note(Kind.WAIT, began, sent)
            began = sent
        peer = CLIENT if message is None else message.sender
        self._recorder.note_message(Kind.RECEIVE, began, ended, peer, message)

    def _time_left(self, wanted: WaitFor) -> float | None:
        if wanted.deadline is None:
            return wanted.patience  # 0 or None
        return max(wanted.deadline - time.perf_counter(), 0)

    def _send(self, addresses: Sequence[int], message: Message) -> None:
        if isinstance(message, _STAMPED):
            object.__setattr__(message, "sent_at", time.perf_counter())  # a copy takes ten microseconds
        for address in addresses:
            if address == CLIENT and self._hold_tokens and isinstance(message, Token):
                self._hold(message)
            else:
                self._deliver(address, message)
        if isinstance(message, Token):
            self._note_token(addresses, message)

    def _note_token(self, addresses: Sequence[int], message: Token) -> None:
        if not self._clock.first_token:
            self._clock.first_token = time.perf_counter() - self._clock.began
            self._clock.first_ledger = self._recorder.ledger()
        if CLIENT in addresses and message.winner != NOT_ASKED and not self.spec.cuts:
            self._recorder.note_verdict(message.position, message.token_id, message.winner)

    def _deliver(self, address: int, message: Message) -> None:
        began = time.perf_counter()
        self._endpoint.send(address, message)
        self._recorder.note_message(Kind.SEND, began, time.perf_counter(), address, message)

    def _hold(self, token: Token) -> None:
        """Keep a token for the client back for a while; it hears often enough to know that this process lives."""
        if self._held and token.position != self._held[-1].position + 1:  # the client is told some again
            self._release_tokens()
        self._held.append(token)
        if len(self._held) >= _MOST_HELD or time.perf_counter() - self._released > _LONGEST_HOLD_S:
            self._release_tokens()

    def _release_tokens(self) -> None:
        if held := self._held:
            token_ids, winners = [token.token_id for token in held], [token.winner for token in held]
            self._deliver(CLIENT, Tokens(MAIN, self._request, held[0].position, token_ids, winners))
            held.clear()
        self._released = time.perf_counter()
