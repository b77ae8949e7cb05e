"""The real worker loop and the real client, each suspended wherever it waits for a message.

Nothing of them is modelled: `Worker.serve` runs over a toy stage and an endpoint whose `receive` hands control to
whoever explores; `RequestClient` runs with a clock that jumps over every silence.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch
from weakref import WeakSet

import torch
from greenlet import getcurrent, greenlet
from guessing_turns import TakesTurns

from model_check.toy import VOCAB, MainStage, PatternHead, ToyModel, ToyStage
from model_check.toy_rows import BoundaryPattern, ToyRows
from ppd_runtime.client import exchange
from ppd_runtime.client import request as calls
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.pipeline.messages import Begin, Message, Report, Token, Tokens
from ppd_runtime.pipeline.paper import main_process, run_ahead, sub_process
from ppd_runtime.pipeline.staged import arrivals, follower
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER, Layout, PaperLayout, StagedLayout
from ppd_runtime.workers import roles, session, worker
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker

_MESSAGE_S, _SILENCE_S = 1e-4, 10.0  # what a message and a silence take by the client's clock


@dataclass(frozen=True)
class Scenario:
    """A toy model, a layout, and how much text."""

    model: ToyModel
    k: int = 1
    workers: int = 1
    new_tokens: int = 3
    requests: int = 1
    at_once: bool = False
    """Whether the client makes them all at once; else one after the other."""
    run_ahead: bool = False
    live: bool = True
    """Whether the client gets each token at once; else they come at the end, when none is lost."""
    cancelled_behind: int = 0
    """New tokens behind which the client loses interest in the first request; 0: never."""
    eos: int | None = None
    """The token that ends a text."""
    rests: bool = False
    """Whether the sub-processes are left alone now and then: after two wrong candidates in a row."""
    cuts: tuple[int, ...] = ()
    """The staged layout's borders, one for each worker; empty: the paper's layout, or a single stage."""
    single: bool = False
    """Whether there is a single stage."""
    rows: int = 1
    """Of a pass of the staged layout."""
    trees: bool = False
    """Whether they may stand in several branches; else one behind the other."""
    mendable: tuple[type[Message], ...] = ()
    """Messages of stages that alone meet with mishaps, none of which may take another attempt; empty: whatever may."""

    @property
    def staged(self) -> bool:
        """Whether it is the staged layout."""
        return bool(self.cuts) or self.single

    @property
    def num_addresses(self) -> int:
        """Workers and the client; the client is the last."""
        return self.workers + 2

    def spec(self, rank: int) -> WorkerSpec:
        """What a worker is started with."""
        ends = frozenset() if self.eos is None else frozenset([self.eos])
        info = ModelInfo("toy", Path(), self.model.num_layers, VOCAB, None, ends)
        return WorkerSpec(
            rank=rank,
            layout=self._layout(),
            info=info,
            dtype=torch.float32,
            device="cpu",
            threads=torch.get_num_threads(),
            exit_head=self._head(rank),
        )

    def _layout(self) -> Layout:
        if self.staged:
            return StagedLayout(self.cuts, self.rows, self.k)
        return PaperLayout(self.k, self.model.exit_layer, self.workers, self.run_ahead)

    def _head(self, rank: int) -> OracleHead:
        if self.cuts and rank != DECIDER:
            return BoundaryPattern((), 0.0, VOCAB, 0, self.model, rank, self.cuts[rank - 1])
        return PatternHead((), 0.0, VOCAB, model=self.model)

    def begin(self, request: int) -> Begin:
        """A request as the client sends it first."""
        params = SamplingParams(self.new_tokens, ignore_eos=self.eos is None)
        under_way = tuple(range(1, request)) if self.at_once else ()
        prompt = list(self.model.prompts[request - 1])
        return Begin(CLIENT, request, prompt, params, self.live, under_way=under_way)

    def expected(self) -> list[tuple[int, int]]:
        """All that the client may get: request and token."""
        return [(request, token) for request in range(1, self.requests + 1) for token in self._wanted(request)]

    def _wanted(self, request: int) -> tuple[int, ...]:
        prompt = self.model.prompts[request - 1]
        new = self.model.text(prompt, len(prompt) + self.new_tokens)[len(prompt) :]
        new = new[: new.index(self.eos) + 1] if self.eos in new else new
        return new[: self.cancelled_behind] if self.cancelled_behind and request == 1 else new


_UNDER_WAY: "WeakSet[Suspended]" = WeakSet()


class Suspended(greenlet):
    """Code that waits in the middle of a call; its frames hold itself, so nobody collects it who does not end it."""

    def __init__(self, code: Callable[..., None]) -> None:
        super().__init__(code)
        _UNDER_WAY.add(self)

    def end(self) -> None:
        """It does not go on."""
        if not self.dead:
            self.parent = getcurrent()
            self.throw()


class Process(Suspended):
    """Runs `serve` from one wait to the next."""

    def __init__(self, serve: Callable[["Process"], None]) -> None:
        super().__init__(serve)
        self.sent: list[tuple[int, Message]] = []
        """Since it was resumed."""
        self.timeout: float | None = None
        """0, 1 or None: whether it only looks for a message, loses patience some time, or waits as long as it takes."""
        self.now = 1000.0
        self.main_lives = 1
        self.delivered: list[tuple[int, int]] = []
        """To the caller of the client: request and token."""
        self.worker: Worker | None = None

    def begin(self) -> None:
        """Run to the first wait."""
        self.switch(self)

    def resume(self, message: Message | None) -> None:
        """Go on with a message or the end of the wait."""
        self.sent = []
        self.now += _SILENCE_S if message is None and self.timeout else _MESSAGE_S
        self.switch(message)

    def send(self, address: int, message: Message) -> None:
        """An endpoint's."""
        self.sent.append((address, message))

    def receive(self, timeout: float | None) -> Message | None:
        """An endpoint's: let somebody else decide what comes."""
        self.timeout = timeout and 1.0
        return self.parent.switch()

    def introduce(self, address: int, location: str) -> None:
        """An endpoint's: everybody knows where the others are."""

    def close(self) -> None:
        """An endpoint's: nothing to release."""


