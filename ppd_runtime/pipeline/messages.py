"""What the processes say to each other, and its form on the wire: a bounded msgpack header and raw tensor frames.

A header is `[version, kind, *fields]`; a tensor field holds `[dtype, shape]` there and its bytes follow in a frame
of their own. Decoding trusts nothing: every length, type and shape is checked before anything is allocated, and
whatever is wrong becomes a `WireError`.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgpack
import torch
from torch import Tensor

WIRE_VERSION = 5
MAIN = 0
"""The main process' address; sub-processes are 1 to W, by the rank of their likeliest candidate."""
CLIENT = -1
"""The address of whoever holds the runtime."""
MISS = 0
"""`Token.winner` where no candidate was right in time."""
NOT_ASKED = -1
"""`Token.winner` of the last token, whose successor nobody needs."""

_MAX_HEADER_BYTES = 16 * 2**20
_MAX_TENSOR_BYTES = 2**31
_MAX_TEXT = 2**16
_MAX_TENSOR_RANK = 6
_MAX_CANDIDATES = 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WireError(ValueError):
    """Bytes that are no message of this version."""


@dataclass(frozen=True, slots=True)
class Message:
    """Anything on the wire: who sent it, and the number of the request it belongs to."""

    sender: int
    request: int


@dataclass(frozen=True, slots=True)
class Begin(Message):
    """Client → main → subs: start a request, or go on with it.

    The client says so again after a silence, and then names the tokens that it has got: one that knows the request
    repeats what follows them, one that does not starts with them.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int
    stop: list[str]
    ignore_eos: bool
    live: bool
    """Whether the client wants each token at once; else they may come in batches, which wakes it less often."""
    traced: bool = False
    """Whether the client wants every process' `Spans`."""
    delivered: list[int] = field(default_factory=list)
    """Tokens behind the prompt that the client has already got."""


@dataclass(frozen=True, slots=True)
class ExitState(Message):
    """Main → subs: the hidden state behind the exit layer, `[1, 1, hidden_size]`, of the token at `position`."""

    position: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Candidate(Message):
    """Sub → main: the tokens that this sub-process is starting at `position`, likeliest first."""

    position: int
    token_ids: tuple[int, ...]
    path: list[int] = field(default_factory=list)
    """Tokens right before them that were candidates themselves; those further back were certain."""


@dataclass(frozen=True, slots=True)
class HeadStart(Message):
    """Sub → main: its candidates' hidden states behind the head-start layers, `[1, candidates, hidden_size]`."""

    position: int
    token_ids: tuple[int, ...]
    hidden: Tensor
    path: list[int] = field(default_factory=list)
    """As a `Candidate`'s."""
    sent_at: float = 0.0
    """By the clock of the host, `time.perf_counter`; for statistics only."""


@dataclass(frozen=True, slots=True)
class Token(Message):
    """Main → subs and client: the token at `position` is certain, and whose early start is used (or MISS).

    To the subs, `hidden` is what an `ExitState` of this token would hold, where the early start reached that far.
    """

    position: int
    token_id: int
    winner: int
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Entries(Message):
    """Winner → main and the other subs: its key/value entries of the token at `position` and those after it.

    `[tokens, layers, 2, heads, head_dim]`.
    """

    position: int
    entries: Tensor
    sent_at: float = 0.0
    """As a `HeadStart`'s."""


@dataclass(frozen=True, slots=True)
class CatchUp(Message):
    """Main → subs, after a rest, and to one that lacks tokens: those at `position` and behind it.

    With the entries of the first of them, `[tokens with entries, layers, 2, heads, head_dim]`, of the head-start
    layers; the others' have to be computed.
    """

    position: int
    token_ids: list[int]
    entries: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Missing(Message):
    """Sub → main: it lacks the token at `position`, and heard of a later one; 0: it knows nothing of the request."""

    position: int


@dataclass(frozen=True, slots=True)
class End(Message):
    """Main → subs: the request is over."""


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Client → main: nobody waits for the rest of the request."""


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """Main → client, after the last token: why it ended, seconds, and layer passes; see `results.Ledger`."""

    reason: str
    num_tokens: int
    """Tokens behind the prompt."""
    latency_s: float
    time_to_first_token_s: float
    stall_s: float
    layer_passes: int
    recomputed_layer_passes: int
    layers_s: float
    heads_s: float
    hops_s: float
    waiting_s: float
    python_s: float
    first_layers_s: float
    first_heads_s: float
    first_hops_s: float
    first_waiting_s: float
    first_python_s: float


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Sub → client, at the end of a request: its layer passes for candidates and for its own cache."""

    layer_passes: int
    coherence_layer_passes: int


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

    pid: int
    wall_offset_ns: int
    dropped: int
    numbers: list[int]


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
)
KIND_NAMES = tuple(kind.__name__ for kind in _KINDS)
"""In the order of their numbers on the wire."""
_OPTIONAL_TENSOR = Tensor | None
_CANDIDATES = tuple[int, ...]
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in _KINDS}
_TYPES: dict[type[Message], tuple[Any, ...]] = {
    kind: tuple(get_type_hints(kind)[name] for name in _FIELDS[kind]) for kind in _KINDS
}


