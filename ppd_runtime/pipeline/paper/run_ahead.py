"""A lone sub-process that runs ahead: it starts the next token before it hears whether its candidate was right.

With one candidate a token and the exit at half depth, the state after a candidate's early layers *is* the exit state of
the next token. So this sub-process only needs to receive tokens, and a hit costs no hop: the next early start is at the
main process already. This goes beyond Algorithm 2 of the paper, whose sub-processes wait for each exit state.
"""

from collections.abc import Generator
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.exit_heads import ExitHead
from ppd_runtime.pipeline.messages import (
    Begin,
    Candidate,
    CatchUp,
    End,
    Entries,
    HeadStart,
    Message,
    Missing,
    Report,
    Token,
)
from ppd_runtime.pipeline.ports import Awaited, Call, Machine, Send, WaitFor, pop_consecutive
from ppd_runtime.settings.layouts import DECIDER

_MOST_OWED = 8  # entries sent at a time, unless the main process needs them sooner
_ASK_AGAIN = 8  # tokens between reports of what it lacks
_MOST_AHEAD = 2  # candidates beyond the last certain token; a second one in store evens out uneven passes


class RunAheadSubProcess:
    """Serves one request as the only sub-process, `rank` 1; the exit head reads the states of its own stage.

    Its candidates form a chain. When a token contradicts the chain, the rest of it is dropped, also in the middle of a
    pass. Each candidate names the part of the chain that was not certain yet, so that the main process takes no
    candidate that was started from another text.
    """

    def __init__(self, stage: LayerRange, exit_head: ExitHead, rank: int, send: Send, begin: Begin) -> None:
        self.stage, self.exit_head, self.rank, self.send, self.begin = stage, exit_head, rank, send, begin
        self.chain = [*begin.prompt_ids, *begin.delivered]
        """The prompt, the tokens that are certain, and the candidates after them."""
        self.layer_passes = 0
        """Layer passes for candidates, dropped ones too."""
        self.coherence_layer_passes = 0
        """Layer passes for the prompt and for tokens that were not in the chain."""
        self._certain = len(self.chain)
        self._last = (
            len(begin.prompt_ids) + begin.params.max_new_tokens - 2
        )  # position of the last token that another follows
        self._state: Tensor | None = None  # the newest chain token's; None until its layers have run
        self._forks = 0
        self._entries: dict[int, Tensor] = {}  # for tokens that only the main process ran, during a pause
        self._owed: list[int] = []  # consecutive positions whose entries the main process does not have
        self._wanted = False  # whether it needs them now
        self._ask_at = 0  # the position from which to report missing tokens again
        self._over = False

    def report(self) -> Report:
        """This process' counts of the request."""
        return Report(self.rank, self.begin.request, self.layer_passes, self.coherence_layer_passes)

    def serve(self) -> Machine:
        """Follow the request to its end."""
        prompt = self.begin.prompt_ids
        self.stage.begin(len(prompt) + self.begin.params.max_new_tokens)
        self.stage.keep_states(2 * _MOST_OWED)  # owed entries, and what is ahead of them
        states = yield Call(self.stage.run, 0, self.stage.num_layers, prompt, 0)
        self._state = states[:, -1:] if len(self.chain) == len(prompt) else None
        self.coherence_layer_passes += self.stage.num_layers
        while not self._over:
            message = yield WaitFor(0 if self._has_work() else None)
            if message is not None:
                self._take(message)
                yield from self._take_all()
            self._ship_entries()
            if not self._over and self._has_work():
                yield from self._work()

    def _has_work(self) -> bool:
        ahead = len(self.chain) - self._certain
        return self._state is None or (ahead < _MOST_AHEAD and len(self.chain) <= self._last)

    def _work(self) -> Machine:
        """Run a token that is not in the cache yet, or name the next candidate and start it."""
        if self._state is None:
            position = self.stage.length(self.stage.num_layers - 1)
            if run := pop_consecutive(self._entries, position, len(self.chain) - 1):
                self.stage.import_entries(run)
                return
            self.coherence_layer_passes += yield from self._run(position)
            return
        position = len(self.chain)
        (token,) = yield Call(self.exit_head.candidates, self._state, self.chain, 1)
        path = self.chain[self._certain :]
        self.send((DECIDER,), Candidate(self.rank, self.begin.request, position, (token,), path))
        self.chain.append(token)
        self._state = None
        self.layer_passes += yield from self._run(position)
        if self._state is not None and position >= self._certain:
            path = self.chain[self._certain : position]
            self.send((DECIDER,), HeadStart(self.rank, self.begin.request, position, (token,), self._state, path))

    def _run(self, position: int) -> Generator[Awaited, Any, int]:
        """Run the chain's token at `position` unless another replaces it meanwhile; returns the layer passes."""
        forks, num_layers, step = self._forks, self.stage.num_layers, self.stage.layers_at_once
        inputs: list[int] | Tensor = [self.chain[position]]
        for first in range(0, num_layers, step):
            if first:
                yield from self._take_all()
                if self._over or self._forks != forks:
                    return first
            inputs = yield Call(self.stage.run, first, min(first + step, num_layers), inputs, position)
        if position == len(self.chain) - 1 and isinstance(inputs, Tensor):
            self._state = inputs
        return num_layers

    def _take_all(self) -> Machine:
        while (message := (yield WaitFor(0))) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, End):
            self._over = True
        elif isinstance(message, Token | CatchUp) and message.position > self._certain:
            self._ask(message.position)
        elif isinstance(message, Token) and message.position == self._certain:
            self._take_token(message)
        elif isinstance(message, CatchUp):
            self._take_missed(message)

    def _ask(self, position: int) -> None:
        """Report the first missing token, after news of the token at `position`."""
        if position >= self._ask_at:
            self.send((DECIDER,), Missing(self.rank, self.begin.request, self._certain))
            self._ask_at = position + _ASK_AGAIN

    def _take_token(self, message: Token) -> None:
        position = message.position
        self._certain += 1
        if len(self.chain) == position or self.chain[position] != message.token_id:
            self._go_on_from(position, [message.token_id])
        if message.winner != self.rank:
            self._wanted = True
        elif position < self.stage.length(self.stage.num_layers - 1):  # else this process won it before its restart
            self._owed.append(position)

    def _take_missed(self, message: CatchUp) -> None:
        position = self._certain
        if not (tokens := message.token_ids[position - message.position :]):
            return
        self._go_on_from(position, tokens)
        self._certain, self._ask_at = len(self.chain), 0
        entries = enumerate(() if message.entries is None else message.entries, message.position)
        self._entries.update((at, entry) for at, entry in entries if at >= position)

    def _go_on_from(self, position: int, token_ids: list[int]) -> None:
        """Replace the chain from `position` on by certain tokens."""
        if len(self.chain) > position:
            self.stage.truncate(position)
            self._forks += 1
        self.chain[position:] = token_ids
        self._state = None

    def _ship_entries(self) -> None:
        """Send the entries of the tokens that this process won; the main process needs them at its next miss."""
        if self._owed and (self._wanted or len(self._owed) >= _MOST_OWED):
            first, end = self._owed[0], self._owed[-1] + 1
            entries = self.stage.export_entries(first, end, self.stage.num_layers)
            self.send((DECIDER,), Entries(self.rank, self.begin.request, first, entries))
            self._owed.clear()
        self._wanted = False
