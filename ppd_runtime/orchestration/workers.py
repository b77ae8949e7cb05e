"""Workers as Ray actors: Ray places, starts and watches them; messages between them travel over sockets of ours."""

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ppd_runtime.config import RuntimeConfig
from ppd_runtime.launching import Introductions, RequestCounts, SocketFolder, dismiss
from ppd_runtime.orchestration.gpus import UNMASKED, own_device
from ppd_runtime.orchestration.metrics import Metrics
from ppd_runtime.orchestration.placement import cluster_nodes, release, reserve
from ppd_runtime.orchestration.room import Bundle, Node
from ppd_runtime.orchestration.security import check_authentication, check_version, no_cluster
from ppd_runtime.pipeline.messages import CLIENT, MAIN
from ppd_runtime.start_worker import Actor
from ppd_runtime.supervision import ANSWER_DEADLINE_S, LAST_LOOK_S, PING_EVERY_S, Progress, Supervisor
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.sockets import choose_transport, make_networks, open_endpoint
from ppd_runtime.worker import WorkerSpec
from ppd_runtime.worker_process import start_order

logger = logging.getLogger(__name__)
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing of ours goes through it
_STOP_DEADLINE_S = 5.0


class _HostActor(Actor):
    """A worker that knows the address of the Ray node it came to, and which of its GPUs is its own."""

    def __init__(self, order: str) -> None:
        super().__init__(order, ray.util.get_node_ip_address(), own_device(ray.get_gpu_ids(), os.environ))


@ray.remote(max_restarts=0)
class PPDMain(_HostActor):
    """The main process; the class' name is what `ps` shows."""


@ray.remote(max_restarts=0)
class PPDSub(_HostActor):
    """A sub-process; the class' name is what `ps` shows."""


class RayWorkers:
    """Every worker a Ray actor with a place of its own, on a Ray node of our own or on a running cluster's."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        config: RuntimeConfig,
        progress: Progress,
    ) -> None:
        check_version(ray.__version__)
        self._specs = {spec.rank: spec for spec in specs}
        self.supervisor = Supervisor(list(self._specs), self._begin_life, config.max_restarts, self._introduce)
        self._folder = SocketFolder()
        self._closed = False
        self._group: Any = None
        self._owns_ray = not ray.is_initialized()
        self._one_host = config.one_host
        try:
            if self._owns_ray:
                address = config.ray_address
                progress("starting Ray" if address is None else f"connecting to Ray at {address}")
                _start_ray(address, len(specs) * specs[0].threads, self._folder.path)
            everybody = [CLIENT, *self._specs]
            self._reserve(config, progress)
            on_gpus = self._specs[MAIN].device.startswith("cuda")
            transport = choose_transport(config.transport, on_gpus, own_gpus=self._bundle.gpus >= 1)
            self._environment = UNMASKED if on_gpus and transport == "collective" else {}
            self._networks = make_networks(transport, self._folder.path, config.bind_interface, everybody)
            self.endpoint: Endpoint = open_endpoint(self._networks[CLIENT], CLIENT)
            self._introductions = Introductions(self.endpoint)
            self._metrics = Metrics()
            self.supervisor.start(progress)
        except BaseException:
            self.close()
            raise

    def _reserve(self, config: RuntimeConfig, progress: Progress) -> None:
        nodes = cluster_nodes()
        check_authentication({node.host for node in nodes})
        alone = self._owns_ray and config.ray_address is None
        self._bundle = _bundle(self._specs[MAIN], len(self._specs), config.gpus_per_worker, nodes if alone else None)
        self._group = reserve(
            self._bundle, len(self._specs), config.placement, self._one_host, config.placement_timeout_s, progress
        )

    def _begin_life(self, rank: int) -> "ActorLife":
        actor_class: Any = PPDMain if rank == MAIN else PPDSub
        network = replace(self._networks[rank], client=self.endpoint.location)
        if not self._one_host:
            network = replace(network, interface="")  # the address of the Ray node that it comes to
        order = start_order(self._specs[rank], network)
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        resources = {"num_cpus": self._bundle.cpus, "num_gpus": self._bundle.gpus}
        options: dict[str, Any] = {"scheduling_strategy": place, "max_concurrency": 2, **resources}
        if self._environment:
            options["runtime_env"] = {"env_vars": self._environment}
        return ActorLife(actor_class.options(**options).remote(order))

    def _introduce(self, rank: int, location: str) -> None:
        self._introductions.introduce(rank, location)

    def record(self, counts: RequestCounts) -> None:
        """Hand a request's counts to Ray, which exports them."""
        self._metrics.record(counts)

    def close(self) -> None:
        """Stop the actors, the Ray node if it is ours, and remove the folder of sockets."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:  # what is interrupted leaves out nothing that comes behind it
            last.callback(self._folder.remove)
            if ray.is_initialized():
                last.callback(self._leave_ray)
            if hasattr(self, "endpoint"):
                dismiss(self.supervisor, self.endpoint)

    def _leave_ray(self) -> None:
        with contextlib.ExitStack() as last:
            if self._owns_ray:
                last.callback(ray.shutdown)
            last.enter_context(contextlib.suppress(ray.exceptions.RayError))
            if self._group is not None:
                last.callback(release, self._group)
            self.supervisor.stop(_STOP_DEADLINE_S)


class ActorLife:
    """A worker as a Ray actor: one of its threads serves, another answers."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.location, self.cancelled = "", False
        self._ready = actor.ready.remote()
        self._serving: Any = None
        self._ping: Any = None
        self._pinged_at = 0.0

    def is_ready(self) -> bool:
        """Whether it has loaded its layers, and serves from now on; raises RuntimeError where it cannot."""
        if not _has(self._ready):
            return False
        try:
            self.location = ray.get(self._ready)
        except ray.exceptions.RayError as error:
            self.cancelled = _never_ran(error)
            raise RuntimeError(_own_words(error)) from error
        self._serving = self._actor.serve.remote()
        return True

    def end_reason(self) -> str | None:
        """Its own words, or that it has not answered for long: it may be stopped, or its host out of reach."""
        if _has(self._serving):
            return _reason(self._serving)
        now = time.monotonic()
        if self._ping is not None and _has(self._ping):
            self._ping = None
        if self._ping is None:
            if now - self._pinged_at >= PING_EVERY_S:
                self._ping, self._pinged_at = self._actor.ready.remote(), now
        elif now - self._pinged_at > ANSWER_DEADLINE_S and not _has(self._ping, LAST_LOOK_S):
            return f"it has not answered for {ANSWER_DEADLINE_S:.0f} s"
        return None

    def wait(self, seconds: float) -> None:
        """Give it so long to end by itself."""
        ray.wait([self._serving], timeout=seconds)

    def kill(self) -> None:
        """End it now."""
        ray.kill(self._actor)


