"""What every way of launching workers has in common."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from ppd_runtime.launch.supervisor import Supervisor
from ppd_runtime.pipeline.messages import Peers, Shutdown
from ppd_runtime.settings.layouts import CLIENT
from ppd_runtime.transport import Endpoint


@dataclass(frozen=True)
class RequestCounts:
    """A request's counts, for metrics of a cluster; workers' counts are by rank."""

    tokens: int
    hits: Mapping[int, int]
    """By the sub-process whose early start was used."""
    misses: int
    stall_s: float
    latency_s: float
    layer_passes: Mapping[int, int]
    restarts: Mapping[int, int]
    """Restarts of each worker since the runtime started."""
    serving: Collection[int]
    """Workers that serve."""


class Workers(Protocol):
    """The running workers of one runtime."""

    endpoint: Endpoint
    """The client's place in their network."""

    supervisor: Supervisor
    """Knows which workers run, and replaces those that have ended."""

    def record(self, counts: RequestCounts) -> None:
        """Count a request that has ended in the cluster's metrics."""

    def close(self) -> None:
        """Stop all workers and release everything that was started for them."""


class Introductions:
    """Tells each process that takes part where the others are, and the others where it is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._locations: dict[int, str] = {}

    def introduce(self, rank: int, location: str) -> None:
        """A worker, or its successor, serves at a location from now on."""
        self._endpoint.introduce(rank, location)
        self._locations.pop(rank, None)
        self._endpoint.send(rank, Peers(CLIENT, 0, list(self._locations), list(self._locations.values())))
        for other in sorted(self._locations, reverse=True):  # rank 0, the last, may have all begin again
            self._endpoint.send(other, Peers(CLIENT, 0, [rank], [location]))
        self._locations[rank] = location


def dismiss(supervisor: Supervisor, endpoint: Endpoint) -> None:
    """Tell all serving workers to end, and leave their network."""
    for rank in supervisor.serving():
        endpoint.send(rank, Shutdown(CLIENT, 0))
    endpoint.close()
