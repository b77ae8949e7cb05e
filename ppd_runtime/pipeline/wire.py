"""Messages on the wire: a bounded msgpack header and raw tensor frames.

A header is `[version, kind, *fields]`. For a tensor it holds dtype and shape; the tensor's bytes follow in another
frame. Decoding trusts nothing: every length, type, range and shape is checked before anything is allocated, and
whatever is wrong becomes a `WireError`.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

try:
    from msgspec import Struct
    from msgspec.msgpack import Decoder, Encoder
except ModuleNotFoundError as error:
    line = f"ppd_runtime needs msgspec for its messages, which is not installed ({error}): pip install msgspec"
    raise ModuleNotFoundError(line, name="msgspec") from error

from ppd_runtime.pipeline.fields import (
    Rank,
    Request,
    WireError,
    in_header,
    is_record,
    record_of,
    values_of,
)
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
from ppd_runtime.pipeline.tensors import Frame, Outgoing, arriving, on_the_host, outgoing
from ppd_runtime.sampling.params import BY_CHANCE

logger = logging.getLogger(__name__)
WIRE_VERSION = 21
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


class _Start(Struct, array_like=True):
    """The first members of a header, the same in all versions."""

    version: int
    kind: int
    sender: Rank
    request: Request


class _Plan(NamedTuple):
    """How to write and read one kind of message; a place is an index into the header."""

    number: int
    names: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    decoder: Decoder[tuple[Any, ...]]
    """Decodes the whole header."""
    records: tuple[tuple[int, type], ...]
    tensor: int
    """The place of the tensor; 0 if the kind has none."""

    def read(self, header: Any) -> list[Any]:
        """The members of a header; raises WireError if one is invalid."""
        try:
            members = list(self.decoder.decode(header))
            for place, record in self.records:
                members[place] = record_of(record, members[place])
        except (ValueError, RecursionError) as error:
            reason = re.sub(r"`\$\[(\d+)\](.*)`", lambda at: self.names[int(at[1]) - 2] + at[2], str(error))
            raise WireError(f"a {KIND_NAMES[self.number]}: {reason}") from error
        return members


def _plan(number: int, kind: type[Message]) -> _Plan:
    hints = get_type_hints(kind, include_extras=True)
    names = tuple(field.name for field in dataclasses.fields(kind))
    places = [(place, hints[name]) for place, name in enumerate(names, 2)]
    tensors = [place for place, hint in places if hint in (Tensor, Tensor | None)]
    assert len(tensors) <= 1, "a message has room for one tensor"
    return _Plan(
        number=number,
        names=names,
        values=attrgetter(*names),
        decoder=Decoder(tuple[(int, int, *(in_header(hint) for _, hint in places))]),  # type: ignore[misc]
        records=tuple((place, hint) for place, hint in places if is_record(hint)),
        tensor=tensors[0] if tensors else 0,
    )


_ENCODER = Encoder()
_START = Decoder(_Start)
_PLANS = {kind: _plan(number, kind) for number, kind in enumerate(_KINDS)}
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
"""The condition between the fields of a message, by kind."""


def encode(message: Message) -> list[Frame]:
    """The message's frames: the header, then the tensor's bytes, without a copy if contiguous on the CPU.

    Raises:
        WireError: if `decode` would refuse the header's length or the tensor's form.
    """
    header, tensor, form = _written(message)
    if tensor is None or form is None:
        return [header]
    frame = form.bytes_of(tensor) or form.bytes_of(on_the_host(tensor.detach()))
    assert frame is not None
    return [header, frame]


def tensor_bytes(message: Message) -> int:
    """The size of a message's tensor in bytes; 0 if it holds none."""
    plan = _PLANS[type(message)]
    tensor = plan.values(message)[plan.tensor - 2] if plan.tensor else None
    return 0 if tensor is None else int(tensor.nbytes)


def split(message: Message) -> tuple[bytes, Tensor | None]:
    """The message's header, and its tensor's bytes `[num_bytes]` on the tensor's device, perhaps sharing its memory.

    Raises:
        WireError: if `decode` would refuse the header's length or the tensor's form.
    """
    header, tensor, _ = _written(message)
    return header, None if tensor is None else tensor.detach().contiguous().flatten().view(torch.uint8)


def _written(message: Message) -> tuple[bytes, Tensor | None, Outgoing | None]:
    """The message's header, its tensor, and the tensor's encoding."""
    plan = _PLANS[type(message)]
    fields, form = [WIRE_VERSION, plan.number, *plan.values(message)], None
    tensor = fields[plan.tensor] if plan.tensor else None
    if tensor is not None:
        form = outgoing(tensor.dtype, tensor.shape)
        fields[plan.tensor] = form.description
    for place, _ in plan.records:
        fields[place] = values_of(fields[place])
    header = _ENCODER.encode(fields)
    if len(header) > _MAX_HEADER_BYTES:
        raise WireError(f"a {KIND_NAMES[plan.number]} of {len(header)} bytes: {_MAX_HEADER_BYTES} are the most")
    return header, tensor, form


def decode(frames: Sequence[bytes | memoryview | Tensor]) -> Message:
    """The message that `frames` hold; its tensor is a copy, or a view if the frame is a `Tensor` of bytes.

    Raises:
        WireError: for anything that `encode` of this version would not have written.
    """
    start = _start(frames)
    if start.version != WIRE_VERSION:
        raise WireError(f"not a message of wire version {WIRE_VERSION}")
    if not 0 <= start.kind < len(_KINDS):
        raise WireError("unknown kind of message")
    kind = _KINDS[start.kind]
    plan = _PLANS[kind]
    header = plan.read(frames[0])
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
    """The message that `frames` hold. If they hold none, that is logged; the result is an `Unreadable`, or None if the
    sender and the request cannot be read.
    """
    try:
        return decode(frames)
    except WireError as error:
        logger.warning("dropped what arrived: %s", error)
        return _unreadable(frames, str(error))


def _unreadable(frames: Sequence[bytes | memoryview | Tensor], reason: str) -> Unreadable | None:
    """The sender and request of an unreadable message; the start of a header is the same in all versions."""
    try:
        start = _start(frames)
    except WireError:
        return None
    known = start.version == WIRE_VERSION and 0 <= start.kind < len(_KINDS)
    return Unreadable(start.sender, start.request, KIND_NAMES[start.kind] if known else "", reason)


def _num_rows(entries: Tensor) -> int:
    return len(entries) if entries.dim() else 1


def _start(frames: Sequence[bytes | memoryview | Tensor]) -> _Start:
    if not frames or isinstance(frames[0], Tensor) or len(frames[0]) > _MAX_HEADER_BYTES:
        raise WireError("no header, or one that is too long")
    try:
        return _START.decode(frames[0])
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a header: {error}") from error
