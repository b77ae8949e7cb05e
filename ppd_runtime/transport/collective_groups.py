"""Process groups of exactly two: NCCL for tensors on GPUs, Gloo on CPUs.

A group is the link of one pair, so a process that dies breaks its own links only. What the two members exchange to set
it up travels with the control messages, encrypted if these are: there is no key-value server that a stranger could
reach. What the groups then carry is neither encrypted nor authenticated.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_Store: Any = getattr(dist, "Store", object)  # a PyTorch without collectives is refused by `check_backend`
_MEET_S = 60.0  # a peer in the middle of a long prompt answers after it
_CONNECT_S = 20.0
_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_LIVE_AND_LET_DIE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # by default a dead peer ends this process too
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{_CONNECT_S:.0f}",  # by default a peer that dies in the start holds a thread
    "NCCL_NVLS_ENABLE": "0",  # for large groups; only takes memory here
}


def check_backend(device: str) -> None:
    """Raise ValueError if this PyTorch has no collectives for a device's tensors."""
    backend = "nccl" if _is_gpu(device) else "gloo"
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise ValueError(
            f"transport='collective' with device={device!r}: this PyTorch was built without {backend}; "
            "choose transport zeromq"
        )


class PairStore(_Store):
    """A store in which a group's two members exchange keys before they are connected.

    Args:
        tell: sends the peer a key and its value; called in the thread that connects.
    """

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell, self._words = tell, dict[str, bytes]()
        self._changed, self._closed = threading.Condition(), False

    def hear(self, key: str, value: bytes) -> None:
        """Take what the peer has told."""
        with self._changed:
            self._words[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Tell the peer, and remember."""
        self.hear(key, value)
        self._tell(key, value)

    def get(self, key: str) -> bytes:
        """What either has told; raises TimeoutError if that takes too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or key in self._words, _MEET_S) or self._closed:
                raise TimeoutError(f"the peer has said nothing for {_MEET_S:.0f} s")
            return self._words[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all these have been told."""
        return all(key in self._words for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all these have been told; raises TimeoutError if that takes too long."""
        for key in keys:
            self.get(key)

    def clone(self) -> "PairStore":
        """Itself: it may be used from any thread."""
        return self


class CollectiveBackend:
    """What a process' groups have in common: its device, and the interface that they bind at (empty: loopback)."""

    def __init__(self, device: str, interface: str) -> None:
        self.device = torch.device(device)
        self.posts_ahead = not _is_gpu(device)
        """Whether a receive may wait for long. On a GPU it would be a spinning kernel, and whatever waits for the whole
        device (a graph's capture, a kernel that is loaded when first used) would wait for it."""
        self.most_under_way, self.most_bytes_under_way = (8, 2**20) if _is_gpu(device) else (32, 2**26)
        """Most transfers, and bytes, that the peer has not taken yet. On GPUs NCCL's own buffers hold these: with more
        a sending kernel spins."""
        if _is_gpu(device):
            os.environ.update(_LIVE_AND_LET_DIE)
            if name := interface_name(interface or _LOOPBACK):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
        else:
            gloo: Any = dist.ProcessGroupGloo
            self._gloo_options: Any = gloo._Options()
            self._gloo_options._devices = [gloo.create_device(hostname=interface or _LOOPBACK)]
            self._gloo_options._threads = 1  # they serve collectives; sends and receives need none
            self._gloo_options._timeout = timedelta(seconds=_CONNECT_S)

    def connect(self, store: dist.Store, rank: int) -> "Channel":
        """A channel of the members 0 and 1, once both have come; raises RuntimeError or TimeoutError."""
        return Channel(self, [self.new_group(dist.PrefixStore(name, store), rank) for name in ("up", "down")], rank)

    def close(self) -> None:
        """Give Gloo's port and thread back, once all channels are closed."""
        self._gloo_options = None

    def new_group(self, store: dist.Store, rank: int, size: int = 2) -> Any:
        """A group of `size` members, of NCCL or Gloo by device; on GPUs it connects with its first use."""
        if not _is_gpu(self.device.type):
            return dist.ProcessGroupGloo(store, rank, size, self._gloo_options)
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # not after layers' kernels
        options._timeout = timedelta(seconds=_MEET_S)
        options.global_ranks_in_group = list(range(size))
        options.config.blocking = 0  # a start that ends by itself, see `_LIVE_AND_LET_DIE`
        options.config.max_ctas = 2  # of the device's many; messages are small
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def new_stream(self) -> Any:
        """On GPUs, a stream for a link's receives: they wait neither for computation nor for other links."""
        return torch.cuda.Stream(self.device) if _is_gpu(self.device.type) else None


class Channel:
    """A group for each direction between two processes: on GPUs the transfers of one group go one after the other.

    Transfers of one direction arrive in the order in which they were sent, if each is received with its size.
    """

    def __init__(self, backend: CollectiveBackend, groups: list[Any], rank: int) -> None:
        self._backend, self._peer, self._aside = backend, 1 - rank, backend.new_stream()
        self._out, self._in = groups if rank == 0 else reversed(groups)
        self._greet(groups)

    def send(self, raw: Tensor) -> Any:
        """Begin to send bytes `[n]`; keep the result, and `raw` unchanged, until they have arrived.

        Raises:
            RuntimeError: if the connection is broken.
        """
        return self._out.send([raw], self._peer, 0)

    def receive(self, num_bytes: int) -> "Transfer":
        """Begin to receive `num_bytes`; raises RuntimeError if the connection is broken."""
        with torch.cuda.stream(self._aside) if self._aside else contextlib.nullcontext():
            raw = torch.empty(num_bytes, dtype=torch.uint8, device=self._backend.device)
            return Transfer(self._in.recv([raw], self._peer, 0), raw)

    def close(self) -> None:
        """Break the connection; what is under way is lost."""
        for group in (self._out, self._in):
            with contextlib.suppress(RuntimeError):
                group.abort()
        self._out = self._in = None

    def _greet(self, groups: list[Any]) -> None:
        """Send a byte in each direction: on GPUs the groups connect only now, and an unreachable process is noticed."""
        for group in groups:
            if group is self._out:
                sent = self.send(torch.ones(1, dtype=torch.uint8, device=self._backend.device))
            else:
                got = self.receive(1)
        deadline = time.monotonic() + _CONNECT_S
        while not got.is_here(deadline - time.monotonic()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the peer's greeting did not come within {_CONNECT_S:.0f} s")
            time.sleep(0.001)
        sent.wait()


class Transfer:
    """Bytes that are being received."""

    def __init__(self, work: Any, raw: Tensor) -> None:
        self._work, self.raw = work, raw
        self._arrival: Any = None
        if raw.is_cuda:
            work.wait()  # the stream does, not this thread
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def is_here(self, seconds: float) -> bool:
        """Whether all has arrived, and may be used on the current stream.

        On CPUs this waits for at most `seconds`, on GPUs it does not wait.

        Raises:
            RuntimeError: if it did not come in time, or the connection is broken.
        """
        if self._arrival is None:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
            return True
        if not self._arrival.query():
            return False
        self.raw.record_stream(torch.cuda.current_stream(self.raw.device))
        return True


def interface_name(address: str) -> str:
    """The name of the interface that has an IPv4 address, such as eth0; empty if none is found."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(address)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted:
                    return name
    return ""


def _is_gpu(device: str) -> bool:
    return device.startswith("cuda")
