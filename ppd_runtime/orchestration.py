"""Workers as Ray actors: Ray places, starts and watches them; messages between them travel over sockets of ours."""

import contextlib
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ppd_runtime.launching import START_DEADLINE_S, Progress, socket_folder
from ppd_runtime.pipeline.messages import CLIENT, MAIN, Shutdown
from ppd_runtime.start_worker import Actor
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.sockets import open_endpoint
from ppd_runtime.worker import WorkerSpec
from ppd_runtime.worker_process import start_order

logger = logging.getLogger(__name__)
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing of ours goes through it
_STOP_DEADLINE_S = 5.0


@ray.remote(max_restarts=0)
class PPDMain(Actor):
    """The main process; the class' name is what `ps` shows."""


@ray.remote(max_restarts=0)
class PPDSub(Actor):
    """A sub-process; the class' name is what `ps` shows."""


class RayWorkers:
    """Every worker a Ray actor on this host, on a Ray node of our own or on a running cluster's."""

    def __init__(
        self, specs: Sequence[WorkerSpec], transport: str, ray_address: str | None, progress: Progress
    ) -> None:
        self._specs, self._transport = list(specs), transport
        self._actors: dict[int, Any] = {}
        self._serving: dict[int, Any] = {}
        self._folder = socket_folder()
        self._closed = False
        self._owns_ray = not ray.is_initialized()
        try:
            if self._owns_ray:
                progress("starting Ray" if ray_address is None else f"connecting to Ray at {ray_address}")
                _start_ray(ray_address, len(specs), self._folder)
            self.endpoint: Endpoint = open_endpoint(transport, self._folder, CLIENT)
            self._start_actors(progress)
        except BaseException:
            self.close()
            raise

    def _start_actors(self, progress: Progress) -> None:
        cpus, gpus = _shares(self._specs)
        if not cpus:
            logger.warning("the Ray node has fewer free CPUs than workers: they share what there is")
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        for spec in self._specs:
            actor_class: Any = PPDMain if spec.rank == MAIN else PPDSub
            order = start_order(spec, self._transport, self._folder)
            options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": here}
            self._actors[spec.rank] = actor_class.options(**options).remote(order)
        self._wait_until_ready(progress)
        self._serving = {rank: actor.serve.remote() for rank, actor in self._actors.items()}

    def _wait_until_ready(self, progress: Progress) -> None:
        waiting = {self._actors[spec.rank].ready.remote(): spec for spec in self._specs}
        deadline = time.monotonic() + START_DEADLINE_S
        while waiting:
            names = ", ".join(spec.name for spec in waiting.values())
            progress(f"waiting for {names}")
            done, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise TimeoutError(f"{names} did not start within {START_DEADLINE_S:.0f} s")
            spec = waiting.pop(done[0])
            try:
                ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise RuntimeError(f"{spec.name} failed to start: {_own_words(error)}") from error

    def check(self) -> None:
        """Raise RuntimeError if the main process is gone; log a lost sub-process, which costs time only."""
        done, _ = ray.wait(list(self._serving.values()), num_returns=len(self._serving), timeout=0)
        for rank, reference in list(self._serving.items()):
            if reference not in done:
                continue
            try:
                ray.get(reference)
                reason = "it ended"
            except ray.exceptions.RayError as error:
                reason = _own_words(error)
            if rank == MAIN:
                raise RuntimeError(f"the main process failed: {reason}")
            logger.warning("sub-process %d is lost, decoding goes on without it: %s", rank, reason)
            del self._serving[rank]

    def close(self) -> None:
        """Stop the actors, the Ray node if it is ours, and remove the folder of sockets."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "endpoint"):
            for rank in self._serving:
                self.endpoint.send(rank, Shutdown(CLIENT, 0))
            self.endpoint.close()
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.wait(list(self._serving.values()), num_returns=len(self._serving), timeout=_STOP_DEADLINE_S)
            for actor in self._actors.values():
                ray.kill(actor)
            if self._owns_ray:
                ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _silence_notices() -> None:
    """Ray prints its notices of lost workers to stdout, among the user's text; `check` says the same in a line."""
    with contextlib.suppress(AttributeError):
        ray._private.worker.stdout_deduplicator.skip_re = re.compile("")


def _start_ray(address: str | None, num_workers: int, folder: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _silence_notices()
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        ray.init(address=address, **common)
        return
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_workers),  # every worker gets a place, however few the cores
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _system_config={"worker_niceness": 0},  # Ray's own choice, 15, starves a worker beside any other program
        _temp_dir=f"{folder}/ray",
        **common,
    )


def _shares(specs: Sequence[WorkerSpec]) -> tuple[int, float]:
    """CPUs and GPUs to ask for each worker; less than it would like where it would otherwise never get a place."""
    free = ray.available_resources()
    threads, devices = specs[0].threads, int(free.get("GPU", 0))
    cpus = threads if free.get("CPU", 0) >= threads * len(specs) else 0
    if not specs[0].device.startswith("cuda"):
        return cpus, 0
    if not devices:
        raise RuntimeError("the Ray node has no free GPU: free one, or choose device='cpu'")
    return cpus, 1 / math.ceil(len(specs) / devices)


def _own_words(error: Exception) -> str:
    """The worker's own message, without Ray's account of how it travelled."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    if "process has died" in str(error):
        return "its process was killed or crashed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
