"""`PPDRuntime`: what users hold. Pipelined decoding with one main process and its sub-processes."""

import logging
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppd_runtime.client.ending import Ending
from ppd_runtime.client.exchange import MessageExchange
from ppd_runtime.client.request import RequestClient, RequestReports
from ppd_runtime.client.shutdown import ShutdownGuard
from ppd_runtime.cost_model.staged import expected_first_boundary
from ppd_runtime.cost_model.theory import latency_ratio
from ppd_runtime.launch.base import RequestCounts, Workers
from ppd_runtime.launch.cache_room import cache_room, requests_for
from ppd_runtime.launch.choice import choose_launcher
from ppd_runtime.launch.cpu_affinity import CoreShare
from ppd_runtime.launch.found_layout import with_found_layout
from ppd_runtime.launch.gpus import crowding
from ppd_runtime.launch.guessing_times import GuessingTimes
from ppd_runtime.launch.startup import check_ray, prepare, start_workers, transport_here
from ppd_runtime.launch.supervisor import CLOSED, Progress
from ppd_runtime.launch.worker_specs import find_heads, with_layers_of, worker_specs
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.request_queue import RequestQueue
from ppd_runtime.methods.steps import Step, Steps, Totals
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer
from ppd_runtime.models.checkpoint.generation import generation_defaults
from ppd_runtime.models.stage.emulation import EmulatedDevice, emulation_note
from ppd_runtime.pipeline.messages import MISS, NOT_ASKED, Begin
from ppd_runtime.request_error import RequestError
from ppd_runtime.results import Live
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import check_threads
from ppd_runtime.settings.config import UNSET, RuntimeConfig, runtime_config
from ppd_runtime.settings.fields import takes_settings
from ppd_runtime.settings.layouts import CLIENT, DECIDER, Layout, StagedLayout
from ppd_runtime.settings.placement import TRANSPORTS
from ppd_runtime.tracing.trace import Trace
from ppd_runtime.transport.network import check_interface
from ppd_runtime.transport.sockets import check_collective
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)


