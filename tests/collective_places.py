"""Endpoints with links between them, and messages for them."""

import time
from pathlib import Path

import torch

from ppd_runtime.pipeline.wire import encode
from ppd_runtime.transport.collective_endpoint import CollectiveEndpoint
from ppd_runtime.transport.network import Network

DEADLINE = 30.0


class Places:
    """Endpoints of one folder, introduced to each other as a launcher does it."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._network, self._device = Network("collective", str(folder)), device
        self.endpoints: dict[int, CollectiveEndpoint] = {}

    def open(self, address: int) -> CollectiveEndpoint:
        """A new incarnation, which everybody is told of, and which is told of everybody."""
        new = CollectiveEndpoint(self._network, address, self._device)
        for other, endpoint in self.endpoints.items():
            if other != address:
                endpoint.introduce(address, new.location)
                new.introduce(other, endpoint.location)
        self.endpoints[address] = new
        return new

    def wait_for_links(self) -> None:
        """Until every two workers have one; what reaches a worker meanwhile was for its last incarnation."""
        deadline = time.monotonic() + DEADLINE
        while not all(link.takes for endpoint in self.endpoints.values() for link in endpoint._links.values()):
            assert time.monotonic() < deadline
            for endpoint in self.endpoints.values():
                endpoint.receive(0)
            time.sleep(0.001)


def same(a: object, b: object) -> bool:
    return [bytes(frame) for frame in encode(a)] == [bytes(frame) for frame in encode(b)]


def tensors(number: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Any bits, NaNs and infinities among them, in sizes that come and go: hidden states, entries, a long text's."""
    generator = torch.Generator().manual_seed(number)
    sizes = [(1, 1, 64), (1, 3, 64), (1, 1, 64), (1, 1, 64), (2, 4, 2, 8, 64), (1, 1, 64), (9, 40, 2, 8, 64)]
    raw = [torch.randint(0, 256, (*size[:-1], size[-1] * dtype.itemsize), generator=generator) for size in sizes]
    return [tensor.to(torch.uint8).view(dtype) for tensor in raw]
