"""From settings to running workers: what is prepared once for all of them, and who starts them."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ppd_runtime.imports import whole_imports
from ppd_runtime.launch.base import Workers
from ppd_runtime.launch.choice import address_to_join, check_ray_address, ray_is_initialized
from ppd_runtime.launch.gpu_memory import check_gpus
from ppd_runtime.launch.processes import ProcessWorkers
from ppd_runtime.launch.stage_costs import with_layout
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.launch.threads import LocalWorkers
from ppd_runtime.launch.worker_specs import all_code_kinds
from ppd_runtime.models.build import share_weights
from ppd_runtime.models.compiling import code_for, wants_code
from ppd_runtime.models.draft_model import DraftModelInfo
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.layouts import DECIDER, StagedLayout
from ppd_runtime.transport.sockets import choose_transport
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)


def check_ray(config: RuntimeConfig) -> None:
    """Raise ValueError if no Ray answers at the given address, or this program is connected to another."""
    source, address = address_to_join(config)
    if not ray_is_initialized():
        if address is not None:
            check_ray_address(address, source)
    elif config.ray_address is not None:
        from ppd_runtime.launch.ray.session import check_same

        check_same(config.ray_address)


def transport_here(transport: str, specs: Sequence[WorkerSpec]) -> str:
    """The transport for a setting if every worker is on this host and knows its device."""
    devices = {spec.device for spec in specs}
    return choose_transport(transport, specs[DECIDER].device.startswith("cuda"), len(devices) == len(specs))


def start_workers(specs: list[WorkerSpec], config: RuntimeConfig, launcher: str, progress: Progress) -> Workers:
    """Start the workers that `prepare` gave with a launcher that `choose_launcher` gave."""
    if launcher == "threads":
        return LocalWorkers(specs, config.max_restarts, progress)
    if launcher == "processes":
        transport = transport_here(config.transport, specs)
        return ProcessWorkers(specs, transport, config.max_restarts, progress, bind_interface=config.bind_interface)
    with whole_imports():
        from ppd_runtime.launch.ray.workers import RayWorkers  # only this launcher needs Ray

    return RayWorkers(specs, config, progress)


def prepare(specs: list[WorkerSpec], config: RuntimeConfig, launcher: str, progress: Progress) -> list[WorkerSpec]:
    """Prepare code and weights, and choose by measurement what stages leave open.

    If this process sees no device of the workers' kind, or cannot compile for workers on other hosts, there is no code
    yet: a worker compiles it. Workers that do not fit on this host's GPUs are refused first or, if that depends on the
    cuts, as soon as these are known.
    """
    gpus_are_known = launcher != "ray"  # Ray's actors learn theirs when they run
    layout = specs[DECIDER].layout
    cuts_matter = isinstance(layout, StagedLayout) and len({spec.device for spec in specs}) > 1
    if gpus_are_known and not cuts_matter:
        check_gpus(specs, config)
    main = specs[DECIDER]
    if wants_code(config.compile, main.device) and _sees_device(main):
        try:
            code = code_for(config.compile, main.info, main.dtype, main.device, all_code_kinds(specs), progress)
        except ValueError as error:
            if config.one_host or launcher != "ray":
                raise
            logger.info("not here, but a worker compiles: %s", error)
        else:
            specs = [replace(spec, code={kind: code[kind] for kind in spec.code_kinds & set(code)}) for spec in specs]
    if config.one_host or launcher == "processes":
        progress("converting weights, where that has to be and no earlier run has")
        share_weights(main.info, main.dtype, main.device, any(spec.code for spec in specs))
        specs = [replace(spec, has_whole_model=may_have_whole_model(spec)) for spec in specs]
        specs = [_with_draft_prepared(spec, config, progress) for spec in specs]
    if isinstance(layout, StagedLayout):
        specs = with_layout(specs, layout, config, progress)
    if gpus_are_known and cuts_matter:
        check_gpus(specs, config)
    return specs


def _with_draft_prepared(spec: WorkerSpec, config: RuntimeConfig, progress: Progress) -> WorkerSpec:
    """The specification with code for its draft model, if it has one, whose weights are ready."""
    draft, asks = spec.drafter, spec.layout.guesser if spec.layout.drafter is None else spec.layout.drafter
    if not isinstance(draft, DraftModelInfo) or spec.rank != asks:
        return spec
    device = draft.device(spec.device)
    wanted = None if config.compile else config.compile  # a drafter that cannot be compiled is slower, no more
    code = code_for(wanted, draft.info, draft.dtype, device, draft.code_kinds, progress)
    share_weights(draft.info, draft.dtype, device, bool(code))
    if spec.rank == spec.layout.drafter:
        return replace(spec, code=code)
    return replace(spec, drafter=replace(draft, code=code))


def may_have_whole_model(spec: WorkerSpec) -> bool:
    """Whether a worker can load all layers beside its own in no further memory: weights of a host's CPU workers are
    shared.
    """
    return spec.rank == DECIDER and spec.device == "cpu" and bool(spec.layout.cuts)


def _sees_device(spec: WorkerSpec) -> bool:
    return not spec.device.startswith("cuda") or torch.cuda.is_available()
