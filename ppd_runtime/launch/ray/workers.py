"""Workers as Ray actors: Ray places, starts and watches them; messages between them travel over sockets of ours."""

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ppd_runtime.launch.base import Introductions, RequestCounts, dismiss
from ppd_runtime.launch.choice import address_to_join
from ppd_runtime.launch.gpu_memory import FoundGpu, check_shares
from ppd_runtime.launch.ray.actors import PPDMain, PPDStage, PPDSub, compile_code, find_gpu
from ppd_runtime.launch.ray.gpus import UNMASKED
from ppd_runtime.launch.ray.metrics import RayMetrics
from ppd_runtime.launch.ray.placement import cluster_nodes, release, reserve
from ppd_runtime.launch.ray.room import Bundle, cpus_beside_others
from ppd_runtime.launch.ray.security import check_authentication
from ppd_runtime.launch.ray.session import Membership, check_same, join
from ppd_runtime.launch.socket_folder import SocketFolder
from ppd_runtime.launch.supervisor import ANSWER_DEADLINE_S, LAST_LOOK_S, PING_EVERY_S, Progress, Supervisor
from ppd_runtime.launch.worker_specs import all_code_kinds
from ppd_runtime.models.compiling import wants_code
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.layouts import CLIENT, DECIDER, StagedLayout
from ppd_runtime.settings.placement import TRANSPORTS
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.sockets import choose_transport, make_networks, open_endpoint
from ppd_runtime.workers.bits import NO_BITS, Bits
from ppd_runtime.workers.process import read_answer, start_order
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)

_STOP_DEADLINE_S = 5.0
_BIRTH_DEADLINE_S = 60.0  # as long as Ray itself waits for a process that it has started
_LOADING_DEADLINE_S = 60.0  # imports beside busy programs keep the thread that answers waiting
_PATIENCE_S = 0.5
_COMPILE_S = 1800.0
_FIND_S = 300.0


