"""`PPDRuntime`: what users hold. Pipelined decoding with one main process and its sub-processes."""

import logging
import threading
import weakref
from collections.abc import Generator
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import torch

from ppd_runtime.client.ending import Ending
from ppd_runtime.client.request import RequestClient, RequestReports
from ppd_runtime.client.shutdown import ShutdownGuard
from ppd_runtime.config import RuntimeConfig, SamplingParams, dtype_name, model_name
from ppd_runtime.cost_model.theory import latency_ratio
from ppd_runtime.launch.base import RequestCounts, Workers
from ppd_runtime.launch.choice import choose_launcher
from ppd_runtime.launch.cpu_affinity import CoreShare, available_cores
from ppd_runtime.launch.startup import check_ray, start_workers, transport_here
from ppd_runtime.launch.supervisor import CLOSED, Progress
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.steps import Step, Totals
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype
from ppd_runtime.models.stage.emulation import EmulatedDevice, emulation_note
from ppd_runtime.models.trained.exit_heads import SHARED, OracleHead
from ppd_runtime.models.trained.heads import HeadInfo, describe_head
from ppd_runtime.pipeline.messages import (
    MAIN,
    MISS,
    NOT_ASKED,
    Finished,
)
from ppd_runtime.pipeline.requests import begin_request
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tracing.trace import Trace
from ppd_runtime.transport.network import check_interface
from ppd_runtime.transport.sockets import check_collective
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)


