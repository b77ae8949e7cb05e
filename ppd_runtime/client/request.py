"""One request as the client sees it: each token once and in order, even if messages or workers are lost."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ppd_runtime.client.ending import CANCELLED, Ending
from ppd_runtime.client.exchange import MessageExchange
from ppd_runtime.pipeline.messages import (
    Begin,
    Cancel,
    Finished,
    Foreseen,
    Message,
    Refused,
    Report,
    Spans,
    Token,
    Tokens,
    Unreadable,
)
from ppd_runtime.pipeline.span_messages import unpack
from ppd_runtime.pipeline.wire import WireError
from ppd_runtime.request_error import RequestError
from ppd_runtime.results import NOTHING_NEW, News
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.tracing.spans import ProcessSpans

logger = logging.getLogger(__name__)
_CHECK_EVERY_S = 0.25
_ASK_AGAIN_S = 1.0  # after a silence, which doubles each time …
_LONGEST_PATIENCE_S = 8.0  # … but no longer
_GAP_S = 0.1  # between two questions about lost tokens
_SILENCE_DEADLINE_S = 120.0  # a main process'; doubled for each successor: the same work waits
_REPORT_DEADLINE_S = 2.0
_MOST_PIECES = 256  # spans that were not fetched
_MOST_REFUSALS = 4  # that a resend may repair, since the newest token
_END_DEADLINE_S = 3.0  # after a timeout or a cancel, for a main process that does not answer


@dataclass
class RequestReports:
    """The workers' reports of a request, by rank: at its end, and during it if the client watches."""

    finished: Finished | None = None
    of_workers: dict[int, Report] = field(default_factory=dict)
    spans: dict[int, list[Spans]] = field(default_factory=dict)
    boundaries: dict[int, int] = field(default_factory=dict)
    """The first boundary of the token at each position."""
    _new_boundaries: list[tuple[int, int]] = field(default_factory=list)
    _new_spans: deque[Spans] = field(default_factory=lambda: deque(maxlen=_MOST_PIECES))

    def take(self, message: Message) -> None:
        """Keep counts, spans and boundaries."""
        if isinstance(message, Report):
            self.of_workers[message.sender] = message
        elif isinstance(message, Foreseen):
            if message.position not in self.boundaries:
                self.boundaries[message.position] = message.boundary
                self._new_boundaries.append((message.position, message.boundary))
        elif isinstance(message, Spans) and message.watched:
            self._new_spans.append(message)
        elif isinstance(message, Spans):
            self.spans.setdefault(message.sender, []).append(message)

    def news(self, name_of: Callable[[int], str]) -> News:
        """The reports that have come since the last call."""
        if not (self._new_boundaries or self._new_spans):
            return NOTHING_NEW
        pieces: dict[int, list[Spans]] = {}
        for piece in self._new_spans:
            pieces.setdefault(piece.sender, []).append(piece)
        news = News(tuple(self._new_boundaries), _readable(pieces, name_of))
        self._new_boundaries.clear()
        self._new_spans.clear()
        return news

    def in_order(self) -> list[Report]:
        """The sub-processes' counts, in the order of ranks."""
        return [self.of_workers[rank] for rank in sorted(self.of_workers)]

    def processes(self, name_of: Callable[[int], str]) -> tuple[ProcessSpans, ...]:
        """The workers' spans; a process whose spans cannot be read is logged and left out."""
        return _readable(self.spans, name_of)


def _readable(pieces: Mapping[int, Sequence[Spans]], name_of: Callable[[int], str]) -> tuple[ProcessSpans, ...]:
    processes = []
    for rank in sorted(pieces):
        try:
            processes.append(unpack(pieces[rank]))
        except WireError as error:
            logger.warning("left out spans of %s: %s", name_of(rank), error)
    return tuple(processes)


