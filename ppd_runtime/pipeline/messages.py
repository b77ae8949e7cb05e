"""What the processes say to each other, and its form on the wire: a bounded msgpack header and raw tensor frames.

A header is `[version, kind, *fields]`; a tensor field holds dtype and shape there and its bytes follow in a frame
of their own. Decoding trusts nothing: every length, type, range and shape is checked before anything is allocated, and
whatever is wrong becomes a `WireError`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
from torch import Tensor

from ppd_runtime.config import LogitsProcessor
from ppd_runtime.pipeline.fields import (
    MOST_TEXTS,
    Bytes,
    Candidates,
    Chance,
    Count,
    FieldPlan,
    Finite,
    Int64,
    Int64s,
    Length,
    Limit,
    NotNegative,
    Penalty,
    Position,
    Positive,
    Rank,
    Ranks,
    Request,
    Seed,
    Share,
    StopTokenIds,
    TensorBytes,
    TokenId,
    TokenIds,
    Winners,
    WireError,
    make_plan,
    pack_numbers,
)
from ppd_runtime.pipeline.tensors import Frame, arriving, outgoing

WIRE_VERSION = 10
MAIN = 0
"""The main process' address; sub-processes are 1 to W, by the rank of their likeliest candidate."""
CLIENT = -1
"""The address of whoever holds the runtime."""
MISS = 0
"""`Token.winner` where no candidate was right in time."""
NOT_ASKED = -1
"""`Token.winner` of the last token, whose successor nobody needs."""

_MAX_HEADER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Message:
    """Anything on the wire: who sent it, and the number of the request it belongs to."""

    sender: Rank
    request: Request


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Client → main → subs: start a request, or go on with it.

    The client says so again after a silence, and then names the tokens that it has got: one that knows the request
    repeats what follows them, one that does not starts with them.
    """

    prompt_ids: TokenIds
    max_new_tokens: Length
    temperature: NotNegative
    top_k: Limit
    top_p: Share
    repetition_penalty: Positive
    seed: Seed
    stop: list[str]
    ignore_eos: bool
    live: bool
    """Whether the client wants each token at once; else they may come in batches, which wakes it less often."""
    traced: bool = False
    """Whether the client wants every process' `Spans`."""
    delivered: TokenIds = field(default_factory=list)
    """Tokens behind the prompt that the client has already got."""
    min_p: Chance = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop_token_ids: StopTokenIds = field(default_factory=list)
    num_generated: Limit = 0


@dataclass(frozen=True, slots=True)
class BeginHere(Begin):
    """A `Begin` between threads of one process, with functions: it has no form on the wire."""

    logits_processors: tuple[LogitsProcessor, ...] = ()


@dataclass(frozen=True, slots=True)
class ExitState(Message):
    """Main → subs: the hidden state behind the exit layer, `[1, 1, hidden_size]`, of the token at `position`."""

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
    """Sub → main: its candidates' hidden states behind the head-start layers, `[1, candidates, hidden_size]`."""

    position: Position
    token_ids: Candidates
    hidden: Tensor
    path: TokenIds = field(default_factory=list)
    """As a `Candidate`'s."""
    sent_at: Finite = 0.0
    """By the clock of the host, `time.perf_counter`; for statistics only."""


@dataclass(frozen=True, slots=True)
class Token(Message):
    """Main → subs and client: the token at `position` is certain, and whose early start is used (or MISS).

    To the subs, `hidden` is what an `ExitState` of this token would hold, where the early start reached that far.
    """

    position: Position
    token_id: TokenId
    winner: Rank
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """Main → client, where it does not want each at once: the tokens at `position` and behind it, each as a `Token`."""

    position: Position
    token_ids: TokenIds
    winners: Winners

    def singly(self) -> list[Token]:
        """Each of them."""
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
    """As a `HeadStart`'s."""


