"""What takes bytes from strangers, as functions of bytes that raise only where a promise is broken.

A target is given any bytes whatever, and says how many messages they held. See `run.py` for how to run them.
"""

import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from ppd_runtime.pipeline.messages import Begin, Message, Token
from ppd_runtime.pipeline.wire import WireError, decode, encode
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.transport.ring import RingWriter
from ppd_runtime.transport.streams import FIRST_BUFFER_BYTES, Inlet

RING = b"".join(struct.pack("<I", number) for number in range(1024))
"""What lies in the ring of the target `ring`: each four bytes are others."""


def frames_of(data: bytes) -> list[bytes]:
    """Two bytes with the header's length, the header, and the tensor's bytes where there are any."""
    end = 2 + int.from_bytes(data[:2], "little")
    return [data[2:end], data[end:]] if data[end:] else [data[2:end]]


def decoding(data: bytes) -> int:
    """Frames are a message, which then survives another journey, or a `WireError`."""
    try:
        message = decode(frames_of(data))
    except WireError:
        return 0
    assert_same(decode([bytes(frame) for frame in encode(message)]), message)
    return 1


def stream(data: bytes) -> int:
    """A stream is read without an error, into bounded memory, to the same messages in whatever pieces it comes.

    The first byte says how long pieces are; there are a hundred at the most.
    """
    content = data[1:]
    size = max(1 + data[0] if data else 1, len(content) // 100)
    in_pieces, alive = read_stream([content[i : i + size] for i in range(0, len(content), size)])
    at_once, alive_too = read_stream([content])
    assert len(in_pieces) == len(at_once), f"{len(in_pieces)} messages in pieces, {len(at_once)} at once"
    assert alive == alive_too
    for message, other in zip(in_pieces, at_once, strict=True):
        assert_same(message, other)
    return len(at_once)


def read_stream(pieces: list[bytes]) -> tuple[list[Message], bool]:
    """The messages of a stream that comes in pieces, and whether it was still open at its end."""
    arrived: deque[Message] = deque()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet, alive, sent = Inlet(ours), True, 0
    with theirs:
        for piece in filter(None, pieces):
            theirs.sendall(piece)
            sent += len(piece)
            alive = inlet.read(arrived)
            assert len(inlet._buffer) <= max(FIRST_BUFFER_BYTES, 2 * sent), "a prefix takes no memory"
            if not alive:
                break
    inlet.close()
    return list(arrived), alive


def ring(data: bytes) -> int:
    """A stream with a ring is read without an error; whatever places it names, each tensor is a piece of the ring."""
    arrived: deque[Message] = deque()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet, writer = Inlet(ours), RingWriter(len(RING))
    writer._memory.bytes_at(0, len(RING)).copy_(torch.frombuffer(bytearray(RING), dtype=torch.uint8))
    with theirs:
        socket.send_fds(theirs, [data or b"\0"], [writer.descriptor])
        inlet.read(arrived)
    inlet.close()
    writer.close()
    for message in arrived if b"ppd1" not in data else []:
        tensor = getattr(message, "hidden", None)
        if isinstance(tensor, Tensor):
            assert tensor.flatten().view(torch.uint8).numpy().tobytes() in RING
    return len(arrived)


def round_trip(data: bytes) -> int:
    """A token or a request whose values come from the bytes survives the journey."""
    values = _Values(data)
    if values.number(2):
        hidden = values.tensor() if values.number(2) else None
        message: Message = Token(
            values.number(8), values.number(2**63), values.number(2**32), values.number(2**31), values.number(8), hidden
        )
    else:
        message = Begin(
            sender=-1,
            request=values.number(2**63),
            prompt_ids=values.token_ids(),
            params=SamplingParams(
                max_new_tokens=2**16 + values.number(2**30),
                temperature=values.number(2**20) / 1000,
                top_k=values.number(2**31),
                top_p=(1 + values.number(1000)) / 1000,
                repetition_penalty=(1 + values.number(5000)) / 1000,
                seed=values.number(2**64),
                stop=tuple(values.text() or "." for _ in range(values.number(4))),
                ignore_eos=bool(values.number(2)),
                min_p=values.number(1001) / 1000,
                presence_penalty=values.number(4001) / 1000 - 2,
                frequency_penalty=values.number(4001) / 1000 - 2,
                stop_token_ids=tuple(values.token_ids()),
                eos_token_ids=tuple(values.token_ids()),
            ),
            live=bool(values.number(2)),
            traced=bool(values.number(2)),
            delivered=values.token_ids(),
            watched=bool(values.number(2)),
            foreseen=bool(values.number(2)),
        )
    assert_same(decode([bytes(frame) for frame in encode(message)]), message)
    return 1


class _Values:
    """Values drawn from bytes, in order; zeros where they have run out."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken.ljust(size, b"\0")

    def number(self, below: int) -> int:
        return int.from_bytes(self.take((below.bit_length() + 7) // 8), "little") % below

    def token_ids(self) -> list[int]:
        return [self.number(2**31) for _ in range(self.number(256))]

    def text(self) -> str:
        return self.take(self.number(32)).decode(errors="ignore")

    def tensor(self) -> Tensor:
        dtype = (torch.float32, torch.bfloat16, torch.float16)[self.number(3)]
        shape = [1 + self.number(3) for _ in range(self.number(7))]
        return torch.frombuffer(bytearray(self.take(math.prod(shape) * dtype.itemsize)), dtype=dtype).view(shape)


def assert_same(message: Message, other: Message) -> None:
    """Equal in kind, types and values, tensors bit for bit."""
    assert type(message) is type(other)
    for name in (field.name for field in fields(message)):
        a, b = getattr(message, name), getattr(other, name)
        assert type(a) is type(b), name
        if isinstance(a, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), name
        else:
            assert a == b, name


TARGETS: dict[str, Callable[[bytes], int]] = {
    "decoding": decoding,
    "stream": stream,
    "ring": ring,
    "round_trip": round_trip,
}
