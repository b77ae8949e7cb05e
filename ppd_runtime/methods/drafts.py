"""A self-speculative method's draft: a tree of tokens after the newest certain one, mostly a chain."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ppd_runtime.models.native.drafts import DraftedChain


@dataclass(frozen=True)
class Proposal:
    """A token for one place of a draft."""

    token: int
    confidence: float
    """How likely the whole model is to keep the token, as far as the draft's scores predict it; see each rule."""
    distribution: Tensor | None = None
    """`[vocab_size]` probabilities that the token was drawn from; None if it was not drawn."""


class Verified(NamedTuple):
    """The verification of a draft in the call that made it. Times are seconds of `time.perf_counter`."""

    choices: Sequence[int]
    """The whole model's choice after each node, greedily, or NO_TOKEN."""
    began: float
    """When the verification began."""
    chosen: tuple[float, float]
    """When choosing began and ended."""


@dataclass
class Draft:
    """A tree of tokens; node 0 is the newest certain token, and a node comes behind its parent."""

    root: int
    """Node 0's token."""
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    """Each node's parent; -1 for node 0."""
    distributions: list[Tensor | None] = field(init=False)
    """What each was drawn from; None if it was not drawn, and for node 0."""
    steps: int = 0
    """Draft passes whose token was taken: the drafted depth, without side branches."""
    verified: Verified | None = None
    """The draft's verification; None: there was none yet."""

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.distributions = [self.root], [-1], [None]

    def add(self, proposal: Proposal, parent: int) -> int:
        """Add a token after a node; gives its number."""
        self.tokens.append(proposal.token)
        self.parents.append(parent)
        self.distributions.append(proposal.distribution)
        return len(self.tokens) - 1

    def add_chain(self, chain: DraftedChain) -> None:
        """Add a chain after node 0 of an empty draft, one step a token, with its verification, if any."""
        size = len(chain.tokens)
        self.parents += range(size)
        self.tokens += chain.tokens
        self.distributions += [None] * size
        self.steps += size
        if chain.choices:
            began, _, behind_head, chosen = chain.verified
            self.verified = Verified(chain.choices, began, (behind_head, chosen))

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