@dataclass(frozen=True, slots=True)
class CatchUp(Message):
    """Main → subs, after a rest, and to one that lacks tokens: those at `position` and behind it.

    With the entries of the first of them, `[tokens with entries, layers, 2, heads, head_dim]`, of the head-start
    layers; the others' have to be computed.
    """

    position: Position
    token_ids: TokenIds
    entries: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Missing(Message):
    """Sub → main: it lacks the token at `position`, and heard of a later one; 0: it knows nothing of the request."""

    position: Position


@dataclass(frozen=True, slots=True)
class End(Message):
    """Main → subs: the request is over."""


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Client → main: nobody waits for the rest of the request."""


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """Main → client, after the last token: why it ended, seconds, and layer passes; see `results.LatencyBreakdown`."""

    reason: str
    num_tokens: Count
    """Tokens behind the prompt."""
    latency_s: Finite
    time_to_first_token_s: Finite
    stall_s: Finite
    layer_passes: Count
    recomputed_layer_passes: Count
    layers_s: Finite
    heads_s: Finite
    hops_s: Finite
    waiting_s: Finite
    python_s: Finite
    first_layers_s: Finite
    first_heads_s: Finite
    first_hops_s: Finite
    first_waiting_s: Finite
    first_python_s: Finite


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Sub → client, at the end of a request: its layer passes for candidates and for its own cache."""

    layer_passes: Count
    coherence_layer_passes: Count


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Any worker → client: it cannot go on, and why."""

    error: str


@dataclass(frozen=True, slots=True)
class Shutdown(Message):
    """Client → every worker: end the process."""


@dataclass(frozen=True, slots=True)
class Spans(Message):
    """Main or sub → client, before `Finished` or `Report`: what it did and when, a piece of it; see `span_messages`."""

    pid: Count
    wall_offset_ns: Int64
    dropped: Count
    numbers: Int64s


@dataclass(frozen=True, slots=True)
class Peers(Message):
    """Client → every worker: from now on the peers at these addresses are where `locations` says."""

    addresses: Ranks
    locations: list[str]


@dataclass(frozen=True, slots=True)
class LinkNote(Message):
    """Worker → worker: something about the link between them; see `transport.collective`."""

    link: str
    key: str
    value: Bytes


@dataclass(frozen=True, slots=True)
class TensorAnnouncement(Message):
    """Worker → worker: a message whose tensor comes over their link, as its transfer of this `number`."""

    link: str
    number: Count
    num_bytes: TensorBytes
    header: Bytes
    """Of the message, as `split` gives it."""


_KINDS: tuple[type[Message], ...] = (
    Begin,
    ExitState,
    Candidate,
    HeadStart,
    Token,
    Entries,
    End,
    Cancel,
    Finished,
    Report,
    Failed,
    Shutdown,
    Spans,
    CatchUp,
    Missing,
    Peers,
    LinkNote,
    TensorAnnouncement,
    Tokens,
)
KIND_NAMES = tuple(kind.__name__ for kind in _KINDS)
"""In the order of their numbers on the wire."""


class _Thread(threading.local):
    """What a thread needs to write messages: to make a packer for each takes longer than to pack."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_THREAD = _Thread()
_PLANS = {kind: make_plan(number, kind) for number, kind in enumerate(_KINDS)}
_RELATIONS: dict[type[Message], Callable[[Any], bool]] = {
    Begin: lambda begin: len(begin.delivered) <= begin.max_new_tokens,
    CatchUp: lambda missed: missed.entries is None or _num_rows(missed.entries) <= len(missed.token_ids),
    Peers: lambda peers: len(peers.addresses) == len(peers.locations),
    Tokens: lambda tokens: len(tokens.token_ids) == len(tokens.winners),
}
"""What has to hold between the fields of one message."""