class PPDRuntime(TextGenerator):
    """Exact pipelined decoding: the tokens are ordinary decoding's, whatever k, exit layer, transport or timing.

    Making one checks the settings; its workers start with `start`, on entering a `with` block, or with the first
    call. It serves many calls, one at a time; calls from other threads wait their turn. Leaving the `with` block, or
    `close`, stops its workers for good.

    Args:
        model: a local folder, a hub name (`name@revision` pins a commit), or "demo" for the embedded model.
        k: early candidates for each token.
        exit_layer: the layer after which the next token is predicted early; None is the layer of a trained exit head,
            or half depth, rounded up.
        workers: sub-processes, 1 to k; None is k. Fewer than k run their share of the candidates as one pass, on fewer
            devices. Such passes give the numbers of ordinary decoding but not its bits (a product with several rows
            sums in another order), and the main process goes on from them. In float32 tokens equal ordinary decoding's
            all the same; in bfloat16 a near tie may fall the other way (demo model: 0.1 % of tokens greedily, 0.6 % at
            temperature 1, by `benchmarks.siblings`).
        exit_head: "shared" (the model's own norm and head), the folder of a trained head (`ppd train exit-head`), or
            a `OracleHead` for tests and benchmarks.
        dtype: float32, bfloat16, float16 (or PyTorch's own, such as torch.bfloat16), or auto (what `choose_dtype`
            finds fastest; the same for `OrdinaryDecoding`).
        device: cpu, cuda or auto.
        transport: "unix" or "zeromq" (processes, with these sockets between them), "collective" (hidden states and
            key/value entries from device to device, NCCL on GPUs and Gloo on CPUs, the rest over ZeroMQ), "local"
            (threads of this process) or "auto": collective where each worker has a GPU of its own, else zeromq with
            a `bind_interface` and unix without.
        launcher: what starts the processes: "processes" for plain ones of this host, which need no Ray, "ray", or
            "auto": Ray where there is one to join or several hosts are asked for, else processes; `choose_launcher` has
            the rule. A Ray that the program has started is joined and never shut down; it may call `ray.init` later
            where the runtime has processes, and with `ignore_reinit_error=True` where it has a Ray node of its own.
        ray_address: host:port of a running Ray cluster, "auto" for one that runs on this host, "local" for a node of
            our own, which all runtimes of a program share. None is what RAY_ADDRESS says, and a node of our own
            without.
        bind_interface: an IP address of this host; the processes then reach each other over TCP, every connection
            encrypted and both its ends authenticated (CURVE, keys made for each run). None: sockets in a folder that
            only this user may enter, for processes of one host.
        threads_per_worker: CPU threads for one worker's matrix products.
        compile: run one-token passes in compiled code; the first time takes a while, then it is kept on disk. The
            tokens are those of `OrdinaryDecoding` with `compile=True`.
        run_ahead: where one sub-process is all (k=1) and the exit is at half depth, it starts the next token before it
            hears what became of the last, which saves a hit its hops. Costs it some work in vain.
        max_restarts: new lives for a worker that is lost, in a row. A lost sub-process costs time only; a new main
            process goes on behind the tokens already delivered. 0: a lost main process is an error at once.
        placement: where Ray puts the workers, a placement group with a bundle for each: "auto" (one host where they
            fit), "pack", "spread", "strict-pack" or "strict-spread". Sockets in a folder reach one host only.
        placement_timeout_s: seconds to wait for room in a Ray cluster, as one with an autoscaler makes; 0: a cluster
            that is too small is an error at once.
        gpus_per_worker: GPUs of a Ray cluster for each worker, 0.5: two share one. None: one each; on a Ray node of our
            own they share what there is.
        emulate: a slower device that every worker keeps to the times of, to measure protocol and scheduling with more
            workers than there are devices; figures from it are an emulation's.
        trace: record what every process does and when; results have a `trace` then.
        progress: is told in a line what the start-up waits for; None logs it.

    Raises:
        ValueError: for settings that cannot work, before any process starts.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        k: int = 3,
        exit_layer: int | None = None,
        workers: int | None = None,
        exit_head: str | Path | OracleHead = SHARED,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        transport: str = "auto",
        launcher: str = "auto",
        ray_address: str | None = None,
        bind_interface: str | None = None,
        threads_per_worker: int = 1,
        compile: bool = False,
        run_ahead: bool = True,
        max_restarts: int = 3,
        placement: str = "auto",
        placement_timeout_s: float = 0.0,
        gpus_per_worker: float | None = None,
        emulate: EmulatedDevice | None = None,
        trace: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.config = RuntimeConfig(
            model=model_name(model),
            k=k,
            exit_layer=exit_layer,
            workers=workers,
            dtype=dtype_name(dtype),
            device=device,
            transport=transport,
            ray_address=ray_address,
            bind_interface=bind_interface,
            threads_per_worker=threads_per_worker,
            compile=compile,
            run_ahead=run_ahead,
            max_restarts=max_restarts,
            launcher=launcher,
            placement=placement,
            placement_timeout_s=placement_timeout_s,
            gpus_per_worker=gpus_per_worker,
        )
        self.launcher = choose_launcher(self.config)
        """What starts the workers, "threads", "processes" or "ray"; what "auto" came to."""
        _check_host(self.config)
        if self.launcher == "ray":
            check_ray(self.config)
        info = describe(self.config.model)
        head = _find_head(exit_head, info)
        if isinstance(head, HeadInfo) and exit_layer is None:
            self.config = replace(self.config, exit_layer=head.exit_layer)
        self.exit_layer = self.config.check_against(info.num_layers, info.vocab_size)
        if isinstance(head, HeadInfo):
            head.check_layers([self.exit_layer])
        super().__init__(info, load_tokenizer(info))
        self._specs = _worker_specs(self.config, self.launcher, info, self.exit_layer, head, emulate)
        if self.launcher == "processes":
            transport_here(transport, self._specs)
        if transport == "collective" and self.config.one_host:
            check_collective(self._specs[MAIN].device)
        processes, here = 1 + self.config.num_subs, self.config.one_host or self.launcher == "processes"
        self._share = CoreShare(processes, threads_per_worker, pinned=here and self.launcher != "threads")
        self._specs = [replace(spec, cores=self._share.cores[spec.rank]) for spec in self._specs]
        self._traced, self._conditions = trace, emulation_note(emulate)
        self._progress = progress or logger.info
        self._workers: Workers | None = None
        self._closing: ShutdownGuard | None = None
        self._starting, self._closed = threading.RLock(), False
        self._next_request = 1

    def __repr__(self) -> str:
        config, layers = self.config, self.info.num_layers
        subs = f"{config.num_subs} sub-process{'es' if config.num_subs > 1 else ''}"
        layout = f"k={config.k}, exit after layer {self.exit_layer} of {layers}, {subs}, transport {config.transport}"
        state = "closed" if self._closed else "running" if self._workers else "not started"
        return f"PPDRuntime({self.info.name!r}, {layout}, {self.device}, {self.dtype}, {state})"

    def start(self) -> None:
        """Start the workers and wait until they have loaded their layers; a second call does nothing.

        Raises:
            ValueError: where the model cannot be compiled, or not on this machine.
            RuntimeError: when a worker fails to start, with the worker's own message, or the runtime is closed.
        """
        with self._starting:
            if self._workers is None and not self._closed:
                if self.device == "cpu" and (crowding := self._share.crowding()):
                    logger.warning(crowding)
                self._workers = start_workers(self._specs, self.config, self.launcher, self._progress)
                self._share.begin()
                self._closing = ShutdownGuard(self._workers)
                weakref.finalize(self, self._closing.close)
            if self._closed:
                self.close()
                raise RuntimeError(CLOSED)

    @property
    def dtype(self) -> str:
        """The dtype of weights and passes, such as float32; what "auto" came to."""
        return str(self._specs[MAIN].dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The kind of device that the workers run on, cpu or cuda; what "auto" came to."""
        return self._specs[MAIN].device.partition(":")[0]

    @property
    def restarts(self) -> int:
        """New lives of workers that were lost, up to now."""
        return sum(_restarts(self._workers, self._specs).values()) if self._workers else 0

    @property
    def main_cores(self) -> tuple[int, ...]:
        """CPU cores that the main process stays on; empty where there are fewer cores than workers."""
        return self._specs[MAIN].cores

    def close(self) -> None:
        """Stop every process, socket and Ray node that the runtime started; a second call does nothing.

        A call that is under way, in another thread or below a signal handler, ends with a RuntimeError.
        """
        self._closed = True
        with self._starting:
            if self._closing is not None:
                self._closing.close()
            self._share.release()

    def __enter__(self) -> "PPDRuntime":
        self.start()
        return self

    def _check_params(self, params: SamplingParams, prompt_size: int) -> None:
        super()._check_params(params, prompt_size)
        if params.logits_processors and self.config.transport != "local":
            raise ValueError(
                "logits_processors are functions, which are not sent to other processes: choose transport='local', or "
                "a method that decodes in this process (OrdinaryDecoding, layerskip, adaspeed, kangaroo, swift)"
            )

    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: bool) -> Generator[Step | Totals, None, None]:
        self.start()
        workers, closing, ending = self._workers, cast("ShutdownGuard", self._closing), cast("Ending", self._ending)
        assert workers is not None
        request, self._next_request = self._next_request, self._next_request + 1
        ending.start_clock()
        call = RequestClient(
            workers, replace(begin_request(request, prompt_ids, params, live), traced=self._traced), ending
        )
        try:
            for message in closing.each(call.tokens()):
                last = message.winner == NOT_ASKED
                yield Step(message.token_id, None if last else message.winner != MISS, last)
            with closing.step():
                call.hear_all()
                workers.record(_counts(call, workers, self._specs))
            yield _totals(call, self._trace(call.reports))
        except RuntimeError:
            self.close()
            raise
        finally:
            if call.reports.finished is None and not self._closed:
                self._cancel(call, closing)

    def _cancel(self, call: RequestClient, closing: ShutdownGuard) -> None:
        try:
            with closing.step():
                call.cancel()
        except RuntimeError:
            self.close()
            raise

    def _trace(self, reports: RequestReports) -> Trace | None:
        if not self._traced:
            return None
        return Trace(self.info.num_layers, self.exit_layer, self._conditions, reports.processes())

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        return latency_ratio(self.info.num_layers, self.exit_layer, match_rate or 0.0, max(num_new_tokens, 1))


