"""A request in a worker: its machine, the machine's wait, times, and messages to send."""

import time
from collections.abc import Mapping, Sequence

from ppd_runtime.pipeline.messages import NOT_ASKED, Begin, Entries, Finished, HeadStart, Message, Rows, Token, Tokens
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.ports import Machine, WaitFor, Work
from ppd_runtime.pipeline.span_messages import pack
from ppd_runtime.pipeline.staged.draft_worker import DraftWorker
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.results import PathStats
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind
from ppd_runtime.transport import Endpoint

_LONGEST_HOLD_S = 1.0
_MOST_HELD = 2**16
_SHOW_EVERY_S = 0.03
_SILENCE_S = 10.0  # after which a client that asks is told whether there were passes
_MOST_WORDS = 10_000  # characters of an error
_STAMPED = (HeadStart, Entries, Rows)
"""The kinds that the deciding process waits for; they hold the time of sending."""


Decider = MainProcess | LastStage | SingleStage
"""The machine of the process that decides tokens."""
Helper = SubProcess | RunAheadSubProcess | FirstStage | MiddleStage | DraftWorker
"""The machine of any other process."""


class Session:
    """A request at a worker.

    Args:
        endpoint: the worker's endpoint.
        rank: the worker's rank.
        begin: starts the request.
        notes_verdicts: whether a token says at once which sub-process was right, as in the paper's layout.
    """

    def __init__(self, endpoint: Endpoint, rank: int, begin: Begin, notes_verdicts: bool) -> None:
        self._endpoint, self._rank, self.begin, self._notes_verdicts = endpoint, rank, begin, notes_verdicts
        self.recorder = Recorder()
        self.recorder.begin(begin.traced, begin.watched)
        self.machine: Decider | Helper | None = None
        self.running: Machine | None = None
        self.wanted = WaitFor(0)
        self.patience = 0
        """The last nonzero patience."""
        self.last_turn = 0
        """The number of its latest turn."""
        self.finished: Finished | None = None
        self._released = self._asked = self._shown = self._told = self.recorder.began
        self._told_computed_s = 0.0
        self._first_token, self._stalled = 0.0, 0.0
        self._first_ledger: LatencyBreakdown | None = None
        self._hold_tokens = not begin.live and begin.params.logprobs is None
        self._held: list[Token] = []  # consecutive

    def ask(self) -> None:
        """Note that the machine waits for a computation from now on."""
        self._asked = time.perf_counter()

    def wait_for(self, wanted: WaitFor, layer_seconds: float, others: int) -> None:
        """Begin a wait and set its deadline. `others` is the sum of all other requests' patience."""
        if self.begin.watched and time.perf_counter() - self._shown > _SHOW_EVERY_S:
            self._show()
        self._asked, self.wanted = time.perf_counter(), wanted
        if wanted.patience:
            self.patience = wanted.patience
            if wanted.deadline is None:
                wanted.deadline = self._asked + max((wanted.patience + others) * layer_seconds, wanted.least_s)

    def note_reply(self, message: Message | None, was_away: bool) -> None:
        """Note the end of a wait. The time until the message was sent counts as waiting, the rest as transfer.
        `was_away` says whether another request had the worker meanwhile.
        """
        began, ended = self._asked, time.perf_counter()
        if self.wanted.patience != 0 or was_away:
            self._stalled += ended - began
            sent = message.sent_at if isinstance(message, _STAMPED) else ended
            sent = min(max(sent, began), ended)
            self.recorder.note(Kind.WAIT, began, sent)
            began = sent
        peer = CLIENT if message is None else message.sender
        self.recorder.note_message(Kind.RECEIVE, began, ended, peer, message)

    def note_wait(self, ended: float) -> None:
        """Note that the computation has waited until `ended` for those of other requests."""
        self._stalled += ended - self._asked
        self.recorder.note(Kind.WAIT, self._asked, ended)

    def send(self, addresses: Sequence[int], message: Message) -> None:
        """Send the machine's message; tokens are held back if the client takes them in batches."""
        if isinstance(message, _STAMPED):
            object.__setattr__(message, "sent_at", time.perf_counter())  # a copy takes ten microseconds
        for address in addresses:
            if address == CLIENT and self._hold_tokens and isinstance(message, Token):
                self._hold(message)
            else:
                self._deliver(address, message)
        if isinstance(message, Token):
            self._note_token(addresses, message)

    def show_progress(self) -> None:
        """Answer a client that asks again: now and then, tell it that passes ran, such as those of a long prompt."""
        now, computed_s = time.perf_counter(), self.recorder.computed_s
        if self._rank == DECIDER and now - self._told > _SILENCE_S and computed_s > self._told_computed_s:
            self._told, self._told_computed_s = now, computed_s
            self._deliver(CLIENT, Tokens(self._rank, self.begin.request, 0, [], []))

    def finish(self, main: Decider, error: str = "") -> None:
        """End a request, perhaps with an error, in the process that decides: send held tokens, spans and the end."""
        self.release_tokens()
        ended, ledger = self.recorder.pause(), self.recorder.ledger()
        self.finished = Finished(
            sender=self._rank,
            request=self.begin.request,
            reason="error" if error else main.finish_reason,
            num_tokens=len(main.history) - len(self.begin.prompt_ids),
            path=PathStats(
                latency_s=ended - self.recorder.began,
                time_to_first_token_s=self._first_token,
                stall_s=self._stalled,
                **main.counts(),
                way_seconds=main.policy.way_seconds((len(self.begin.prompt_ids) + len(main.history)) / 2),
                ledger=ledger,
                first_token_ledger=self._first_ledger or ledger,
            ),
            error=error[:_MOST_WORDS],
        )
        self._ship_spans()
        self._endpoint.send(CLIENT, self.finished)

    def report(self, helper: Helper) -> None:
        """End a request in any other process: send the client spans and counts."""
        self._ship_spans()
        self._endpoint.send(CLIENT, helper.report())

    def finish_again(self, main: Decider, message: Message) -> None:
        """Send the end of a request again, and the tokens that a client lacks if it sends a `Begin`."""
        if isinstance(message, Begin):
            main.repeat(len(message.delivered))
            self.release_tokens()
        assert self.finished is not None
        self._endpoint.send(CLIENT, self.finished)

    def _show(self) -> None:
        """Send a watching client the spans since the last time."""
        recorded = self.recorder.take_watched(self._rank)
        for message in pack(recorded, self.begin.request, watched=True) if recorded else ():
            self._endpoint.send(CLIENT, message)
        self._shown = time.perf_counter()

    def _ship_spans(self) -> None:
        self._show()
        recorded = self.recorder.spans(self._rank)
        for message in pack(recorded, self.begin.request) if recorded else ():
            self._endpoint.send(CLIENT, message)

    def _note_token(self, addresses: Sequence[int], message: Token) -> None:
        if not self._first_token:
            self._first_token = self.recorder.pause() - self.recorder.began
            self._first_ledger = self.recorder.ledger()
        if CLIENT in addresses and message.winner != NOT_ASKED and self._notes_verdicts:
            self.recorder.note_verdict(message.position, message.token_id, message.winner)

    def _deliver(self, address: int, message: Message) -> None:
        began = time.perf_counter()
        self._endpoint.send(address, message)
        self.recorder.note_message(Kind.SEND, began, time.perf_counter(), address, message)

    def _hold(self, token: Token) -> None:
        """Hold back a token, at most for a second: so the client knows that this process runs."""
        if self._held and token.position != self._held[-1].position + 1:  # some are sent again
            self.release_tokens()
        self._held.append(token)
        if len(self._held) >= _MOST_HELD or time.perf_counter() - self._released > _LONGEST_HOLD_S:
            self.release_tokens()

    def release_tokens(self) -> None:
        """Send the client the tokens that were held back."""
        if held := self._held:
            token_ids, winners = [token.token_id for token in held], [token.winner for token in held]
            self._deliver(CLIENT, Tokens(self._rank, self.begin.request, held[0].position, token_ids, winners))
            held.clear()
        self._released = time.perf_counter()


def next_in_turn(sessions: Sequence[Session], works: Mapping[Session, Work]) -> Session:
    """The session to resume without a message: one whose deadline has passed, else the next in turn."""
    now = time.perf_counter()
    timed = [session for session in sessions if session.wanted.patience and session.wanted.deadline is not None]
    over = [session for session in timed if (session.wanted.deadline or 0.0) <= now]
    if over or not works:
        return min(over or timed, key=lambda session: session.wanted.deadline or 0.0)
    return min(works, key=lambda session: (works[session], session.last_turn))