def encode(message: Message) -> list[Frame]:
    """The message's frames: the header, then its tensor's bytes, in its own memory where they lie there in one piece.

    Raises:
        WireError: where the header would be longer, or the tensor another, than `decode` takes.
    """
    plan = _PLANS[type(message)]
    values = plan.values(message)
    tensor = values[plan.tensor - 2] if plan.tensor else None
    if tensor is None:
        return [_header(plan, values, None)]
    form = outgoing(tensor.dtype, tensor.shape)
    frame = form.bytes_of(tensor)
    if frame is None:
        tensor = tensor.detach().cpu().contiguous()
        frame = form.bytes_of(tensor)
        assert frame is not None
    return [_header(plan, values, form.description), frame]


def has_tensor(message: Message) -> bool:
    """Whether a message holds a tensor."""
    plan = _PLANS[type(message)]
    return bool(plan.tensor) and plan.values(message)[plan.tensor - 2] is not None


def split(message: Message) -> tuple[bytes, Tensor | None]:
    """The message's header, and its tensor's bytes `[num_bytes]` on the tensor's device, perhaps in its memory.

    Raises:
        WireError: where the header would be longer, or the tensor another, than `decode` takes.
    """
    plan = _PLANS[type(message)]
    values = plan.values(message)
    tensor = values[plan.tensor - 2] if plan.tensor else None
    if tensor is None:
        return _header(plan, values, None), None
    description = outgoing(tensor.dtype, tensor.shape).description
    return _header(plan, values, description), tensor.detach().contiguous().flatten().view(torch.uint8)


def _header(plan: FieldPlan, values: Sequence[Any], description: bytes | None) -> bytes:
    """`description` is of the message's tensor: dtype and shape."""
    fields = [WIRE_VERSION, plan.number, *values]
    for place in plan.packed:
        fields[place] = pack_numbers(fields[place])
    if plan.tensor:
        fields[plan.tensor] = description
    header = _THREAD.packer.pack(fields)
    if len(header) > _MAX_HEADER_BYTES:
        raise WireError(f"a {KIND_NAMES[plan.number]} of {len(header)} bytes: {_MAX_HEADER_BYTES} are the most")
    return header


def decode(frames: Sequence[bytes | memoryview | Tensor]) -> Message:
    """The message that `frames` hold; its tensor is a copy, but of a `Tensor` of bytes, which becomes the message's.

    Raises:
        WireError: for anything that `encode` of this version would not have written.
    """
    if not frames or isinstance(frames[0], Tensor) or len(frames[0]) > _MAX_HEADER_BYTES:
        raise WireError("no header, or one that is too long")
    header = _unpack(frames[0])
    kind = _kind(header)
    plan = _PLANS[kind]
    if len(header) != 2 + plan.num_fields:
        raise WireError(f"a {kind.__name__} with the wrong number of fields")
    plan.read(header)
    if plan.tensor and header[plan.tensor] is not None:
        if len(frames) != 2:
            raise WireError(f"a {kind.__name__} needs one frame for its tensor")
        header[plan.tensor] = arriving(header[plan.tensor]).tensor_of(frames[1])
    elif len(frames) != 1:
        raise WireError(f"a {kind.__name__} with more frames than it has tensors")
    message = kind(*header[2:])
    if kind in _RELATIONS and not _RELATIONS[kind](message):
        raise WireError(f"a {kind.__name__} whose fields contradict each other")
    return message


def _num_rows(entries: Tensor) -> int:
    return len(entries) if entries.dim() else 1


def _kind(header: list[Any]) -> type[Message]:
    if type(header) is not list or len(header) < 2 or type(header[0]) is not int or header[0] != WIRE_VERSION:
        raise WireError(f"not a message of wire version {WIRE_VERSION}")
    number = header[1]
    if type(number) is not int or not 0 <= number < len(_KINDS):
        raise WireError("unknown kind of message")
    return _KINDS[number]


def _unpack(header: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(header, max_array_len=MOST_TEXTS, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a header: {type(error).__name__}") from error
