"""Shared memory beside a stream of `unix`, from its writer to its reader: a large tensor passes no socket.

The writer copies a tensor into the ring and sends its place with the message's header. The reader copies it out and
gives the place back. The memory has no name and passes as a descriptor with the stream's first bytes, so it is gone
once both ends are, however they end. A new stream has a new ring.

Positions only grow. So a position is a tensor's place, modulo the capacity, and its sequence number.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
from collections import deque

import torch
from torch import Tensor

from ppd_runtime.pipeline.fields import WireError

logger = logging.getLogger(__name__)
CAPACITY = 16 * 2**20
"""Bytes for tensors that the reader has not taken yet; larger tensors go with their messages."""
_MOST_CAPACITY = 2**31
_FRONT = mmap.PAGESIZE  # two numbers that the reader writes
_RELEASED, _ATTACHED = 0, 1
_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable


def can_share() -> bool:
    """Whether this system has memory without a name that nobody can shrink, which is Linux."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class RingWriter:
    """The end that fills a ring; raises OSError if the system grants no such memory."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.descriptor = os.memfd_create("ppd-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """For the reader; -1 once `passed`."""
        try:
            os.ftruncate(self.descriptor, _FRONT + capacity)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals())
            self._memory = _Memory(self.descriptor, _FRONT + capacity)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._end = self._oldest = self._next_end = 0

    def passed(self) -> None:
        """The reader has been sent the descriptor."""
        os.close(self.descriptor)
        self.descriptor = -1

    def put(self, raw: Tensor) -> int | None:
        """Copy bytes `[num_bytes]` into the ring; returns their position, or None if there is no room or no reader.

        The next `put` writes over them unless `keep` is called.
        """
        released, capacity = self._memory.numbers[_RELEASED], self._memory.capacity
        if not self._memory.numbers[_ATTACHED] or not 0 < len(raw) <= capacity:
            return None
        if not 0 <= released <= self._end:
            raise WireError(f"the reader has released {released} bytes of {self._end}")
        begin = self._end
        is_empty = released == self._end
        if is_empty or begin % capacity + len(raw) > capacity:
            begin = _next_lap(begin, capacity)  # an empty ring begins again where its memory is in the CPU's cache
        oldest = begin if is_empty else max(self._oldest, released)
        if begin + len(raw) - oldest > capacity:
            return None
        if raw.is_cuda:
            self._memory.pin()
        self._memory.bytes_at(begin, len(raw)).copy_(raw)
        self._oldest, self._next_end = oldest, begin + _aligned(len(raw))
        return begin

    def keep(self) -> None:
        """What was put last is on its way to the reader."""
        self._end = self._next_end

    def close(self) -> None:
        """Release the memory; the reader still has what was put into it."""
        if self.descriptor >= 0:
            self.passed()
        self._memory.close()


class RingReader:
    """The end that empties a ring, onto `device`.

    Args:
        descriptor: of the memory; it is closed.
        device: where tensors are copied.

    Raises:
        WireError: if the descriptor is not that of a ring, whose memory cannot shrink.
    """

    def __init__(self, descriptor: int, device: str) -> None:
        try:
            num_bytes = os.fstat(descriptor).st_size
            capacity = num_bytes - _FRONT
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or not 0 < capacity <= _MOST_CAPACITY or capacity % _ALIGNMENT:
                raise WireError(f"{num_bytes} bytes of shared memory that are no ring")
            self._memory = _Memory(descriptor, num_bytes)
        except OSError as error:
            raise WireError(f"shared memory that is no ring: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._device, self._on_gpu = device, device.startswith("cuda")
        self._end = 0
        self._under_way: deque[tuple[torch.cuda.Event, int]] = (
            deque()
        )  # copies to the GPU, and the ends of their places
        self._memory.numbers[_ATTACHED] = 1

    def take(self, position: int, num_bytes: int) -> Tensor:
        """The bytes `[num_bytes]` at a position, copied to the device; a GPU's current stream may use them.

        Raises:
            WireError: if the next tensor of the ring cannot be there.
        """
        capacity = self._memory.capacity
        follows = position in (self._end, _next_lap(self._end, capacity))
        if not follows or not 0 < num_bytes <= capacity - position % capacity:
            raise WireError(f"{num_bytes} bytes at {position} of a ring of {capacity}, which was read to {self._end}")
        self._end = position + _aligned(num_bytes)
        there = self._memory.bytes_at(position, num_bytes)
        if not self._on_gpu:
            raw = there.clone()
            self._memory.numbers[_RELEASED] = self._end
            return raw
        self._memory.pin()
        raw = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        raw.copy_(there, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        self._under_way.append((copied, self._end))
        self.release()
        return raw

    def release(self) -> None:
        """Give back the places whose copies to the GPU have arrived."""
        while self._under_way and self._under_way[0][0].query():
            self._memory.numbers[_RELEASED] = self._under_way.popleft()[1]

    def close(self) -> None:
        """Release the memory, after copies that are under way."""
        for copied, _ in self._under_way:
            copied.synchronize()
        self._under_way.clear()
        self._memory.close()


class _Memory:
    """The memory of a ring in one process: a page with the reader's numbers, then the tensors' bytes."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        mapped = mmap.mmap(descriptor, num_bytes)
        self.numbers = (ctypes.c_uint64 * 2).from_buffer(mapped)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8, offset=_FRONT)
        self.capacity = len(self._bytes)
        self._is_pinned: bool | None = None  # None: not tried

    def bytes_at(self, position: int, num_bytes: int) -> Tensor:
        """The bytes at a position, `[num_bytes]`, in the ring itself."""
        place = position % self.capacity
        return self._bytes[place : place + num_bytes]

    def pin(self) -> None:
        """Page-lock the memory, once, so that a GPU reads and writes it itself; if CUDA refuses, copies take longer."""
        if self._is_pinned is None:
            library, address = torch.cuda.cudart(), self._bytes.data_ptr()
            self._is_pinned = not int(library.cudaHostRegister(address, self.capacity, _PORTABLE))
            if not self._is_pinned:
                logger.warning("CUDA does not page-lock %d bytes of shared memory: copies take longer", self.capacity)
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")  # the next kernel reports the refusal again, which is then forgotten

    def close(self) -> None:
        """Release it; what still refers to it keeps it mapped."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._is_pinned = False


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _next_lap(position: int, capacity: int) -> int:
    """The next position at the beginning of the memory; the position itself if it is there."""
    return -(-position // capacity) * capacity