@takes_settings(RuntimeConfig)
class PPDRuntime(TextGenerator):
    """Exact pipelined decoding: the tokens are ordinary decoding's, whatever k, exit layer, transport or timing.

    Making one checks the settings, and measures for `layout="auto"` once; its workers start with `start`, on entering a
    `with` block, or with the first call. It serves many calls: with `stages` `max_requests` at a time, else one; calls
    from other threads wait their turn. Leaving the `with` block, or `close`, stops its workers for good.

    Args:
        settings: those of `RuntimeConfig` by name; its fields say what they are.
        config: the same as one object, in place of them.
        emulate: a slower device whose times every worker keeps, to measure protocol and scheduling with more workers
            than there are devices; figures from it are an emulation's.
        progress: takes a line on what the start-up waits for; None logs it.

    Raises:
        ValueError: for settings that cannot work, before any process starts.
    """

    def __init__(
        self,
        model: str | Path = UNSET,
        *,
        config: RuntimeConfig | None = None,
        emulate: EmulatedDevice | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        self.config = runtime_config(config, settings if model is UNSET else {"model": model, **settings})
        self.layout_found = ""
        """With `layout="auto"`: a line on what it came to and why."""
        if self.config.layout is not None:
            if emulate is not None:
                raise ValueError(f"emulate with layout={self.config.layout!r}, which times this machine: drop one")
            self.config, self.layout_found = with_found_layout(self.config, progress or logger.info)
            logger.info("%s", self.layout_found)
        self.launcher = choose_launcher(self.config)
        """What starts the workers, "threads", "processes" or "ray"; what "auto" came to."""
        _check_host(self.config)
        if self.launcher == "ray":
            check_ray(self.config)
        info = describe(self.config.model, self.config.weights)
        heads = find_heads(self.config, info, self.launcher)
        self.config = with_layers_of(heads, self.config, info.num_layers)
        self.exit_layer = self.config.check_against(info.num_layers, info.vocab_size)
        if isinstance(heads, dict) and self.config.stages is None:
            for head in heads.values():
                head.check_layers([self.exit_layer])
        self._specs = worker_specs(self.config, self.launcher, info, self.exit_layer, heads, emulate)
        defaults = generation_defaults(info, self.config.generation_config)
        super().__init__(info, load_tokenizer(info), defaults, self._room())
        self._share = self._place_workers()
        cores, room = self._share.cores, self.queue.most_tokens
        self._specs = [replace(spec, cores=cores[spec.rank], cache_tokens=room) for spec in self._specs]
        self._traced, self._conditions = self.config.trace, emulation_note(emulate)
        self._progress = progress or logger.info
        self._workers: Workers | None = None
        self._times: GuessingTimes | None = None
        self._guard: ShutdownGuard | None = None
        self._starting, self._closed = threading.RLock(), False
        self._exchange: MessageExchange | None = None
        self._next_request, self._under_way = 1, set[int]()
        self._counting = threading.Lock()

    def _room(self) -> RequestQueue:
        """The request queue: room by settings, else by the memory at hand."""
        if not isinstance(self.layout, StagedLayout):
            return RequestQueue(1, None)
        config, most = self.config, self.config.max_cache_tokens
        if most is None:
            most = cache_room(self._specs, are_here=config.one_host or self.launcher != "ray")
        return RequestQueue(config.max_requests or requests_for(most), most)

    def _place_workers(self) -> CoreShare:
        """The workers' cores of this host; raises ValueError for a transport that their devices cannot have."""
        config = self.config
        if self.launcher == "processes":
            transport_here(config.transport, self._specs)
        if TRANSPORTS[config.transport].device_tensors and config.one_host:
            check_collective(self._specs[DECIDER].device)
        processes, here = self.layout.num_processes, config.one_host or self.launcher == "processes"
        pinned = here and self.launcher != "threads" and self.device == "cpu"  # CUDA and NCCL have threads of their own
        return CoreShare(processes, config.threads_per_worker, pinned)

    def __repr__(self) -> str:
        shape = self.layout.title(self.info.num_layers)
        layout = f"k={self.layout.k}, {shape}, transport {self.config.transport}"
        state = "closed" if self._closed else "running" if self._workers else "not started"
        return f"PPDRuntime({self.info.name!r}, {layout}, {self.device}, {self.dtype}, {state})"

    def start(self) -> None:
        """Start the workers and wait until they have loaded their layers; a second call does nothing.

        Raises:
            ValueError: if the model cannot be compiled, not on this machine, or does not fit on the workers' GPUs.
            RuntimeError: when a worker fails to start, with the worker's own message, or the runtime is closed.
        """
        with self._starting:
            if self._workers is None and not self._closed:
                on_cpus = self.device == "cpu"
                if told := self._share.crowding() if on_cpus else crowding([spec.device for spec in self._specs]):
                    logger.warning(told)
                self._specs = prepare(self._specs, self.config, self.launcher, self._progress)
                if self.config.one_host or self.launcher != "ray":
                    self.config = replace(self.config, compile=any(spec.code for spec in self._specs))
                self._times = GuessingTimes(self._specs)
                known = self._times.known()
                self._specs = [replace(spec, way_seconds=known) for spec in self._specs]
                self._workers = start_workers(self._specs, self.config, self.launcher, self._progress)
                self._share.begin()
                self._exchange = MessageExchange(self._workers)
                self._guard = ShutdownGuard(self._workers)
                weakref.finalize(self, self._guard.close)
            if self._closed:
                self.close()
                raise RuntimeError(CLOSED)

    @property
    def dtype(self) -> str:
        """The dtype of weights and passes, such as float32; what "auto" came to."""
        return str(self._specs[DECIDER].dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The kind of device that the workers run on, cpu or cuda; what "auto" came to."""
        return self._specs[DECIDER].device.partition(":")[0]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The staged layout's borders, each the number of layers before it; empty in the paper's layout.

        If they were not given, they are even until the workers start.
        """
        return self.layout.cuts

    @property
    def process_names(self) -> tuple[str, ...]:
        """Names of the workers, by rank: the main process or the last stage first."""
        return tuple(self.layout.name(spec.rank) for spec in self._specs)

    @property
    def layout(self) -> Layout:
        """How the processes share the layers. Cuts, rows and k of stages are chosen when the workers start."""
        return self._specs[DECIDER].layout

    @property
    def shape(self) -> dict[str, Any]:
        """Implements `TextGenerator.shape`: cuts, rows and k of stages, k and the exit layer of the paper's layout."""
        return {"method": "ppd", **self.layout.shape()}

    @property
    def restarts(self) -> int:
        """Restarts of workers that were lost, up to now."""
        return sum(_restarts(self._workers, self._specs).values()) if self._workers else 0

    @property
    def main_cores(self) -> tuple[int, ...]:
        """CPU cores that the main process stays on; empty if there are fewer cores than workers."""
        return self._specs[DECIDER].cores

    def unwell(self) -> list[str]:
        """Names of needed processes that do not serve; replaces lost workers."""
        if self._guard is not None and self._exchange is not None and not self._closed:
            try:
                with self._guard:
                    return self._exchange.unwell()
            except RuntimeError as error:
                logger.error("%s", error)
                self.close()
        return ["the runtime"]

    def close(self) -> None:
        """Stop every process, socket and Ray node that the runtime started; a second call does nothing.

        A call that is under way, in another thread or below a signal handler, ends with a RuntimeError.
        """
        self._closed = True
        with self._starting:
            if self._guard is not None:
                self._guard.close()
            if self._times is not None:
                self._times.write()
            self._share.release()

    def __enter__(self) -> "PPDRuntime":
        self.start()
        return self

    def _check_params(self, params: SamplingParams, prompt_size: int) -> None:
        super()._check_params(params, prompt_size)
        if params.logits_processors and not self.config.in_threads:
            raise ValueError(
                "logits_processors are functions, which are not sent to other processes: choose transport='local', or "
                "a method that decodes in this process (OrdinaryDecoding, layerskip, adaspeed, kangaroo, swift)"
            )

    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: int, ending: Ending) -> Steps:
        self.start()
        workers, guard, exchange = self._workers, self._guard, self._exchange
        assert workers is not None
        assert guard is not None
        assert exchange is not None
        watched, foreseen = live == Live.PASSES, live >= Live.BOUNDARIES
        begin = Begin(CLIENT, 0, prompt_ids, params, bool(live), self._traced, watched=watched, foreseen=foreseen)
        begin = self._numbered(begin)
        ending.start_clock()
        outside, new_tokens, guessable = 0, 0, frozenset(self._specs[self.layout.guesser].guess_tokens)
        call, name_of = RequestClient(exchange, begin, ending), workers.supervisor.name_of
        try:
            while True:
                with guard:
                    token = next(call, None)
                if token is None:
                    break
                last = token.winner == NOT_ASKED
                new_tokens += 1
                outside += bool(guessable) and token.token_id not in guessable
                known = not last and self.layout.tells_hits  # stages: the first tells later who was right
                hit = token.winner != MISS if known else None
                yield Step(token.token_id, hit, last, token.noted(prompt_ids), call.reports.news(name_of))
            with guard:
                call.hear_all()
                workers.record(_counts(call, workers, self._specs))
            totals = _totals(call, self._trace(call.reports, workers))
            if self._times is not None:
                self._times.learn(totals.path.way_seconds, len(prompt_ids) + new_tokens / 2)
            news = call.reports.news(name_of)
            yield replace(totals, layout=self.layout, outside_guess_vocab=outside, news=news)
        except RequestError:  # and nothing else: the workers are well
            raise
        except RuntimeError:
            self.close()
            raise
        finally:
            if call.reports.finished is None and not self._closed:
                self._cancel(call, guard)
            call.close()
            with self._counting:
                self._under_way.remove(begin.request)

    def _numbered(self, begin: Begin) -> Begin:
        """The request with its own number and the numbers under way."""
        with self._counting:
            request, self._next_request = self._next_request, self._next_request + 1
            begin = replace(begin, request=request, under_way=tuple(sorted(self._under_way)))
            self._under_way.add(request)
        return begin

    def _cancel(self, call: RequestClient, guard: ShutdownGuard) -> None:
        try:
            with guard:
                call.cancel()
        except RuntimeError:
            self.close()
            raise

    def _trace(self, reports: RequestReports, workers: Workers) -> Trace | None:
        if not self._traced:
            return None
        processes = reports.processes(workers.supervisor.name_of)
        return Trace(self.info.num_layers, self.layout, self._conditions, processes)

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        if isinstance(self.layout, StagedLayout) and not self.layout.cuts:
            return 1 - totals.path.foreseen / max(num_new_tokens, 1)
        if told := sum(totals.first_boundary):
            return expected_first_boundary([n / told for n in totals.first_boundary]) / len(totals.first_boundary)
        return latency_ratio(self.info.num_layers, self.exit_layer, match_rate or 0.0, max(num_new_tokens, 1))


def _check_host(config: RuntimeConfig) -> None:
    """Raise ValueError for settings that this host, or the network around it, cannot meet."""
    check_threads("threads_per_worker", config.threads_per_worker)
    if config.bind_interface is not None:
        check_interface(config.bind_interface)


def _counts(call: RequestClient, workers: Workers, specs: list[WorkerSpec]) -> RequestCounts:
    finished = call.reports.finished
    assert finished is not None
    passes = {report.sender: report.layer_passes + report.coherence_layer_passes for report in call.reports.in_order()}
    return RequestCounts(
        tokens=finished.num_tokens,
        hits={rank: hits for rank, hits in call.winners.items() if rank > MISS},
        misses=call.winners[MISS],
        stall_s=finished.path.stall_s,
        latency_s=finished.path.latency_s,
        layer_passes={DECIDER: finished.path.main_layer_passes, **passes},
        restarts=_restarts(workers, specs),
        serving=workers.supervisor.serving(),
    )


def _restarts(workers: Workers, specs: list[WorkerSpec]) -> dict[int, int]:
    return {spec.rank: max(0, workers.supervisor.starts(spec.rank) - 1) for spec in specs}


def _totals(call: RequestClient, trace: Trace | None) -> Totals:
    finished, reports = call.reports.finished, call.reports.in_order()
    assert finished is not None
    return Totals(
        finish_reason=finished.reason,
        path=finished.path,
        sub_layer_passes=tuple(r.layer_passes for r in reports),
        sub_coherence_layer_passes=tuple(r.coherence_layer_passes for r in reports),
        trace=trace,
        first_boundary=next((r.first_boundary for r in reports if r.first_boundary), ()),
    )