def _check_host(config: RuntimeConfig) -> None:
    """Raise ValueError for settings that this host, or the network around it, cannot meet."""
    if config.threads_per_worker > available_cores():
        refused = f"threads_per_worker={config.threads_per_worker}"
        raise ValueError(f"{refused}: there are {available_cores()} CPU cores here, choose at most so many")
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
        stall_s=finished.stall_s,
        latency_s=finished.latency_s,
        layer_passes={MAIN: finished.layer_passes, **passes},
        restarts=_restarts(workers, specs),
        serving=workers.supervisor.serving(),
    )


def _restarts(workers: Workers, specs: list[WorkerSpec]) -> dict[int, int]:
    return {spec.rank: max(0, workers.supervisor.lives(spec.rank) - 1) for spec in specs}


def _totals(call: RequestClient, trace: Trace | None) -> Totals:
    finished, reports = call.reports.finished, call.reports.in_order()
    assert finished is not None
    return Totals(
        finish_reason=finished.reason,
        latency_s=finished.latency_s,
        time_to_first_token_s=finished.time_to_first_token_s,
        stall_s=finished.stall_s,
        ledger=_ledger(finished, ""),
        first_token_ledger=_ledger(finished, "first_"),
        main_layer_passes=finished.layer_passes,
        main_recomputed_layer_passes=finished.recomputed_layer_passes,
        sub_layer_passes=tuple(r.layer_passes for r in reports),
        sub_coherence_layer_passes=tuple(r.coherence_layer_passes for r in reports),
        trace=trace,
    )


def _ledger(finished: Finished, prefix: str) -> LatencyBreakdown:
    return LatencyBreakdown(
        **{field.name: getattr(finished, prefix + field.name) for field in fields(LatencyBreakdown)}
    )


def _find_head(exit_head: str | Path | OracleHead, info: ModelInfo) -> str | HeadInfo | OracleHead:
    if isinstance(exit_head, OracleHead) or exit_head == SHARED:
        return exit_head
    if not isinstance(exit_head, str | Path):
        raise ValueError(f"exit_head={exit_head!r}: give 'shared' or a folder that `ppd train exit-head` wrote")
    return describe_head(exit_head, info)


def _worker_specs(
    config: RuntimeConfig,
    launcher: str,
    info: ModelInfo,
    exit_layer: int,
    exit_head: str | HeadInfo | OracleHead,
    emulate: EmulatedDevice | None,
) -> list[WorkerSpec]:
    by_ray = launcher == "ray"
    elsewhere = by_ray and not config.one_host  # what this host has says nothing of the workers'
    device = config.device if elsewhere and config.device == "cuda" else choose_device(config.device)
    dtype = choose_dtype(config.dtype, device, info, config.threads_per_worker, compiled=config.compile)
    processes = 1 + config.num_subs
    devices = [device] * processes
    if device == "cuda" and not by_ray:  # Ray shows each actor a GPU of its own, the others see them all
        devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(processes)]
    return [
        WorkerSpec(
            rank=rank,
            k=config.k,
            num_subs=config.num_subs,
            info=info,
            exit_layer=exit_layer,
            dtype=dtype,
            device=devices[rank],
            threads=config.threads_per_worker,
            exit_head=exit_head,
            emulate=emulate,
            run_ahead=config.run_ahead,
        )
        for rank in range(processes)
    ]