def _has(reference: Any, seconds: float = 0.0) -> bool:
    return bool(ray.wait([reference], timeout=seconds)[0])


def _reason(reference: Any) -> str:
    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        return _own_words(error)
    return "it ended"


def _silence_notices() -> None:
    """Ray prints its notices of lost workers to stdout, among the user's text; `check` says the same in a line."""
    with contextlib.suppress(AttributeError):
        ray._private.worker.stdout_deduplicator.skip_re = re.compile("")


def _start_ray(address: str | None, num_cpus: int, folder: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _silence_notices()
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        try:
            ray.init(address=address, **common)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            raise RuntimeError(no_cluster(address)) from error
        return
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_cpus),  # every worker gets a place, however few the cores
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _system_config={"worker_niceness": 0},  # Ray's own choice, 15, starves a worker beside any other program
        _temp_dir=f"{folder}/ray",
        **common,
    )


def _bundle(spec: WorkerSpec, count: int, gpus: float | None, own_nodes: Sequence[Node] | None) -> Bundle:
    """What a worker asks for: a GPU where it needs one, or its share of those of a Ray node that is ours alone."""
    if not spec.device.startswith("cuda"):
        return Bundle(spec.threads, 0)
    if gpus is None and own_nodes is not None:
        devices = int(own_nodes[0].gpus)
        gpus = 1 / math.ceil(count / devices) if devices else None
    return Bundle(spec.threads, 1 if gpus is None else gpus)


def _never_ran(error: Exception) -> bool:
    """Whether Ray took an actor back before it began: so it does where the node that it chose turns out to be lost."""
    return isinstance(error, ray.exceptions.ActorDiedError) and "actor never ran" in str(error)  # nothing else says it


def _own_words(error: Exception) -> str:
    """The worker's own message, without Ray's account of how it travelled."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "it is out of reach: its host, or the link to it, may be lost"
    if "process has died" in str(error):
        return "its process was killed or crashed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