@dataclass
class _Supervisor:
    """Sees that there is a new main process, after the last words of the one before, and finds nothing else to do."""

    process: Process
    lives_seen: int = 1

    def starts(self, rank: int) -> int:
        return self.process.main_lives if rank == DECIDER else 1

    def is_serving(self, rank: int) -> bool:
        return True

    def check(self, hear: Callable[[], None]) -> None:
        if self.lives_seen != self.process.main_lives:
            self.lives_seen = self.process.main_lives
            hear()

    note_success = note_words = note_silence = lambda *_: None

    def replace(self, rank: int, reason: str) -> None:
        raise AssertionError(f"worker {rank} is taken for lost: {reason}")


@dataclass
class _Workers:
    endpoint: "Process | CallersEndpoint"
    supervisor: _Supervisor


class _Clock:
    @staticmethod
    def monotonic() -> float:
        return getcurrent().now


class Caller(Suspended):
    """One of several threads that make a request each."""

    def __init__(self, make: Callable[[int], None], request: int) -> None:
        super().__init__(make)
        self.request = request
        self.timeout: float | None = None

    @property
    def now(self) -> float:
        """By the client's clock."""
        return self.parent.now


class CallersEndpoint:
    """Has `SharedExchange.run` listen where a caller does."""

    def __init__(self, process: Process) -> None:
        self.send = process.send

    def receive(self, timeout: float | None) -> Message | None:
        """An endpoint's."""
        return getcurrent().parent.switch(timeout)


class SharedExchange(exchange.MessageExchange):
    """Has a caller whose inbox is empty wait for `run`, which listens for all of them."""

    def receive(self, request: int, timeout: float) -> Message | None:
        """As the exchange does."""
        caller = getcurrent()
        if not self._inboxes[request]:
            caller.timeout = timeout
            caller.parent.switch(None)
        return self._inboxes[request].popleft() if self._inboxes[request] else None

    def run(self, callers: list[Caller], process: Process) -> None:
        """Go on until all callers have come to their ends; a silence is everybody's."""
        for caller in callers:
            self._resume(process, caller, caller.request)
        while callers := [caller for caller in callers if not caller.dead]:
            message = process.receive(min(caller.timeout for caller in callers))
            if message is not None:
                self._put(message)
            for caller in callers:
                if message is None or message.request == caller.request:
                    self._resume(process, caller)

    @staticmethod
    def _resume(process: Process, active: Caller, *given: int) -> None:
        listens = active.switch(*given)
        while listens is not None:
            listens = active.switch(process.receive(listens))