class RequestClient(Iterator[Token]):
    """A request to the main process: gives each new token as it comes, until the text or the `Ending` ends it.

    The main process is asked again if it falls silent or is replaced.

    Raises:
        RequestError: if the request has failed, or a worker refuses data that it needs; the workers continue.
        RuntimeError: if the main process is lost and has been replaced too often.
    """

    def __init__(self, exchange: MessageExchange, begin: Begin, ending: Ending | None = None) -> None:
        self._exchange, self._supervisor, self._begin = exchange, exchange.supervisor, begin
        self._ending = ending or Ending(None)
        self.reports = RequestReports()
        self.restarts = 0
        """New main processes that this request has seen."""
        self.winners: Counter[int] = Counter()
        """The number of tokens by `Token.winner`."""
        self._delivered: list[int] = []
        self._arrived: deque[Token] = deque()
        """Tokens that the caller has not taken yet."""
        self._has_begun = self._cancelled = False
        self._main_starts, self._began, self._end_at = 0, time.monotonic(), math.inf
        self._patience, self._silences = _ASK_AGAIN_S, 0
        self._refusals = 0  # since the newest token
        self._ask_at = self._check_at = self._heard_at = self._gap_at = 0.0

    def __next__(self) -> Token:
        if not self._has_begun:
            self._begin_now()
        while not self._arrived:
            if self.reports.finished is not None:
                raise StopIteration
            message = self._next_message()
            if isinstance(message, Token | Tokens):
                self._take_tokens(message)
            elif isinstance(message, Finished):
                self._finish(message)
            elif isinstance(message, Refused | Unreadable):
                self._weigh(message)
            else:
                self.reports.take(message)
        return self._arrived.popleft()

    def _begin_now(self) -> None:
        self._has_begun = True
        self._exchange.open(self._begin.request)
        self._exchange.check()
        self._main_starts, self._began = self._supervisor.starts(DECIDER), time.monotonic()
        self._ask()

    def _take_tokens(self, message: Token | Tokens) -> None:
        """Take the message's tokens that have not come yet."""
        for token in [message] if isinstance(message, Token) else message.singly():
            if self._is_next(token):
                self._delivered.append(token.token_id)
                self._arrived.append(token)
                self._refusals = 0
                self.winners[token.winner] += 1
                self._supervisor.note_success(DECIDER)

    def cancel(self) -> None:
        """Have the main process stop, and wait for the request's end."""
        self._cancelled = True
        self._ask()
        while not isinstance(self._next_message(), Finished):
            pass

    def close(self) -> None:
        """Stop listening to the request."""
        self._exchange.close(self._begin.request)

    def hear_all(self) -> None:
        """Wait for the sub-processes' counts. Lost processes send none, and a silent one is waited for only once.

        If one process decoded, there is no wait: the others know nothing of the request.
        """
        deadline = time.monotonic() + _REPORT_DEADLINE_S
        while self._awaited() and (left := deadline - time.monotonic()) > 0:
            message = self._receive(min(_CHECK_EVERY_S, left))
            if message is None:
                self._exchange.check()
            else:
                self.reports.take(message)
        for rank in self._awaited():
            self._supervisor.note_silence(rank)
        for rank in self.reports.of_workers:
            self._supervisor.note_success(rank)

    def _awaited(self) -> list[int]:
        if self.reports.finished and self.reports.finished.path.one_process:
            return []
        heard = {DECIDER, *self.reports.of_workers}
        return [rank for rank in self._supervisor.expected() if rank not in heard]

    def _is_next(self, message: Token) -> bool:
        """Whether a token is the next that has to come; if it is a later one, ask for those that were lost."""
        wanted = len(self._begin.prompt_ids) + len(self._delivered)
        if message.position > wanted:
            self._ask_for_lost()
        return message.position == wanted

    def _finish(self, message: Finished) -> None:
        """Take the end. After a cancel no tokens are missing: a new main process may not know the request."""
        if self._cancelled and message.num_tokens != len(self._delivered):
            message = self._cut_short()
        if message.num_tokens != len(self._delivered):
            self._ask_for_lost()
            return
        self.reports.finished = self._with_reason(message)
        if message.error:
            raise RequestError(message.error)

    def _weigh(self, message: Refused | Unreadable) -> None:
        """Take a refusal: a resend may repair it; if several do not, the request has failed."""
        self._refusals += 1
        final = isinstance(message, Refused) and message.final
        if self._cancelled or not (final or self._refusals >= _MOST_REFUSALS):
            return
        self._end_at = time.monotonic() + _END_DEADLINE_S  # a worker that reads nothing reads no cancel either
        name_of = self._supervisor.name_of
        if isinstance(message, Unreadable):
            raise RequestError(f"what {name_of(message.sender)} sends cannot be read: {message.reason}")
        what = "the request" if final else f"what {name_of(message.whose)} sends"
        raise RequestError(f"{name_of(message.sender)} refuses {what}: {message.reason}")

    def _with_reason(self, message: Finished) -> Finished:
        reason = self._ending.reason() if message.reason == CANCELLED else None
        return replace(message, reason=reason or message.reason)

    def _cut_short(self) -> Finished:
        return Finished.cut_short(self._begin.request, len(self._delivered), time.monotonic() - self._began)

    def _end_early(self) -> None:
        """Tell the main process, once, if the request has to end; tokens that it sends until then still count."""
        if not self._cancelled and self._ending.reason():
            self._cancelled, self._patience = True, _ASK_AGAIN_S
            self._end_at = time.monotonic() + _END_DEADLINE_S
            self._ask()

    def _next_message(self) -> Message:
        while True:
            self._end_early()
            wait = _CHECK_EVERY_S if self._cancelled else min(_CHECK_EVERY_S, self._ending.seconds_left())
            message, now = self._receive(wait), time.monotonic()
            if now >= self._check_at:
                self._check(now)
            if message is None and now >= self._end_at:  # it is stopped, or in a long pass, and will hear later
                return self._cut_short()
            if message is not None:
                if message.sender == DECIDER:
                    self._heard_at, self._patience = now, _ASK_AGAIN_S
                    self._ask_at = now + self._patience
                return message

    def _receive(self, timeout: float) -> Message | None:
        return self._exchange.receive(self._begin.request, timeout)

    def _check(self, now: float) -> None:
        """Check the workers, and ask again after a new main process or a long silence."""
        self._check_at = now + _CHECK_EVERY_S
        self._exchange.check()
        if not self._supervisor.is_serving(DECIDER):
            self._heard_at = now  # its start has a deadline of its own
        elif (starts := self._supervisor.starts(DECIDER)) != self._main_starts:
            self._main_starts, self._heard_at = starts, now
            self.restarts += 1
            self._ask()
        elif now - max(self._heard_at, self._exchange.heard_at) > (deadline := _SILENCE_DEADLINE_S * 2**self._silences):
            self._heard_at, self._silences = now, self._silences + 1
            self._supervisor.replace(DECIDER, f"it has said nothing for {deadline:.0f} s")
        elif now >= self._ask_at:
            self._ask()

    def _ask(self) -> None:
        """Ask for the tokens that have not come yet, or for the end; the next question waits twice as long."""
        question: Message = Cancel(CLIENT, self._begin.request)
        if not self._cancelled:
            question = replace(self._begin, delivered=list(self._delivered), epoch=self.restarts)
        self._exchange.send(DECIDER, question)
        now = time.monotonic()
        self._heard_at = self._heard_at or now
        self._ask_at = now + self._patience
        self._patience = min(2 * self._patience, _LONGEST_PATIENCE_S)

    def _ask_for_lost(self) -> None:
        now = time.monotonic()
        if now >= self._gap_at:
            self._gap_at = now + _GAP_S
            self._ask()
