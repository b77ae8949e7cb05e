"""Where the ending of a text stood before: a suffix automaton over tokens.

A table of n-grams has an entry a token for each length that it knows; an automaton has at most two states a token for
all lengths together.
"""

from array import array

Cursor = tuple[int, int]
"""A sequence of tokens that some text contains: its state and its length; it stays valid as texts grow."""
EMPTY: Cursor = 0, 0
LONGEST = 64
"""Most tokens of a cursor: it bounds the steps from an ending to its shorter ones, of which a long run of one token has
as many as tokens."""
_NONE = -1
_STATE_BYTES = 17  # four numbers of four bytes, and what arrays hold in reserve
_BRANCHING_BYTES, _BRANCH_BYTES = 450, 60  # a dict of a few entries with its place in another; an entry beyond these


class SuffixAutomaton:
    """All sequences within some texts that grow by one token at a time, each with the token that last followed it.

    Sequences that end at the same places share a state. A state's sequences are all endings of its longest one; the
    next shorter ending, which also ends at other places, belongs to the state's link. Most states are followed by one
    token, so a state has room for one, the latest, and only those with several have a dict of all.

    To add a token takes amortised constant time, and in addition a step for each link from the text's newest `longest`
    tokens down: each of these endings has a new latest follower. These are a few in usual texts, never more than
    `longest`.

    Args:
        longest: most tokens of a cursor.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._length, self._link = array("i", [0]), array("i", [_NONE])
        self._token, self._target = array("i", [_NONE]), array("i", [_NONE])
        self._all: dict[int, dict[int, int]] = {0: {}}  # the first state has many followers and no latest
        self._text = 0  # of the whole newest text
        self.newest = EMPTY
        """The newest text's ending."""

    @property
    def num_bytes(self) -> int:
        """About what it holds in memory."""
        branching = _BRANCHING_BYTES * len(self._all) + _BRANCH_BYTES * len(self._all[0])
        return _STATE_BYTES * len(self._length) + branching

    def begin_text(self) -> None:
        """What is added from now on is another text. As far as it begins like an earlier one, it takes no memory."""
        self._text, self.newest = 0, EMPTY

    def add(self, token: int) -> None:
        """Let the newest text grow by a token, which is not negative."""
        self._text = self._grown(token)
        state = self.newest[0]
        while state:
            if self._token[state] != token:
                self._token[state], self._target[state] = token, self._all[state][token]
            state = self._link[state]
        self.newest = self.advance(self.newest, token)

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """The longest ending of the cursor's sequence with `token` behind it that some text contains."""
        state, length = cursor
        while (target := self._next(state, token)) == _NONE:
            if not state:
                return EMPTY
            state = self._link[state]
            length = min(length, self._length[state])
        return self._settled(target, min(length + 1, self._longest))

    def guess(self, cursor: Cursor) -> tuple[int, int] | None:
        """What last followed the longest ending of the cursor's sequence that has been followed by a token, and that
        ending's length; None if there is none.

        An ending that a text only has at its end was not followed yet, so nothing is guessed from that place.
        """
        state, length = self._settled(*cursor)
        while self._token[state] == _NONE and state:
            state = self._link[state]
            length = self._length[state]
        return (self._token[state], length) if state else None

    def _settled(self, state: int, length: int) -> Cursor:
        """The cursor, whose shorter sequences may have got a state of their own since."""
        while state and length <= self._length[self._link[state]]:
            state = self._link[state]
        return state, length

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        followers = self._all.get(state)
        return _NONE if followers is None else followers.get(token, _NONE)

    def _grown(self, token: int) -> int:
        """The state of the newest text with a token behind it."""
        state = self._text
        if (known := self._next(state, token)) != _NONE:
            return self._exactly(state, token, known)
        new = self._added(self._length[state] + 1, _NONE, _NONE)
        while state != _NONE and (known := self._next(state, token)) == _NONE:
            self._lead(state, token, new)
            state = self._link[state]
        self._link[new] = 0 if state == _NONE else self._exactly(state, token, known)
        return new

    def _exactly(self, state: int, token: int, target: int) -> int:
        """The state whose longest sequence is the one of `state` with the token behind it; it may have to be split from
        `target`."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        split = self._added(length, self._token[target], self._target[target])
        self._link[split], self._link[target] = self._link[target], split
        if target in self._all:
            self._all[split] = self._all[target].copy()
        while state != _NONE and self._next(state, token) == target:
            self._lead(state, token, split)
            state = self._link[state]
        return split

    def _added(self, length: int, token: int, target: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._token.append(token)
        self._target.append(target)
        return len(self._length) - 1

    def _lead(self, state: int, token: int, target: int) -> None:
        """From now on `token` leads from one state to another."""
        latest, followers = self._token[state], self._all.get(state)
        if followers is None and latest not in (_NONE, token):
            followers = self._all[state] = {latest: self._target[state]}
        if followers is not None:
            followers[token] = target
        if state and latest in (_NONE, token):
            self._token[state], self._target[state] = token, target
