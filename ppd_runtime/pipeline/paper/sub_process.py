"""A sub-process: starts the next token from its candidates while the main process finishes the current one.

Algorithm 2 of the paper, sub side. It holds the embedding, the head-start layers and an exit head, keeps its cache
coherent by itself, and sends its results without being asked. With fewer sub-processes than candidates, it runs several
candidates of one position in one pass.
"""

from collections.abc import Sequence

from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.exit_heads import ExitHead
from ppd_runtime.pipeline.messages import (
    MISS,
    Begin,
    Candidate,
    CatchUp,
    End,
    Entries,
    ExitState,
    HeadStart,
    Message,
    Missing,
    Report,
    Token,
)
from ppd_runtime.pipeline.ports import Call, Machine, Send, WaitFor, pop_consecutive
from ppd_runtime.settings.layouts import DECIDER

_ASK_AGAIN = 8  # tokens later, since the answer may be lost


class SubProcess:
    """Serves one request with its share of the k candidates; `subs` are all W sub-processes' ranks, 1 to W.

    Its candidates have the ranks `rank`, `rank` + W, `rank` + 2W, …: each sub-process has one of the likeliest. With
    `ranks_ahead` it ranks the tokens that may follow its likeliest candidate before it is asked. This pays if a
    message's round trip takes as long as the exit head.
    """

    def __init__(
        self,
        stage: LayerRange,
        exit_head: ExitHead,
        rank: int,
        subs: Sequence[int],
        k: int,
        send: Send,
        begin: Begin,
        ranks_ahead: bool = False,
    ) -> None:
        self.stage, self.exit_head, self.rank, self.send, self.begin = stage, exit_head, rank, send, begin
        self.k, self._share = k, slice(rank - 1, None, len(subs))
        self.history = [*begin.prompt_ids, *begin.delivered]
        self.layer_passes = 0
        """Layer passes for candidates; a pass over several of them counts as one for each, as in Theorem 4.1."""
        self.coherence_layer_passes = 0
        """Layer passes for the prompt and for tokens whose entries did not come."""
        self._peers = (DECIDER, *(peer for peer in subs if peer != rank))
        self._exit_state: ExitState | None = None
        self._trial: tuple[int, ...] = ()  # the tokens that the cache holds on trial after the history
        self._winners: dict[int, int] = {}
        self._entries: dict[int, Tensor] = {}
        self._owed: int | None = None  # position whose entries the others wait for
        self._ask_at = 0  # the position from which to report missing tokens again
        self._last = (
            len(begin.prompt_ids) + begin.params.max_new_tokens - 2
        )  # position of the last token that another follows
        self._ranks_ahead = ranks_ahead
        self._states_come_back = False  # whether the main process asks for candidates after this one's early starts
        self._ahead: Tensor | None = None  # the state of the likeliest token on trial, until what follows is ranked
        self._foreseen: tuple[int, list[int]] | None = None  # a position, and its ranked candidates after that token
        self._over = False

    def report(self) -> Report:
        """This process' counts of the request."""
        return Report(self.rank, self.begin.request, self.layer_passes, self.coherence_layer_passes)

    def serve(self) -> Machine:
        """Serve the request, naming candidates for each token."""
        num_candidates = len(range(self.k)[self._share])
        self.stage.begin(len(self.begin.prompt_ids) + self.begin.params.max_new_tokens + num_candidates - 1)
        yield from self._run(self.begin.prompt_ids, 0)
        while not self._over:
            message = yield WaitFor(0 if self._has_work() else None)
            if message is not None:
                self._take(message)
                yield from self._take_all()
            if self._over:
                return
            if self._exit_state is None and self._ahead is not None:
                yield from self._foresee(self._ahead)
            else:
                yield from self._work()

    def _take_all(self) -> Machine:
        while not self._over and (message := (yield WaitFor(0))) is not None:
            self._take(message)

    def _has_work(self) -> bool:
        waiting = self._exit_state is not None or self._ahead is not None
        return waiting or self.stage.length(0) < len(self.history)

    def _work(self) -> Machine:
        """Name the candidates, bring the cache up to the newest token, start the candidates."""
        state, self._exit_state = self._exit_state, None
        (foreseen_at, ranked), self._foreseen, self._ahead = self._foreseen or (0, []), None, None
        if state is None or state.position != len(self.history) - 1:
            self._ship_entries()
            yield from self._follow()
            return
        position = state.position + 1
        if foreseen_at != position:
            ranked = yield Call(self.exit_head.candidates, state.hidden, self.history, self.k)
        tokens = tuple(ranked[self._share])
        self.send((DECIDER,), Candidate(self.rank, self.begin.request, position, tokens))
        self._ship_entries()
        yield from self._follow()
        if len(self.history) == position and not self._over:
            yield from self._start_candidates(position, tokens)

    def _start_candidates(self, position: int, tokens: tuple[int, ...]) -> Machine:
        self.stage.truncate(position)  # a new main process, or a repeated message, brings an exit state again
        hidden = yield Call(self.stage.run_candidates, tokens, position)
        self.send((DECIDER,), HeadStart(self.rank, self.begin.request, position, tokens, hidden))
        self.layer_passes += len(tokens) * self.stage.num_layers
        self._trial = tokens
        wanted = self._ranks_ahead and self._states_come_back and position < self._last
        self._ahead = hidden[:, :1] if wanted else None

    def _foresee(self, state: Tensor) -> Machine:
        """Rank the tokens that may follow the likeliest candidate, before it is known whether that candidate is right.

        If it is right, the main process asks for exactly these tokens, and they are ranked already.
        """
        text = [*self.history, self._trial[0]]
        self._foreseen, self._ahead = (len(text), (yield Call(self.exit_head.candidates, state, text, self.k))), None

    def _follow(self) -> Machine:
        """Bring the cache up to the newest token: import the winner's entries, or compute."""
        wanted = WaitFor(self.stage.num_layers)
        while not self._over and (position := self.stage.length(0)) < len(self.history):
            if run := pop_consecutive(self._entries, position, len(self.history)):
                self.stage.import_entries(run)
            elif self._winners.get(position, MISS) in (MISS, self.rank):
                yield from self._run([self.history[position]], position)
                yield from self._take_all()  # it may become known that many tokens are not needed
            else:
                message = yield wanted
                if message is not None:
                    self._take(message)
                else:
                    self._winners[position] = MISS  # waiting longer would cost more than computing

    def _settle_trial(self, position: int, token: int) -> bool:
        """Keep only the right candidate's entries, or none; returns whether the cache holds the token."""
        tokens, self._trial = self._trial, ()
        if token in tokens:
            self.stage.keep_candidate(position, tokens.index(token))
        elif tokens:
            self.stage.truncate(position)
        return token in tokens

    def _run(self, token_ids: list[int], position: int) -> Machine:
        yield Call(self.stage.run, 0, self.stage.num_layers, token_ids, position)
        self.coherence_layer_passes += self.stage.num_layers

    def _take(self, message: Message) -> None:
        if isinstance(message, End):
            self._over = True
        elif isinstance(message, ExitState):
            self._exit_state = message
        elif isinstance(message, Entries):
            self._keep(message.entries, message.position)
        elif isinstance(message, Token):
            self._take_token(message)
        elif isinstance(message, CatchUp):
            self._take_missed(message)

    def _keep(self, entries: Tensor, position: int) -> None:
        held = min(self.stage.length(0), len(self.history))
        self._entries.update((at, entry) for at, entry in enumerate(entries, position) if at >= held)

    def _take_missed(self, message: CatchUp) -> None:
        position = len(self.history)
        if message.position > position:
            self._ask(message.position)
        elif tokens := message.token_ids[position - message.position :]:
            self._settle_trial(position, tokens[0])
            self.history += tokens
            self._ask_at = 0
            self._foreseen = self._ahead = None
        if message.entries is not None:
            self._keep(message.entries, message.position)

    def _ask(self, position: int) -> None:
        """Report the first missing token, after news of the token at `position`."""
        if position >= self._ask_at:
            self.send((DECIDER,), Missing(self.rank, self.begin.request, len(self.history)))
            self._ask_at = position + _ASK_AGAIN

    def _take_token(self, message: Token) -> None:
        if message.position > len(self.history):
            self._ask(message.position)
        if message.position != len(self.history):
            return
        self.history.append(message.token_id)
        self._winners[message.position] = message.winner
        won, comes_back = message.winner == self.rank, message.hidden is not None
        self._states_come_back = comes_back if won else self._states_come_back
        if not (won and comes_back and self._trial[:1] == (message.token_id,)):
            self._foreseen = self._ahead = None
        if message.hidden is not None:
            self._exit_state = ExitState(message.sender, message.request, message.position, message.hidden)
        if self._settle_trial(message.position, message.token_id) and message.winner == self.rank:
            self._ship_entries()
            self._owed = message.position
            if len(self._peers) > 1:  # the others need them before their next candidates, main not before the next miss
                self._ship_entries()

    def _ship_entries(self) -> None:
        """Send the entries of the token that this process won, unless they have been sent."""
        if self._owed is not None:
            entries = self.stage.export_entries(self._owed, self._owed + 1, self.stage.num_layers)
            self.send(self._peers, Entries(self.rank, self.begin.request, self._owed, entries))
            self._owed = None
