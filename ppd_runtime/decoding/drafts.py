"""What a self-speculative method drafts: a tree of tokens behind the newest certain one; mostly a chain."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """A token for one place of a draft."""

    token: int
    confidence: float
    """How likely the whole model is to keep the token, as far as the draft's scores foretell it; see each rule."""
    distribution: Tensor | None = None
    """`[vocab_size]` probabilities that the token was drawn from; None where it was named outright."""


@dataclass
class Draft:
    """A tree of tokens; node 0 is the newest certain token, and a node comes behind its parent."""

    root: int
    """Node 0's token."""
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    """Each node's parent; -1 for node 0."""
    distributions: list[Tensor | None] = field(init=False)
    """What each was drawn from; None where it was named outright, and for node 0."""
    steps: int = 0
    """Draft passes whose token was taken: the depth that was drafted, side branches not counted."""

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.distributions = [self.root], [-1], [None]

    def add(self, proposal: Proposal, parent: int) -> int:
        """Hang a token behind a node; its own number."""
        self.tokens.append(proposal.token)
        self.parents.append(parent)
        self.distributions.append(proposal.distribution)
        return len(self.tokens) - 1

    def add_chain(self, tokens: Sequence[int]) -> None:
        """Hang a chain of tokens that were named outright behind a draft that is a chain, a step each."""
        size = len(tokens)
        self.parents += range(len(self.tokens) - 1, len(self.tokens) - 1 + size)
        self.tokens += tokens
        self.distributions += [None] * size
        self.steps += size

    def children(self, node: int) -> list[int]:
        """The nodes behind `node`, in the order in which they were added."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def child_with(self, node: int, token: int) -> int | None:
        """The node behind `node` with this token, if any."""
        behind = node + 1
        if behind < len(self.tokens) and self.parents[behind] == node and self.tokens[behind] == token:
            return behind  # a chain's
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    @property
    def is_chain(self) -> bool:
        """Whether every node is behind the one before it."""
        return self.parents == list(range(-1, len(self.tokens) - 1))