class RayWorkers:
    """Workers as Ray actors, each with its own place, on a Ray node of our own or an existing one."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        config: RuntimeConfig,
        progress: Progress,
    ) -> None:
        self._specs = {spec.rank: spec for spec in specs}
        self._layout = specs[DECIDER].layout
        self.supervisor = Supervisor(self._layout, self._spawn, config.max_restarts, self._introduce)
        self._folder = SocketFolder()
        self._closed = False
        self._group: Any = None
        self._membership: Membership | None = None
        self._one_host = config.one_host
        try:
            if config.ray_address is not None:
                check_same(config.ray_address)
            _, address = address_to_join(config)
            self._membership = join(address, len(specs) * specs[0].threads, progress)
            everybody = [CLIENT, *self._specs]
            self._reserve(config, progress)
            on_gpus = self._specs[DECIDER].device.startswith("cuda")
            transport = choose_transport(config.transport, on_gpus, own_gpus=self._bundle.gpus >= 1)
            self._environment = UNMASKED if on_gpus and TRANSPORTS[transport].device_tensors else {}
            if on_gpus:
                self._check_gpus(config, progress)
            self._code = self._compiled(config, progress)
            self._networks = make_networks(transport, self._folder.path, config.bind_interface, everybody)
            self.endpoint: Endpoint = open_endpoint(self._networks[CLIENT], CLIENT)
            self._introductions = Introductions(self.endpoint)
            self._metrics = RayMetrics(self._layout)
            self.supervisor.start(progress)
        except BaseException:
            self.close()
            raise

    def _reserve(self, config: RuntimeConfig, progress: Progress) -> None:
        nodes = cluster_nodes()
        check_authentication({node.host for node in nodes})
        count, membership = len(self._specs), self._joined
        self._bundle = _bundle(self._specs[DECIDER], count, config.gpus_per_worker, membership)
        here = self._one_host or membership.own_node
        self._group = reserve(self._bundle, count, config.placement, here, config.placement_timeout_s, progress)

    @property
    def _joined(self) -> Membership:
        assert self._membership is not None
        return self._membership

    def _spawn(self, rank: int) -> "ActorHandle":
        self._joined.check()
        actor_class: Any = (
            PPDStage if isinstance(self._layout, StagedLayout) else PPDMain if rank == DECIDER else PPDSub
        )
        network = replace(self._networks[rank], client=self.endpoint.location)
        if not self._one_host:
            network = replace(network, interface="")  # the address of the Ray node that it comes to
        order = start_order(self._specs[rank], network)
        options = self._place(rank) | {"max_concurrency": 2}
        if self._environment:
            options["runtime_env"] = {"env_vars": self._environment}
        name = self._layout.name(rank)
        return ActorHandle(actor_class.options(**options).remote(name, order, self._code), self._joined)

    def _place(self, rank: int) -> dict[str, Any]:
        """Ray's options to run in a worker's place, with all that the worker has there."""
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return {"scheduling_strategy": place, "num_cpus": self._bundle.cpus, "num_gpus": self._bundle.gpus}

    def _check_gpus(self, config: RuntimeConfig, progress: Progress) -> None:
        """Refuse workers of one GPU if they do not fit there together; their places tell which share one.

        Raises:
            ValueError: see `check_shares`.
        """
        progress("looking for memory on the workers' GPUs")
        asked = [find_gpu.options(**self._place(rank)).remote() for rank in self._specs]
        found = _result(asked, _FIND_S, "the look at the workers' GPUs")
        gpus = {
            rank: FoundGpu(number, free, host) for rank, (number, host, free) in zip(self._specs, found, strict=True)
        }
        check_shares(list(self._specs.values()), gpus, config)

    def _compiled(self, config: RuntimeConfig, progress: Progress) -> Any:
        """Code for workers on several hosts: one compiles it at the first one's place, and Ray holds it.

        Raises:
            ValueError: if the model cannot be compiled there, and `compile` is not automatic.
        """
        if self._one_host or not wants_code(config.compile, self._specs[DECIDER].device):
            return b""
        progress("a worker compiles, unless an earlier run has")
        kinds = all_code_kinds(self._specs.values())
        order = start_order(self._specs[DECIDER], Network())
        task = compile_code.options(**self._place(DECIDER)).remote(order, kinds)
        try:
            return ray.put(_result(task, _COMPILE_S, "compile: the worker that compiles"))
        except ValueError as error:
            if config.compile:
                raise
            logger.warning("passes are not compiled: %s", error)
            return b""

    def _introduce(self, rank: int, location: str) -> None:
        self._introductions.introduce(rank, location)

    def record(self, counts: RequestCounts) -> None:
        """Hand a request's counts to Ray, which exports them."""
        if self._joined.is_there():
            self._metrics.record(counts)

    def close(self) -> None:
        """Stop the actors, the Ray node if it is ours and no other runtime needs it, and remove the folder of
        sockets."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:  # an interrupt skips none of the later steps
            last.callback(self._folder.remove)
            if self._membership is not None:
                last.callback(self._leave_ray, self._membership)
            if hasattr(self, "endpoint"):
                dismiss(self.supervisor, self.endpoint)

    def _leave_ray(self, membership: Membership) -> None:
        with contextlib.ExitStack() as last:
            last.callback(membership.leave)
            last.enter_context(contextlib.suppress(ray.exceptions.RayError))
            if self._group is not None and membership.is_there():
                last.callback(release, self._group)
            self.supervisor.stop(_STOP_DEADLINE_S)


class ActorHandle:
    """A worker as a Ray actor: one of its threads loads and serves, another answers."""

    def __init__(self, actor: Any, membership: Membership) -> None:
        self._actor, self._membership = actor, membership
        self.location, self.bits, self.cancelled = "", NO_BITS, False
        self._serving = actor.serve.remote()
        self._answer: Any = None
        self._asked_at, self._has_answered = 0.0, False
        self._ask(0)

    def is_ready(self) -> bool:
        """Whether it has loaded its layers; raises RuntimeError if it cannot, or no longer answers.

        It can answer as soon as its process runs: on a cluster Ray may first have to make an environment.
        """
        self._membership.check()
        if _has(self._serving):
            raise RuntimeError(self._reason())
        if not _has(self._answer):
            here = self._membership.own_node or self._membership.of_the_program
            deadline = _LOADING_DEADLINE_S if self._has_answered else _BIRTH_DEADLINE_S if here else math.inf
            if self._is_late(deadline):
                raise RuntimeError(_silent(deadline))
            return False
        found = self._take_answer()
        if found is None:
            self._ask(_PATIENCE_S)
            return False
        (self.location, self.bits), self._answer = found, None
        return True

    def welcome(self) -> None:
        """Have it serve."""
        self._actor.welcome.remote()

    def end_reason(self) -> str | None:
        """Its own words, or that it has not answered for long: it may be stopped, or its host out of reach."""
        self._membership.check()
        if _has(self._serving):
            return self._reason()
        if self._answer is not None and _has(self._answer):
            self._answer = None
        if self._answer is None:
            if time.monotonic() - self._asked_at >= PING_EVERY_S:
                self._ask(0)
        elif self._is_late(ANSWER_DEADLINE_S):
            return _silent(ANSWER_DEADLINE_S)
        return None

    def wait(self, seconds: float) -> None:
        """Wait until it ends, or `seconds`."""
        if self._membership.is_there():
            ray.wait([self._serving], timeout=seconds)

    def kill(self) -> None:
        """End it now."""
        if self._membership.is_there():
            ray.kill(self._actor)

    def _ask(self, patience_s: float) -> None:
        self._answer = self._actor.answer.remote(patience_s)
        self._asked_at = time.monotonic()

    def _is_late(self, seconds: float) -> bool:
        return time.monotonic() - self._asked_at > seconds and not _has(self._answer, LAST_LOOK_S)

    def _take_answer(self) -> tuple[str, Bits] | None:
        try:
            answer: str | None = ray.get(self._answer)
        except ray.exceptions.RayError as error:
            self.cancelled = _never_ran(error)
            raise RuntimeError(_own_words(error)) from error
        self._has_answered = True
        return None if answer is None else read_answer(answer)

    def _reason(self) -> str:
        try:
            ray.get(self._serving)
        except ray.exceptions.RayError as error:
            self.cancelled = self.cancelled or _never_ran(error)
            return _own_words(error)
        return "it ended"


def _result(task: Any, seconds: float, who: str) -> Any:
    """The result of a task, or tasks; raises its ValueError, or RuntimeError with its words or after `seconds`."""
    try:
        return ray.get(task, timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(f"{who} has not ended for {seconds:.0f} s") from error
    except ray.exceptions.RayError as error:
        if isinstance(cause := getattr(error, "cause", None), ValueError):
            raise ValueError(str(cause)) from error
        raise RuntimeError(_own_words(error)) from error


def _has(reference: Any, seconds: float = 0.0) -> bool:
    return bool(ray.wait([reference], timeout=seconds)[0])


def _silent(seconds: float) -> str:
    return f"it has not answered for {seconds:.0f} s"


def _bundle(spec: WorkerSpec, count: int, gpus: float | None, membership: Membership) -> Bundle:
    """What each of `count` workers asks for.

    On our own node: no CPUs, since no other program takes any, and its share of the GPUs. In a Ray that the program
    started: what is free except a CPU, which stays for the program's tasks. In a cluster: all that it uses.
    """
    cpus: float = spec.threads
    if membership.own_node:
        cpus = 0
    elif membership.of_the_program:
        cpus = cpus_beside_others(count, spec.threads, ray.available_resources().get("CPU", 0))
    if not spec.device.startswith("cuda"):
        return Bundle(cpus, 0)
    if gpus is None and membership.own_node:
        devices = int(cluster_nodes()[0].gpus)
        gpus = 1 / math.ceil(count / devices) if devices else None
    return Bundle(cpus, 1 if gpus is None else gpus)


def _never_ran(error: Exception) -> bool:
    """Whether Ray cancelled an actor before it began, as it does if the node that it chose turns out to be lost."""
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
