"""The messages between the processes; `wire` encodes them."""

from dataclasses import dataclass, field

from torch import Tensor

from ppd_runtime.pipeline.fields import (
    Bytes,
    Candidates,
    Count,
    Finite,
    Int64,
    Int64s,
    Logprobs,
    Millionths,
    Numbers,
    Position,
    Rank,
    Ranks,
    Request,
    TensorBytes,
    Texts,
    TokenId,
    TokenIds,
    Winners,
)
from ppd_runtime.results import PathStats
from ppd_runtime.sampling.logprobs import TokenLogprobs, unpacked
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import DECIDER

MISS = 0
"""`Token.winner` if no candidate was right in time."""
NOT_ASKED = -1
"""`Token.winner` of the last token, whose successor is not needed."""


@dataclass(frozen=True, slots=True)
class Message:
    """Anything on the wire: who sent it, and the number of the request it belongs to."""

    sender: Rank
    request: Request


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Client → main → subs: start a request, or go on with it.

    After a silence the client sends it again, and names the tokens that it has: a process that knows the request
    repeats what follows them, another one starts with them.
    """

    prompt_ids: TokenIds
    params: SamplingParams
    """All but the time limit, which the client enforces."""
    live: bool
    """Whether the client wants each token at once; else they may come in batches, which wakes it less often."""
    traced: bool = False
    """Whether the client wants every process' `Spans`."""
    delivered: TokenIds = field(default_factory=list)
    """Tokens after the prompt that the client already has; for a stage, all certain tokens."""
    epoch: Count = 0
    """For a stage: the number of this attempt; each starts from the certain tokens. For the main process: how often it
    has been replaced since the request began."""
    under_way: Numbers = ()
    """Lower-numbered requests that are not over; all other lower-numbered ones are."""
    watched: bool = False
    """Whether the client also wants every process' `Spans` of passes and choices during the request."""
    foreseen: bool = False
    """Whether the client wants `Foreseen` messages: one a token, each costs it some 30 µs."""
    guessing: Count = 2
    """For a stage: what to guess after the newest token, a `Guessing`."""


@dataclass(frozen=True, slots=True)
class ExitState(Message):
    """Main → subs: the hidden state after the exit layer, `[1, 1, hidden_size]`, of the token at `position`."""

    position: Position
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Candidate(Message):
    """Sub → main: the tokens that this sub-process is starting at `position`, likeliest first."""

    position: Position
    token_ids: Candidates
    path: TokenIds = field(default_factory=list)
    """Tokens right before them that were candidates themselves; those further back were certain."""


@dataclass(frozen=True, slots=True)
class HeadStart(Message):
    """Sub → main: its candidates' hidden states after the head-start layers, `[1, candidates, hidden_size]`."""

    position: Position
    token_ids: Candidates
    hidden: Tensor
    path: TokenIds = field(default_factory=list)
    """See `Candidate`."""
    sent_at: Finite = 0.0
    """The host's `time.perf_counter`; for statistics only."""


@dataclass(frozen=True, slots=True)
class Token(Message):
    """Main → subs and client: the token at `position` is certain; `winner`'s early start is used (or MISS).

    For the subs, `hidden` is what this token's `ExitState` would hold, if the early start reached that far.
    """

    position: Position
    token_id: TokenId
    winner: Rank
    hidden: Tensor | None = None
    logprobs: Logprobs = ()
    """For the client, if it asks: see `logprobs.packed`; the prompt's come with the first new token."""
    top_ids: Candidates = ()
    guessing: Count = 2
    """For a stage: what to guess after this token, a `Guessing`."""

    def noted(self, prompt_ids: list[int]) -> tuple[TokenLogprobs, ...]:
        """The message's log-probabilities, the token's last; raises ValueError for another prompt's."""
        told = len(self.logprobs) - len(self.top_ids)
        of_prompt = prompt_ids[1:] if told > 1 else []
        return unpacked(self.logprobs, self.top_ids, [*of_prompt, self.token_id]) if told else ()


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """Main → client, if it does not want each at once: consecutive tokens from `position` on, each as a `Token`."""

    position: Position
    token_ids: TokenIds
    winners: Winners

    def singly(self) -> list[Token]:
        """Each token."""
        pairs = enumerate(zip(self.token_ids, self.winners, strict=True), self.position)
        return [Token(self.sender, self.request, at, token, winner) for at, (token, winner) in pairs]


@dataclass(frozen=True, slots=True)
class Entries(Message):
    """Winner → main and the other subs: its key/value entries of the token at `position` and those after it.

    `[tokens, layers, 2, heads, head_dim]`.
    """

    position: Position
    entries: Tensor
    sent_at: Finite = 0.0
    """See `HeadStart`."""


