"""Messages on the wire: a bounded msgpack header and raw tensor frames.

A header is `[version, kind, *fields]`; a tensor field holds dtype and shape there and its bytes follow in a frame
of their own. Decoding trusts nothing: every length, type, range and shape is checked before anything is allocated, and
whatever is wrong becomes a `WireError`.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import msgpack
except ModuleNotFoundError as error:
    line = f"ppd_runtime needs msgpack for its messages, which is not installed ({error}): pip install msgpack"
    raise ModuleNotFoundError(line, name="msgpack") from error

from ppd_runtime.pipeline.fields import MOST_TEXTS, FieldPlan, WireError, make_plan
from ppd_runtime.pipeline.messages import (
    Begin,
    Cancel,
    Candidate,
    CatchUp,
    End,
    Entries,
    ExitState,
    Failed,
    Finished,
    Foreseen,
    Guesses,
    HeadStart,
    LinkNote,
    Message,
    Missing,
    Peers,
    PromptStates,
    Refused,
    Report,
    Rows,
    Shutdown,
    Spans,
    TensorAnnouncement,
    Token,
    Tokens,
    Unreadable,
)
from ppd_runtime.pipeline.tensors import Frame, arriving, on_the_host, outgoing
from ppd_runtime.sampling_params import BY_CHANCE

logger = logging.getLogger(__name__)
WIRE_VERSION = 18
_MAX_HEADER_BYTES = 16 * 2**20

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
    PromptStates,
    Rows,
    Guesses,
    Foreseen,
    Refused,
)
KIND_NAMES = tuple(kind.__name__ for kind in _KINDS)
"""In the order of their numbers on the wire."""


class _Thread(threading.local):
    """A thread's packer: making one for each message takes longer than packing the message."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_THREAD = _Thread()
_SENDER_AND_REQUEST = make_plan(-1, Message)
_PLANS = {kind: make_plan(number, kind) for number, kind in enumerate(_KINDS)}
_RELATIONS: dict[type[Message], Callable[[Any], bool]] = {
    Begin: lambda begin: len(begin.delivered) <= begin.params.max_new_tokens and begin.params.seed != BY_CHANCE,
    CatchUp: lambda missed: missed.entries is None or _num_rows(missed.entries) <= len(missed.token_ids),
    Peers: lambda peers: len(peers.addresses) == len(peers.locations),
    Tokens: lambda tokens: len(tokens.token_ids) == len(tokens.winners),
    Rows: lambda rows: len({len(rows.nodes), len(rows.parents), len(rows.positions), len(rows.token_ids)}) == 1,
    Guesses: lambda guesses: (
        len(guesses.token_ids) == len(guesses.chances)
        and len(guesses.token_ids) % max(len(guesses.nodes), 1) == 0
        and (bool(guesses.nodes) or not guesses.token_ids)
    ),
}
"""What has to hold between the fields of one message."""


def encode(message: Message) -> list[Frame]:
    """The message's frames: the header, then its tensor's bytes, not copied if contiguous on the CPU.

    Raises:
        WireError: if `decode` would refuse the header's length or the tensor's form.
    """
    plan = _PLANS[type(message)]
    values = plan.values(message)
    tensor = values[plan.tensor - 2] if plan.tensor else None
    if tensor is None:
        return [_header(plan, values, None)]
    form = outgoing(tensor.dtype, tensor.shape)
    frame = form.bytes_of(tensor)
    if frame is None:
        tensor = on_the_host(tensor.detach())
        frame = form.bytes_of(tensor)
        assert frame is not None
    return [_header(plan, values, form.description), frame]


def has_tensor(message: Message) -> bool:
    """Whether a message holds a tensor."""
    plan = _PLANS[type(message)]
    return bool(plan.tensor) and plan.values(message)[plan.tensor - 2] is not None


def split(message: Message) -> tuple[bytes, Tensor | None]:
    """The message's header, and its tensor's bytes `[num_bytes]` on the tensor's device, perhaps sharing its memory.

    Raises:
        WireError: if `decode` would refuse the header's length or the tensor's form.
    """
    plan = _PLANS[type(message)]
    values = plan.values(message)
    tensor = values[plan.tensor - 2] if plan.tensor else None
    if tensor is None:
        return _header(plan, values, None), None
    description = outgoing(tensor.dtype, tensor.shape).description
    return _header(plan, values, description), tensor.detach().contiguous().flatten().view(torch.uint8)


def _header(plan: FieldPlan, values: Sequence[Any], description: bytes | None) -> bytes:
    """`description`: dtype and shape of the message's tensor."""
    fields = [WIRE_VERSION, plan.number, *values]
    for place, write in plan.writers:
        fields[place] = write(fields[place])
    if plan.tensor:
        fields[plan.tensor] = description
    header = _THREAD.packer.pack(fields)
    if len(header) > _MAX_HEADER_BYTES:
        raise WireError(f"a {KIND_NAMES[plan.number]} of {len(header)} bytes: {_MAX_HEADER_BYTES} are the most")
    return header


def decode(frames: Sequence[bytes | memoryview | Tensor]) -> Message:
    """The message that `frames` hold; its tensor is a copy, or a view if the frame is a `Tensor` of bytes.

    Raises:
        WireError: for anything that `encode` of this version would not have written.
    """
    header = _header_of(frames)
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


def received(frames: Sequence[bytes | memoryview | Tensor]) -> Message | None:
    """The message that `frames` hold. Anything else is logged; it becomes an `Unreadable`, or None if it does not say
    whose it is.
    """
    try:
        return decode(frames)
    except WireError as error:
        logger.warning("dropped what arrived: %s", error)
        return _unreadable(frames, str(error))


def _unreadable(frames: Sequence[bytes | memoryview | Tensor], reason: str) -> Unreadable | None:
    """What can be read of another version's message: the first members of a header are the same in all versions."""
    try:
        header = _header_of(frames)
        version, number, sender, request = header[:4]
        _SENDER_AND_REQUEST.read([version, number, sender, request])
    except (WireError, ValueError, TypeError):
        return None
    known = version == WIRE_VERSION and type(number) is int and 0 <= number < len(_KINDS)
    return Unreadable(sender, request, KIND_NAMES[number] if known else "", reason)


def _num_rows(entries: Tensor) -> int:
    return len(entries) if entries.dim() else 1


def _kind(header: list[Any]) -> type[Message]:
    if type(header) is not list or len(header) < 2 or type(header[0]) is not int or header[0] != WIRE_VERSION:
        raise WireError(f"not a message of wire version {WIRE_VERSION}")
    number = header[1]
    if type(number) is not int or not 0 <= number < len(_KINDS):
        raise WireError("unknown kind of message")
    return _KINDS[number]


def _header_of(frames: Sequence[bytes | memoryview | Tensor]) -> Any:
    if not frames or isinstance(frames[0], Tensor) or len(frames[0]) > _MAX_HEADER_BYTES:
        raise WireError("no header, or one that is too long")
    try:
        return msgpack.unpackb(frames[0], max_array_len=MOST_TEXTS, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a header: {type(error).__name__}") from error