def start_worker(scenario: Scenario, rank: int) -> Process:
    """A worker that has been started, up to its first wait."""

    def serve(process: Process) -> None:
        process.worker = Worker(scenario.spec(rank))
        if scenario.rests:
            process.worker._policy = TakesTurns(guesses=2, rests=1)
        process.worker.serve(process)

    def load_stage(info: ModelInfo, last: int, *rest: object) -> ToyStage | ToyRows:
        if scenario.staged:
            return ToyRows(scenario.model, scenario.spec(rank).first_layer, last, scenario.trees)
        return (MainStage if rank == DECIDER else ToyStage)(scenario.model, last)

    process = Process(serve)
    with patch.object(worker, "load_stage", load_stage), patch.object(roles, "TreeRange", lambda stage, *_: stage):
        process.begin()
    return process


def start_client(scenario: Scenario) -> Process:
    """Somebody who makes the requests one after the other, up to the first wait."""

    def serve(process: Process) -> None:
        endpoint = CallersEndpoint(process) if scenario.at_once else process
        workers = _Workers(endpoint, _Supervisor(process))
        network = (SharedExchange if scenario.at_once else exchange.MessageExchange)(workers)

        def make(request: int) -> None:
            call = calls.RequestClient(network, scenario.begin(request))
            for number, message in enumerate(call, 1):
                process.delivered.append((request, message.token_id))
                if request == 1 and number == scenario.cancelled_behind:
                    call.cancel()
                    break

        requests = range(1, scenario.requests + 1)
        if scenario.at_once:
            network.run([Caller(make, request) for request in requests], process)
        else:
            for request in requests:
                make(request)

    process = Process(serve)
    process.begin()
    return process


@contextlib.contextmanager
def small_world() -> Iterator[None]:
    """Constants so small that few tokens reach every branch, no tokenizer, and the client's own clock.

    All processes end with it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(calls, "time", _Clock))
        stack.enter_context(patch.object(exchange, "time", _Clock))
        stack.enter_context(patch.object(worker, "load_tokenizer", lambda info: None))
        for module, name, value in (
            (session, "_LONGEST_HOLD_S", math.inf),
            (session, "_SILENCE_S", math.inf),
            (session, "_MOST_HELD", 2),
            (worker, "_ASK_AGAIN", 2),
            (sub_process, "_ASK_AGAIN", 2),
            (run_ahead, "_ASK_AGAIN", 2),
            (run_ahead, "_MOST_OWED", 2),
            (main_process, "_MOST_CAUGHT_UP", 3),
            (main_process, "_MOST_ABSENCES", 1),
            (main_process, "_SECOND_CHANCE", 4),
            (worker, "_MOST_EARLY", 2),
            (follower, "_ASK_AGAIN", 2),
            (follower, "_MOST_EARLY", 2),
            (follower, "_MOST_SENT", 5),
            (arrivals, "_MOST_ORPHANS", 1),
        ):
            stack.enter_context(patch.object(module, name, value))
        try:
            yield
        finally:
            for suspended in list(_UNDER_WAY):
                suspended.end()


def without_counts(address: int, message: Message) -> Message:
    """The message without what is for statistics only."""
    if address != CLIENT:
        return message
    if isinstance(message, Token):
        return replace(message, winner=0)
    if isinstance(message, Tokens):
        return replace(message, winners=[0] * len(message.winners))
    counts = ("layer_passes", "recomputed_layer_passes", "coherence_layer_passes")
    none = {name: 0 for name in counts if hasattr(message, name)}
    return replace(message, **none, **({"first_boundary": ()} if isinstance(message, Report) else {}))
