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
    """A message: the rank of its sender, and the number of its request."""

    sender: Rank
    request: Request


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Client → main → subs: start a request, or continue it.

    After a silence the client sends this message again, with the tokens that it has. A process that knows the request
    then repeats the tokens that follow; any other process starts after these tokens.
    """

    prompt_ids: TokenIds
    params: SamplingParams
    """The settings without the time limit, which the client enforces."""
    live: bool
    """Whether the client wants each token at once; else tokens may come in batches, which wake it less often."""
    traced: bool = False
    """Whether the client wants every process' `Spans`."""
    delivered: TokenIds = field(default_factory=list)
    """Tokens after the prompt that the client already has; for a stage, all certain tokens."""
    epoch: Count = 0
    """For a stage: the number of this attempt; each starts from the certain tokens. For the main process: how often it
    has been replaced since the request began."""
    under_way: Numbers = ()
    """The requests with lower numbers that are not over; all others with lower numbers are over."""
    watched: bool = False
    """Whether the client also wants every process' `Spans` of passes and choices during the request."""
    foreseen: bool = False
    """Whether the client wants a `Foreseen` message for each token; each costs the client some 30 µs."""
    guessing: Count = 2
    """For a stage: what to guess after the newest token, a `Guessing`."""


@dataclass(frozen=True, slots=True)
class ExitState(Message):
    """Main → subs: the hidden state after the exit layer, `[1, 1, state_size]`, of the token at `position`."""

    position: Position
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Candidate(Message):
    """Sub → main: the tokens that this sub-process is starting at `position`, likeliest first."""

    position: Position
    token_ids: Candidates
    path: TokenIds = field(default_factory=list)
    """The tokens right before them that were candidates themselves; all earlier tokens were certain."""


@dataclass(frozen=True, slots=True)
class HeadStart(Message):
    """Sub → main: its candidates' hidden states after the head-start layers, `[1, candidates, state_size]`."""

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

    For the subs, `hidden` is the token's state after the exit layer if the early start reached that layer; then no
    `ExitState` follows. For the first stage it is what a drafter reads of the token before, `[1, layers, hidden_size]`.
    """

    position: Position
    token_id: TokenId
    winner: Rank
    hidden: Tensor | None = None
    logprobs: Logprobs = ()
    """For the client, if it asks, by `logprobs.packed`; the prompt's come with the first new token."""
    top_ids: Candidates = ()
    guessing: Count = 2
    """For a stage: what to guess after this token, a `Guessing`."""

    def noted(self, prompt_ids: list[int]) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of the message, its token's last; raises ValueError if they fit another prompt."""
        told = len(self.logprobs) - len(self.top_ids)
        of_prompt = prompt_ids[1:] if told > 1 else []
        return unpacked(self.logprobs, self.top_ids, [*of_prompt, self.token_id]) if told else ()


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """Main → client, if the client does not want each token at once: consecutive tokens from `position` on."""

    position: Position
    token_ids: TokenIds
    winners: Winners

    def singly(self) -> list[Token]:
        """The tokens, as one message each."""
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
    """Main → subs after a pause, or main → a sub that lacks tokens: the tokens from `position` on.

    `entries` are key/value entries of the first of these tokens in the head-start layers, `[tokens with entries,
    layers, 2, heads, head_dim]`. The sub computes the entries of the others.
    """

    position: Position
    token_ids: TokenIds
    entries: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Missing(Message):
    """Sub → main: it has heard of a later token but lacks the one at `position`; 0: it does not know the request.

    Stage → the stage before: it lacks the states from `position` on, the prompt's included.
    """

    position: Position
    epoch: Count = 0
    """For a stage: its attempt; if `position` is 0, it has no prompt of that attempt."""


@dataclass(frozen=True, slots=True)
class PromptStates(Message):
    """Stage → next: hidden states of the prompt's chunk at `position` after the stage, as `TreeRange` has them.

    Last stage → first: what a drafter reads of the chunk, `[tokens, layers, hidden_size]`.
    """

    epoch: Count
    position: Position
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Rows(Message):
    """Stage → next: the hidden states of a pass after its layers, as `TreeRange` has them.

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
    """Stage → first stage, after a pass: tokens that may follow its nodes, as many for each, likeliest first."""

    epoch: Count
    pass_number: Count
    nodes: Numbers
    token_ids: Candidates
    chances: Millionths
    """The probability of each token, by the stage's exit head alone."""


@dataclass(frozen=True, slots=True)
class Foreseen(Message):
    """First stage → client, if it asks: which boundary first named the token at `position`.

    0 stands for guesses before layer 1, from repetitions or a drafter. If no boundary named the token, `boundary` is
    the number of stages. The message is sent once; nobody waits for it.
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
    """Main → client, after the last token: why the text ended, and the request's statistics."""

    reason: str
    num_tokens: Count
    """Tokens after the prompt."""
    path: PathStats
    error: str = ""
    """Why the request failed after these tokens; empty if it did not. The worker serves other requests."""

    @staticmethod
    def cut_short(request: int, num_tokens: int = 0, latency_s: float = 0.0) -> "Finished":
        """The end of a cancelled request that no main process has reported: its other statistics are unknown."""
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
    """The rank that sent that message."""
    reason: str
    final: bool
    """Whether the worker would drop the message each time; if not, the client may ask for a resend."""


@dataclass(frozen=True, slots=True)
class Unreadable(Message):
    """Returned by an endpoint for bytes that are no message but name a sender and a request; never sent."""

    kind: str
    """The kind that the bytes name; empty if they name none."""
    reason: str


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Any worker → client: the worker ends with this error."""

    error: str


@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Client → every worker: end the process."""


@dataclass(frozen=True, slots=True)
class Spans(Message):
    """Main or sub → client, before `Finished` or `Report`: a piece of its recorded spans; see `span_messages`."""

    pid: Count
    wall_offset_ns: Int64
    dropped: Count
    numbers: Int64s
    watched: bool = False
    """Whether the spans are for a watching client, and not part of the trace."""


@dataclass(frozen=True, slots=True)
class Peers(Message):
    """Client → every worker: from now on the peers with these addresses are reached at `locations`."""

    addresses: Ranks
    locations: Texts


@dataclass(frozen=True, slots=True)
class LinkNote(Message):
    """Worker → worker: a named value for the link between them; see `transport.collective_links`."""

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
