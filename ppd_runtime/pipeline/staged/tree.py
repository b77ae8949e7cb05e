"""The tokens in flight as one stage knows them: a tree of nodes after the newest certain token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import NamedTuple, overload

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange

MOST_NODES = 64
"""Most nodes in flight, as the first stage sees it."""
MOST_HELD = 2 * MOST_NODES
"""Most nodes that a stage holds: it may hear of a certain token later than the first stage."""


class RowState(NamedTuple):
    """A row's hidden state among those of a pass, which are `[1, rows, hidden_size]`."""

    rows: Tensor
    row: int

    def alone(self) -> Tensor:
        """The row's state alone, `[1, 1, hidden_size]`."""
        return self.rows if self.rows.shape[1] == 1 else self.rows[:, self.row : self.row + 1]


@dataclass(eq=False, slots=True)
class Node:
    """A token at a position after a parent."""

    number: int
    token: int
    position: int
    behind: int
    """The number of its parent."""
    parent: "Node | None"
    """None once the parent is kept."""
    children: "dict[int, Node]" = field(default_factory=dict)
    """By token."""
    has_run: bool = False
    """Whether the stage holds its entries."""
    is_certain: bool = False
    is_kept: bool = False
    """Whether its entries lie in place for good."""
    is_dropped: bool = False
    hidden: RowState | None = None
    """Until the node has run, its state before this stage; then, at the last stage, its state after all layers."""
    pass_number: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Text(Sequence[int]):
    """A view of a text without a copy: it may be long, and most heads only need its length."""

    history: Sequence[int]
    """Tokens from the text's beginning; the list may grow."""
    known: int
    """Tokens of the history that the text begins with."""
    behind: Sequence[int]

    def __len__(self) -> int:
        return self.known + len(self.behind)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self.history, self.known), self.behind)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step == 1 and start <= self.known <= stop:
                return [*self.history[start : self.known], *self.behind[: stop - self.known]]
            return [*self][place]
        index = range(len(self))[place]
        return self.history[index] if index < self.known else self.behind[index - self.known]


class NodeTree:
    """The nodes that may still become certain, as a tree after the newest certain token.

    Args:
        stage: is told which nodes are kept and dropped.
        history: the prompt and the certain tokens; the stage's machine adds tokens to this list.
        prompt_size: the prompt's tokens. The first node stands for the prompt, which runs before all other nodes.
    """

    def __init__(self, stage: TreeRange, history: list[int], prompt_size: int) -> None:
        self._stage, self.history = stage, history
        self.prompt = self.root = Node(0, history[prompt_size - 1], prompt_size - 1, 0, None, is_certain=True)
        """`prompt` is the node of the prompt's last token, `root` that of the newest certain token with a node here."""
        self.root.has_run = self.root.is_kept = True
        self._nodes = {0: self.root}
        self.held = 0
        """Number of nodes that are not certain and have entries here."""

    def get(self, number: int) -> Node | None:
        """The node of this number, if it may still become certain or is the newest certain one."""
        return self._nodes.get(number)

    def is_newest(self, node: Node) -> bool:
        """Whether the node stands for the newest certain token."""
        return node is self.root and node.position == len(self.history) - 1

    def add(self, number: int, token: int, position: int, parent: int) -> Node | None:
        """Add a node and return it; None if it cannot become certain, or is known."""
        behind = self._nodes.get(parent)
        if behind is None or behind.position != position - 1 or number in self._nodes or token in behind.children:
            return None
        if position < len(self.history) and self.history[position] != token:
            return None
        node = behind.children[token] = self._nodes[number] = Node(number, token, position, parent, behind)
        self.settle()
        return node

    def settle(self) -> None:
        """Follow the certain tokens as far as there are nodes for them, and drop all other branches."""
        while (position := self.root.position + 1) < len(self.history):
            right = self.root.children.get(self.history[position])
            for child in list(self.root.children.values()):
                if child is not right:
                    self._drop(child)
            if right is None:
                return
            del self._nodes[self.root.number]
            self.root.children.clear()
            right.is_certain, self.root = True, right
            self.held -= right.has_run
            self._keep(right)

    def note_run(self, node: Node) -> None:
        """A node has run; if it was dropped meanwhile, free its row."""
        node.has_run = True
        if node.is_dropped:
            self._stage.drop(node.number)
        else:
            self.held += not node.is_certain
            self._keep(node)

    def path(self, node: Node) -> list[int]:
        """The numbers of the node and of those before it that are not kept, oldest first."""
        path: list[int] = []
        behind: Node | None = node
        while behind is not None and not behind.is_kept:
            path.append(behind.number)
            behind = behind.parent
        return path[::-1]

    def guessed(self, node: Node) -> list[int]:
        """The guesses on the path to a node, its own token included, oldest first; none for a certain node."""
        tokens: list[int] = []
        behind: Node | None = node
        while behind is not None and not behind.is_certain:
            tokens.append(behind.token)
            behind = behind.parent
        return tokens[::-1]

    def text(self, node: Node) -> Text:
        """The tokens up to a node, its own included."""
        guessed = self.guessed(node)
        return Text(self.history, node.position - len(guessed) + 1, guessed)

    def alive(self) -> Iterator[Node]:
        """The newest certain node, and all nodes that may become certain."""
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def _keep(self, node: Node) -> None:
        if node.is_certain and node.has_run and not node.is_kept:
            self._stage.keep(node.number)
            node.is_kept, node.parent = True, None

    def _drop(self, node: Node) -> None:
        doomed = [node]
        if node.parent:
            del node.parent.children[node.token]
        while doomed:
            dropped = doomed.pop()
            doomed += dropped.children.values()
            dropped.children.clear()
            dropped.is_dropped, dropped.hidden = True, None
            self.held -= dropped.has_run
            self._nodes.pop(dropped.number, None)
            self._stage.drop(dropped.number)


def number_of(parent: int, token: int) -> int:
    """The number of the node of a token after a parent, which hashes its whole path.

    So a row means the same whichever stage sent it, before or after a restart, and in every attempt.
    """
    return int.from_bytes(blake2b(b"%d %d" % (parent, token), digest_size=8).digest(), "little") >> 1


def merged(history: list[int], position: int, tokens: Sequence[int]) -> bool:
    """Add certain tokens from `position` on to `history`; False if tokens before them are missing."""
    if position > len(history):
        return False
    history += tokens[len(history) - position :]
    return True