@dataclass(frozen=True, slots=True)
class CatchUp(Message):
    """Main → subs after a pause, or a sub that lacks tokens: the tokens from `position` on.

    `entries` are the first tokens' in the head-start layers, `[tokens with entries, layers, 2, heads, head_dim]`; the
    others' have to be computed.
    """

    position: Position
    token_ids: TokenIds
    entries: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Missing(Message):
    """Sub → main: it lacks the token at `position`, and heard of a later one; 0: it knows nothing of the request.

    Stage → the one before: it lacks the states from `position` on, which may be parts of the prompt.
    """

    position: Position
    epoch: Count = 0
    """For a stage: its attempt; if `position` is 0, it has no prompt of that attempt."""


@dataclass(frozen=True, slots=True)
class PromptStates(Message):
    """Stage → next: the prompt chunk's hidden states at `position`, after its layers, `[1, tokens, hidden_size]`."""

    epoch: Count
    position: Position
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Rows(Message):
    """Stage → next: the hidden states of a pass after its layers, `[1, nodes, hidden_size]`, a row a node.

    Each node is a token at a position after a parent, which came before it.
    """

    epoch: Count
    pass_number: Count
    nodes: Numbers
    parents: Numbers
    positions: Numbers
    token_ids: Candidates
    hidden: Tensor
    sent_at: Finite = 0.0
    """See `HeadStart`."""


@dataclass(frozen=True, slots=True)
class Guesses(Message):
    """Stage → first stage, after a pass: what may follow its nodes, equally many tokens each, likeliest first."""

    epoch: Count
    pass_number: Count
    nodes: Numbers
    token_ids: Candidates
    chances: Millionths
    """How likely each is right, by the stage's exit head alone."""


@dataclass(frozen=True, slots=True)
class Foreseen(Message):
    """First stage → client, if it asks: which boundary first named the token at `position`.

    0 means the text's repetitions, the number of stages no boundary. It is sent once; nobody waits for it.
    """

    position: Position
    boundary: Count


@dataclass(frozen=True, slots=True)
class End(Message):
    """Main → subs: the request is over."""


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Client → main: the rest of the request is no longer wanted."""


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """Main → client, after the last token: why it ended, and its statistics."""

    reason: str
    num_tokens: Count
    """Tokens after the prompt."""
    path: PathStats
    error: str = ""
    """Why the request failed after them; empty if it did not. The worker lives on: it answers the next request."""

    @staticmethod
    def cut_short(request: int, num_tokens: int = 0, latency_s: float = 0.0) -> "Finished":
        """The end of a cancelled request of which no main process says more: other times and passes are unknown."""
        return Finished(DECIDER, request, "cancelled", num_tokens, PathStats(latency_s))


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Sub → client, at the end of a request: its layer passes for candidates and for its own cache."""

    layer_passes: Count
    coherence_layer_passes: Count
    first_boundary: Numbers = ()
    """From the first stage: tokens that boundary 1, 2, … was the first to name; last, tokens that none named."""


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """Any worker → client: it has dropped a message that the request waits for, and why."""

    whose: Rank
    """Who sent that message."""
    reason: str
    final: bool
    """Whether it would drop the message again each time; else the client may ask for what was lost."""


@dataclass(frozen=True, slots=True)
class Unreadable(Message):
    """What an endpoint returns for bytes that are no message, but name a sender and a request; never sent."""

    kind: str
    """The kind that the bytes name; empty if they name none."""
    reason: str


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Any worker → client: it cannot go on, and why."""

    error: str


@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Client → every worker: end the process."""


@dataclass(frozen=True, slots=True)
class Spans(Message):
    """Main or sub → client, before `Finished` or `Report`: a piece of what it did and when; see `span_messages`."""

    pid: Count
    wall_offset_ns: Int64
    dropped: Count
    numbers: Int64s
    watched: bool = False
    """Whether it is for a watching client, and not part of the trace."""


@dataclass(frozen=True, slots=True)
class Peers(Message):
    """Client → every worker: from now on the peers at these addresses are at `locations`."""

    addresses: Ranks
    locations: Texts


@dataclass(frozen=True, slots=True)
class LinkNote(Message):
    """Worker → worker: something about the link between them; see `transport.collective`."""

    link: str
    key: str
    value: Bytes


@dataclass(frozen=True, slots=True)
class TensorAnnouncement(Message):
    """Worker → worker: a message whose tensor comes over their link, as transfer `number`."""

    link: str
    number: Count
    num_bytes: TensorBytes
    header: Bytes
    """The message's header from `split`."""
