"""A draft model in a process of its own: it hears the certain tokens and names what may follow, ahead of the stages."""

from collections.abc import Iterator, Sequence

from ppd_runtime.pipeline.messages import Begin, CatchUp, End, Guesses, Message, Missing, Report, Token
from ppd_runtime.pipeline.ports import Call, Machine, Send, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.chances import in_millionths
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.tree import MOST_NODES, Text, merged, number_of
from ppd_runtime.settings.layouts import DECIDER

_LEAST_CHANCE = 0.02  # of a path, as in the first stage
_ASK_AGAIN = 8  # tokens later, since the answer may be lost
_MOST_PLACES = 256  # with those that are named


class _Place:
    """A place in the text or behind it, whose number is that of the stages' node there."""

    def __init__(self, number: int, chance: float, path: tuple[int, ...] = ()) -> None:
        self.number, self.chance, self.path, self.is_asked = number, chance, path, False
        self.children: dict[int, _Place] = {}
        """What is named to follow."""

    def all(self) -> "Iterator[_Place]":
        """The place and all behind it."""
        yield self
        for child in self.children.values():
            yield from child.all()


class DraftWorker:
    """Drafts for one request: behind the newest certain token it names what may follow the likeliest place, and so on.

    Its names go to the first stage, which uses those for places that it reaches. The process may be lost, late or
    wrong at any time: stages need none of its messages.

    Args:
        drafts: for this request alone; its network reads tokens, and no states.
        rank: this process'.
        first: the first stage's.
    """

    def __init__(self, drafts: NetworkDrafts, rank: int, first: int, send: Send, begin: Begin) -> None:
        self._drafts, self.rank, self._first, self.send, self.begin = drafts, rank, first, send, begin
        self.history = [*begin.prompt_ids]
        self.drafts = 0
        """Places behind which its network was asked."""
        self._root, self._guessing = _Place(0, 1.0), begin.guessing
        self._read = self._ask_at = 0
        self._over = False
        self._last_position = len(begin.prompt_ids) + begin.params.max_new_tokens - 2

    def serve(self) -> Machine:
        """Follow the request to its end."""
        self._take(self.begin)
        wanted: WaitFor
        while not self._over:
            place = self._likeliest() if self._guessing >= Guessing.EXITS else None
            wanted = WaitFor(None) if place is None else WaitFor(0, work=_speculation)
            if (message := (yield wanted)) is not None:
                self._take(message)
            elif place is not None:
                yield from self._name(place)
        self.release()

    def release(self) -> None:
        """Free the memory: the request is over."""
        self._drafts.release()

    def report(self) -> Report:
        """The process' counts: a draft counts as a pass through a layer."""
        return Report(self.rank, self.begin.request, self.drafts, 0)

    def _take(self, message: Message) -> None:
        if isinstance(message, End):
            self._over = True
        elif isinstance(message, Begin):
            self._guessing = message.guessing
            self._follow(len(message.prompt_ids), message.delivered)
        elif isinstance(message, Token):
            self._guessing = message.guessing
            self._follow(message.position, [message.token_id])
        elif isinstance(message, CatchUp):
            self._follow(message.position, message.token_ids)

    def _follow(self, position: int, tokens: Sequence[int]) -> None:
        """Tokens are certain; what was named behind them stays."""
        known = len(self.history)
        if not merged(self.history, position, tokens):
            if position >= self._ask_at:
                self.send((DECIDER,), Missing(self.rank, self.begin.request, known, self.begin.epoch))
                self._ask_at = position + _ASK_AGAIN
            return
        for token in self.history[known:]:
            place = self._root.children.get(token) or _Place(number_of(self._root.number, token), 1.0)
            if place.path:
                chance = place.chance or 1.0
                for behind in place.all():
                    behind.chance, behind.path = behind.chance / chance, behind.path[1:]
            self._root = place

    def _likeliest(self) -> _Place | None:
        """The likeliest place behind which nothing was asked yet; None once there is no likely one, or no room."""
        places, best = 0, None
        for place in self._root.all():
            places += 1
            is_open = not place.is_asked and len(self.history) + len(place.path) - 1 <= self._last_position
            if is_open and place.chance >= _LEAST_CHANCE and (best is None or place.chance > best.chance):
                best = place
        return best if places <= _MOST_PLACES and len(best.path if best else ()) < MOST_NODES else None

    def _name(self, place: _Place) -> Machine:
        for token in self.history[self._read :]:
            self._drafts.follow(token, None)
        self._read, place.is_asked = len(self.history), True
        (named,) = yield Call(self._drafts.guesses, [place.path], [Text(self.history, self._read, place.path)])
        self.drafts += 1
        if not named:
            return
        for token, said in named:
            child = _Place(number_of(place.number, token), place.chance * said, (*place.path, token))
            place.children[token] = child
        tokens = tuple(token for token, _ in named)
        request, epoch = self.begin.request, self.begin.epoch
        numbers = (place.number,)
        self.send((self._first,), Guesses(self.rank, request, epoch, 0, numbers, tokens, in_millionths(named)))


def _speculation() -> Work:
    return Work.SPECULATION