def encode(message: Message) -> list[bytes | memoryview]:
    """The message's frames: the header, then each tensor's bytes."""
    header: list[object] = [WIRE_VERSION, _NUMBERS[type(message)]]
    frames: list[bytes | memoryview] = [b""]
    for name in _FIELDS[type(message)]:
        value = getattr(message, name)
        if isinstance(value, Tensor):
            tensor = value.detach().cpu().contiguous()
            header.append([_DTYPE_NAMES[tensor.dtype], list(tensor.shape)])
            frames.append(tensor.flatten().view(torch.uint8).numpy().data)
        else:
            header.append(value)
    frames[0] = msgpack.packb(header)
    return frames


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message that `frames` hold; its tensors are copies.

    Raises:
        WireError: for anything that `encode` of this version would not have written.
    """
    if not frames or len(frames[0]) > _MAX_HEADER_BYTES:
        raise WireError("no header, or one that is too long")
    header = _unpack(frames[0])
    if not isinstance(header, list) or len(header) < 2 or type(header[0]) is not int or header[0] != WIRE_VERSION:
        raise WireError(f"not a message of wire version {WIRE_VERSION}")
    number = header[1]
    if type(number) is not int or not 0 <= number < len(_KINDS):
        raise WireError("unknown kind of message")
    kind = _KINDS[number]
    types = _TYPES[kind]
    fields = header[2:]
    if len(fields) != len(types):
        raise WireError(f"a {kind.__name__} with the wrong number of fields")
    held = [t is Tensor or (t == _OPTIONAL_TENSOR and v is not None) for v, t in zip(fields, types, strict=True)]
    if len(frames) != 1 + sum(held):
        raise WireError(f"a {kind.__name__} with the wrong number of frames")
    tensors = iter(frames[1:])
    values: list[Any] = [
        _tensor(value, next(tensors)) if is_tensor else _checked(value, wanted)
        for value, wanted, is_tensor in zip(fields, types, held, strict=True)
    ]
    return kind(*values)


def _unpack(header: bytes | memoryview) -> object:
    try:
        return msgpack.unpackb(header, strict_map_key=True, max_ext_len=0, max_map_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a header: {type(error).__name__}") from error


def _checked(value: object, wanted: object) -> object:
    if wanted is float:
        good = type(value) in (int, float)
    elif wanted == _OPTIONAL_TENSOR:
        good = value is None
    elif wanted is str:
        good = type(value) is str and len(value) <= _MAX_TEXT
    elif wanted == _CANDIDATES and type(value) is list and len(value) <= _MAX_CANDIDATES:
        good, value = all(type(item) is int for item in value), tuple(value)
    elif wanted == list[int]:
        good = type(value) is list and all(type(item) is int for item in value)
    elif wanted == list[str]:
        good = type(value) is list and all(type(item) is str and len(item) <= _MAX_TEXT for item in value)
    else:
        good = type(value) is wanted
    if not good:
        raise WireError("a field of the wrong type or length")
    return value


def _tensor(description: object, frame: bytes | memoryview) -> Tensor:
    if not isinstance(description, list) or len(description) != 2:
        raise WireError("a tensor without dtype and shape")
    name, shape = description
    if not isinstance(name, str) or name not in _DTYPES:
        raise WireError("a tensor of an unknown dtype")
    if not isinstance(shape, list) or len(shape) > _MAX_TENSOR_RANK:
        raise WireError("a tensor with too many dimensions")
    if not all(type(size) is int and 0 < size <= _MAX_TENSOR_BYTES for size in shape):
        raise WireError("a tensor with an impossible shape")
    dtype = _DTYPES[name]
    size = math.prod(shape) * dtype.itemsize
    if size > _MAX_TENSOR_BYTES or size != len(frame):
        raise WireError("a tensor whose bytes do not fit its shape")
    return torch.frombuffer(bytearray(frame), dtype=dtype).view(shape)
