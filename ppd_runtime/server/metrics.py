"""What the server counts for Prometheus: vLLM's names, so that its dashboards serve here, and hits by boundary."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ppd_runtime.methods.request_queue import RequestQueue
from ppd_runtime.results import GenerationResult
from ppd_runtime.server.answers import reason_told

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """One server's metrics, with the label `model_name`; `queue` knows which choices run and wait."""

    def __init__(self, model_name: str, queue: RequestQueue) -> None:
        self.registry, self._model_name = CollectorRegistry(), model_name
        for name, about, value in (
            ("num_requests_running", "Choices that are being decoded.", lambda: len(queue.running)),
            ("num_requests_waiting", "Choices that wait for their turn.", lambda: len(queue.waiting)),
            ("kv_cache_usage_perc", "Share of the cache that choices have.", lambda: queue.usage),
        ):
            gauge = Gauge(f"vllm:{name}", about, ["model_name"], registry=self.registry)
            gauge.labels(model_name).set_function(value)
        self._total("vllm:num_preemptions", "Choices that lost their room to others: none, room is reserved before.")
        self._prompt_tokens = self._total("vllm:prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = self._total("vllm:prompt_tokens_cached", "Tokens of prompts that were kept from others.")
        self._asked_for = self._total("vllm:prefix_cache_queries", "Tokens of prompts that were looked for.")
        self._found = self._total("vllm:prefix_cache_hits", "Of them, those that were kept.")
        self._new_tokens = self._total("vllm:generation_tokens", "New tokens.")
        self._finished = self._counter("vllm:request_success", "Choices by why they ended.", "finished_reason")
        self._sizes = {
            "prompt": self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
            "new": self._histogram("vllm:request_generation_tokens", "New tokens of a choice.", _TOKENS),
        }
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Mean time between a choice's tokens.")
        self._each = self._histogram("vllm:time_per_output_token_seconds", "The same, by its older name.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._queued = self._histogram("vllm:request_queue_time_seconds", "From arrival to a choice's turn.")
        self._drafted = self._total("vllm:spec_decode_num_draft_tokens", "Tokens that had candidates.")
        self._accepted = self._total("vllm:spec_decode_num_accepted_tokens", "Of them, those named early.")
        self._boundaries = self._counter("ppd:first_boundary", "Tokens by the boundary that named them.", "boundary")
        self._refused = self._counter("ppd:refused_requests", "Requests that were refused.", "status")

    def note(self, result: GenerationResult, queued_s: float, whole_s: float) -> None:
        """A choice has ended."""
        stats = result.stats
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._cached_tokens.inc(stats.cached_tokens)
        self._asked_for.inc(stats.prompt_tokens)
        self._found.inc(stats.cached_tokens)
        self._new_tokens.inc(stats.new_tokens)
        self._sizes["prompt"].observe(stats.prompt_tokens)
        self._sizes["new"].observe(stats.new_tokens)
        self._finished.labels(self._model_name, reason_told(result)).inc()
        self._first.observe(queued_s + stats.time_to_first_token_s)
        if stats.new_tokens > 1:
            self._between.observe(stats.time_per_token_s)
            self._each.observe(stats.time_per_token_s)
        self._whole.observe(whole_s)
        self._queued.observe(queued_s)
        self._drafted.inc(stats.hits + stats.misses)
        self._accepted.inc(stats.hits)
        names = [*map(str, range(1, len(stats.first_boundary))), "none"]
        for name, tokens in zip(names, stats.first_boundary, strict=bool(stats.first_boundary)):
            self._boundaries.labels(self._model_name, name).inc(tokens)

    def note_refused(self, status: int) -> None:
        """A request got an error."""
        self._refused.labels(self._model_name, str(status)).inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def _total(self, name: str, about: str) -> Counter:
        return Counter(name, about, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, about: str, label: str) -> Counter:
        return Counter(name, about, ["model_name", label], registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, about, ["model_name"], registry=self.registry, buckets=buckets).labels(self._model_name)
