"""The main process: full-depth decoding that continues from a sub-process' early start if one is right.

Algorithm 2 of the paper, main side. Sub-processes can make a token come sooner but never change it: full depth decides
each token.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.pipeline.messages import (
    MISS,
    NOT_ASKED,
    Begin,
    Cancel,
    Candidate,
    CatchUp,
    End,
    Entries,
    ExitState,
    HeadStart,
    Message,
    Missing,
    Token,
)
from ppd_runtime.pipeline.ports import Awaited, Call, Machine, Send, WaitFor, pop_consecutive
from ppd_runtime.pipeline.speculation_policy import Always, Guessing, SpeculationPolicy
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.logprobs import TokenLogprobs, packed
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

_QUIET = 2  # tokens without a used early start before sub-processes are told nothing
_MOST_ABSENCES = 3  # a sub-process that was late this often …
_SECOND_CHANCE = 32  # … is waited for at one position in this many, until it is in time
_MOST_CAUGHT_UP = 64  # tokens whose entries are sent, between two tokens, to a sub-process that lacks them


@dataclass
class _Heard:
    """The sub-processes' messages about one position, by rank."""

    candidates: dict[int, Candidate] = field(default_factory=dict)
    head_starts: dict[int, HeadStart] = field(default_factory=dict)


class MainProcess:
    """Decodes one request; `stage` holds all layers, `exit_layer` is d̄, `subs` are the sub-processes' ranks,
    none for a last stage that decodes alone.

    Without `shares_exit_states` the sub-processes receive tokens only, as the one that runs ahead needs. While the
    `policy` guesses nothing they receive nothing, and decoding is ordinary in every respect.

    The successor of a lost main process begins after the tokens that the client has. It runs them one by one, like
    ordinary decoding, so that its caches hold the same bits.
    """

    def __init__(
        self,
        stage: LayerRange,
        exit_layer: int,
        subs: Sequence[int],
        send: Send,
        begin: Begin,
        shares_exit_states: bool = True,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.stage, self.exit_layer, self.subs, self.send, self.begin = stage, exit_layer, tuple(subs), send, begin
        self.shares_exit_states, self.policy = shares_exit_states, policy or Always(Guessing.EXITS)
        self.head_start = stage.num_layers - exit_layer
        self.history = list(begin.prompt_ids)
        self.told: list[Token] = []
        """The tokens that the client has been sent, in case it asks for them again."""
        self.finish_reason = ""
        self.layer_passes = 0
        """Layer passes on the path of the tokens."""
        self.recomputed_layer_passes = 0
        """Layer passes for entries that no sub-process delivered in time."""
        self._heard: defaultdict[int, _Heard] = defaultdict(_Heard)  # by position
        self._entries: dict[int, Tensor] = {}
        self._absences = dict.fromkeys(self.subs, 0)
        self._told = len(self.history)  # tokens of the history that the sub-processes know
        self._misses = 0  # tokens in a row whose early starts were not used
        self._asks = self.policy.guessing != Guessing.NOTHING  # whether sub-processes are told tokens
        self.asked: set[int] = set()
        """Positions that candidates were asked for."""
        self.foreseen: set[int] = set()
        """The positions in `asked` where a candidate was right, even if late."""
        self._missing: dict[int, int] = {}  # the first position that a sub-process lacks, by rank
        self._cancelled = False
        self._logprobs: tuple[TokenLogprobs, ...] = ()  # the newest token's

    def decode(self, sampler: Sampler, stop: StopRule) -> Machine:
        """Decode to the end, sending each token to the sub-processes and the client as soon as it is certain."""
        self.stage.begin(len(self.history) + self.begin.params.max_new_tokens)
        self.send(self.subs, self.begin)
        self.policy.begin()
        inputs = yield from self._replay(stop)
        try:
            last = None if self.finish_reason else (yield from self._go_on(inputs, sampler, stop))
        except RequestError:
            self.send(self.subs, End(DECIDER, self.begin.request))
            raise
        self.send(self.subs, End(DECIDER, self.begin.request))
        if last is not None:
            self._tell_client(last, NOT_ASKED)

    def counts(self) -> dict[str, Any]:
        """The request's counts, as fields of `PathStats`."""
        return {
            "main_layer_passes": self.layer_passes,
            "main_recomputed_layer_passes": self.recomputed_layer_passes,
            "asked": len(self.asked),
            "foreseen": len(self.foreseen),
            "one_process": not self.subs,
        }

    def repeat(self, delivered: int) -> None:
        """Send the client again the tokens that follow the first `delivered` ones after the prompt."""
        for message in self.told[max(delivered - len(self.begin.delivered), 0) :]:
            self.send((CLIENT,), message)

    def _replay(self, stop: StopRule) -> Generator[Awaited, Any, list[int]]:
        """Run the prompt and the tokens that the client already has, except the newest, which is returned.

        If the client has none, the prompt is returned and nothing runs.
        """
        inputs, delivered = list(self.history), self.begin.delivered
        reasons = [stop.finish_reason(token) for token in delivered]
        if reasons and reasons[-1]:
            self.history += delivered
            self.finish_reason = reasons[-1]
            return inputs
        for token in delivered:
            yield from self._pass(0, inputs, ask=False)
            self.history.append(token)
            inputs = [token]
            yield from self._take_all()
        self._told = len(self.history)
        return inputs

    def _go_on(self, inputs: list[int] | Tensor, sampler: Sampler, stop: StopRule) -> Generator[Awaited, Any, int]:
        """Decode to the end of the text; returns the last token."""
        first_layer, asked = 0, False
        while True:
            hidden = yield from self._pass(first_layer, inputs, ask=not (asked or stop.last_allowed))
            if len(self.history) == len(self.begin.prompt_ids):
                yield Call(sampler.note_prompt, self.stage.logits, hidden, self.history)
            token = sampler.choose((yield Call(self.stage.unread_logits, hidden)), self.history)
            self._logprobs = sampler.take_logprobs()
            self.history.append(token)
            self.finish_reason = stop.finish_reason(token) or ""
            if self.finish_reason:
                return token
            early = yield from self._settle(token)
            if self._cancelled:
                self.finish_reason = "cancelled"
                return token
            winner, state = (early.sender, _state_of(token, early)) if early else (MISS, None)
            asked = state is not None and self.head_start == self.exit_layer and not stop.last_allowed
            asked = asked and self.shares_exit_states
            self._tell_subs(token, winner, state if asked else None)
            self._tell_client(token, winner)
            self._answer_missing()
            if state is not None:
                first_layer, inputs = self.head_start, state
            else:
                yield from self._fill_gaps()
                first_layer, inputs = 0, [token]

    def _pass(self, first_layer: int, inputs: list[int] | Tensor, ask: bool) -> Generator[Awaited, Any, Tensor]:
        """Run a pass from `first_layer` to full depth; with `ask`, send the exit layer's state on the way."""
        size = len(inputs) if isinstance(inputs, list) else inputs.shape[1]
        newest = len(self.history) - 1
        start = newest + 1 - size
        self.layer_passes += self.stage.num_layers - first_layer
        if ask and self.shares_exit_states and self._asks:
            states: Tensor = yield Call(self.stage.run, first_layer, self.exit_layer, inputs, start)
            first_layer, inputs = self.exit_layer, states
            self.send(self.subs, ExitState(DECIDER, self.begin.request, newest, states[:, -1:]))
        return (yield Call(self.stage.run, first_layer, self.stage.num_layers, inputs, start))

    def _tell_client(self, token: int, winner: int) -> None:
        certain = Token(
            DECIDER, self.begin.request, len(self.history) - 1, token, winner, None, *packed(self._logprobs)
        )
        self.told.append(certain)
        self.send((CLIENT,), certain)

    def _tell_subs(self, token: int, winner: int, hidden: Tensor | None) -> None:
        """Send the sub-processes the newest token; after a pause, all tokens that they have missed."""
        first, newest = self._told, len(self.history) - 1
        if not self._asks:
            return
        if first == newest:
            self.send(self.subs, Token(DECIDER, self.begin.request, newest, token, winner, hidden))
        else:
            self.send(self.subs, self._catch_up(first, newest))
        self._told = newest + 1

    def _catch_up(self, first: int, most: int) -> CatchUp:
        """The tokens from `first` on, with the first layers' entries of at most `most` tokens."""
        newest = len(self.history) - 1
        held = max(min(self.stage.held_from(first, self.head_start), newest) - first, 0)
        tokens = self.history[first : first + most] if held > most else self.history[first:]
        entries = self.stage.export_entries(first, first + min(held, most), self.head_start) if held else None
        return CatchUp(DECIDER, self.begin.request, first, tokens, entries)

    def _answer_missing(self) -> None:
        """Send sub-processes the tokens that they lack; one that lacks more than a message holds asks again."""
        if not (self._asks and self._missing):
            return
        behind = len(self.begin.prompt_ids)
        for rank, position in self._missing.items():
            if position < behind:
                self.send((rank,), replace(self.begin, delivered=[]))
            self.send((rank,), self._catch_up(max(position, behind), _MOST_CAUGHT_UP))
        self._missing.clear()

    def _settle(self, token: int) -> Generator[Awaited, Any, HeadStart | None]:
        """The early start of the newest token, or None.

        This waits only for a sub-process that has named the token, and at most for the time that its layers would take
        here: a candidate that is not named yet cannot be ready sooner. A state that is not finite is not used, because
        its numbers may come from another candidate of the same pass.
        """
        position = len(self.history) - 1
        while not self._asks or self._early_start(position, token) is None:
            message = yield WaitFor(0)
            if message is None:
                break
            self._take(message)
        if not self._asks:
            self._note_way(None)
            return None
        self.asked.add(position)
        wanted = WaitFor(self.head_start)
        while awaited := self._awaited(position, token):
            message = yield wanted
            if message is None:
                for rank in awaited:
                    self._absences[rank] += 1
                break
            self._take(message)
        early = self._early_start(position, token)
        heard = self._heard.pop(position, _Heard())
        self._absences.update(dict.fromkeys(heard.head_starts, 0))
        for candidate in heard.candidates.values():
            self._count(candidate)
        is_used = early is not None and bool(_state_of(token, early).isfinite().all())
        return self._note_way(early if is_used else None)

    def _note_way(self, early: HeadStart | None) -> HeadStart | None:
        """Have the policy time the newest token, and follow its choice; returns the early start to use.

        When guessing stops, sub-processes still receive the first token after their last early start, so that they send
        its entries.
        """
        self.policy.note(len(self.history))
        guesses = self.policy.guessing != Guessing.NOTHING
        if not guesses:
            early = None
        self._misses = 0 if early else self._misses + 1
        if guesses or self._misses >= _QUIET:
            self._asks = guesses
        return early

    def _early_start(self, position: int, token: int) -> HeadStart | None:
        head_starts = self._heard[position].head_starts.values()
        return next((early for early in head_starts if self._is_right(early, token)), None)

    def _is_right(self, named: Candidate | HeadStart, token: int, position: int | None = None) -> bool:
        """Whether a message names `token` at `position` (default: the newest) and started from this text."""
        path, end = named.path, len(self.history) - 1 if position is None else position
        return token in named.token_ids and (not path or self.history[end - len(path) : end] == path)

    def _count(self, candidate: Candidate) -> None:
        """Note whether a candidate was right."""
        position = candidate.position
        if position in self.asked and self._is_right(candidate, self.history[position], position):
            self.foreseen.add(position)

    def _awaited(self, position: int, token: int) -> list[int]:
        """Ranks of sub-processes whose early start of `token` is on its way; empty once one has come."""
        heard = self._heard[position]
        if self._cancelled or self._early_start(position, token):
            return []
        named_it = [rank for rank, named in heard.candidates.items() if self._is_right(named, token)]
        if position % _SECOND_CHANCE == 0:  # one that is always a little late gets a chance
            return named_it
        return [rank for rank in named_it if self._absences[rank] < _MOST_ABSENCES]

    def _fill_gaps(self) -> Machine:
        """Complete the first layers' caches up to the newest token: sub-processes ran these layers for hits."""
        newest = len(self.history) - 1
        wanted = WaitFor(self.head_start)
        while (position := self.stage.length(0)) < newest:
            if position not in self._entries:
                message = yield wanted
                if message is not None:
                    self._take(message)
                    continue
            run = pop_consecutive(self._entries, position, newest)
            if run:
                self.stage.import_entries(run)
            else:
                yield Call(self.stage.run, 0, self.head_start, [self.history[position]], position)
                self.recomputed_layer_passes += self.head_start
        self._entries.clear()

    def _take_all(self) -> Machine:
        while (message := (yield WaitFor(0))) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._cancelled = True
        elif isinstance(message, Begin):
            self.repeat(len(message.delivered))
        elif isinstance(message, Missing):
            if message.position < len(self.history) and message.sender in self.subs:
                self._missing[message.sender] = message.position
        elif isinstance(message, Entries):
            self._entries.update(enumerate(message.entries, message.position))
        elif isinstance(message, Candidate | HeadStart) and message.position >= len(self.history) - 1:
            heard = self._heard[message.position]
            if isinstance(message, Candidate) and message.position < len(self.history):
                self._count(message)
            if isinstance(message, Candidate):
                heard.candidates[message.sender] = message
            else:
                heard.head_starts[message.sender] = message
        elif isinstance(message, Candidate):
            self._count(message)


def _state_of(token: int, early: HeadStart) -> Tensor:
    """The hidden state of one of the candidates, `[1, 1, hidden_size]`."""
    row = early.token_ids.index(token)
    return early.hidden[:, row : row + 1]
