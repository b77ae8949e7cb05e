"""What a cluster's monitoring is told: Ray exports these with its own metrics, as `ray_ppd_…`, for Prometheus."""

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from ppd_runtime.launch.base import RequestCounts
from ppd_runtime.settings.layouts import DECIDER, Layout

_SECONDS = [0.1, 0.3, 1, 3, 10, 30, 100, 300]
_WORKER = ("worker",)


class RayMetrics:
    """Counts of requests, by worker ("main", "sub-1", "stage-1" and so on); told after a request, never within one."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._tokens = Counter("ppd_tokens", "Tokens generated", _WORKER)
        self._hits = Counter("ppd_hits", "Tokens whose pass a sub-process had started, by that sub-process", _WORKER)
        self._misses = Counter("ppd_misses", "Tokens whose pass the main process had to start", _WORKER)
        self._stall = Counter("ppd_stall_seconds", "Time in which the main process waited for sub-processes", _WORKER)
        self._layer_passes = Counter("ppd_layer_passes", "Passes through a layer", _WORKER)
        self._restarts = Counter("ppd_restarts", "Restarts of a worker that was lost", _WORKER)
        self._serving = Gauge("ppd_serving", "Whether a worker serves, 1 or 0", _WORKER)
        self._latency = Histogram("ppd_request_seconds", "Latency of a request", _SECONDS)
        self._restarted: Mapping[int, int] = {}

    def record(self, counts: RequestCounts) -> None:
        """Take in a request that has ended."""
        self._add(self._tokens, {DECIDER: counts.tokens})
        self._add(self._hits, counts.hits)
        self._add(self._misses, {DECIDER: counts.misses})
        self._add(self._stall, {DECIDER: counts.stall_s})
        self._add(self._layer_passes, counts.layer_passes)
        self._add(self._restarts, {rank: n - self._restarted.get(rank, 0) for rank, n in counts.restarts.items()})
        self._restarted = counts.restarts
        self._latency.observe(counts.latency_s)
        for rank in counts.restarts:
            self._serving.set(int(rank in counts.serving), self._tags(rank))

    def _add(self, counter: Counter, by_rank: Mapping[int, float]) -> None:
        for rank, amount in by_rank.items():
            if amount > 0:  # Ray takes nothing else
                counter.inc(amount, self._tags(rank))

    def _tags(self, rank: int) -> dict[str, str]:
        return {"worker": self._layout.short_name(rank)}
