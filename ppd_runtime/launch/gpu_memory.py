"""Whether the workers of a GPU fit there together, before any of them is loaded."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ppd_runtime.launch.gpus import free_bytes
from ppd_runtime.launch.memory_needs import drafter_needs, layer_entry_bytes
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.loading import weight_bytes
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.workers.spec import WorkerSpec


@dataclass(frozen=True)
class FoundGpu:
    """The GPU of a worker that has not loaded anything yet."""

    number: str
    """Its number on its host."""
    free: int
    """Its free memory in bytes."""
    host: str = ""
    """The address of another host; empty: this one."""

    @property
    def name(self) -> str:
        """What messages to people call it."""
        return f"device='cuda:{self.number}'" + (f" of {self.host}" if self.host else "")


def check_gpus(specs: Sequence[WorkerSpec], config: RuntimeConfig) -> None:
    """Like `check_shares`, for workers that know their GPU of this host."""
    on_gpus = {spec.rank: spec.device for spec in specs if spec.device.startswith("cuda")}
    gpus = {rank: FoundGpu(device.removeprefix("cuda:"), free_bytes(device)) for rank, device in on_gpus.items()}
    check_shares(specs, gpus, config)


def check_shares(specs: Sequence[WorkerSpec], gpus: Mapping[int, FoundGpu], config: RuntimeConfig) -> None:
    """Raise ValueError if the workers of one GPU together need more memory than is free there.

    It counts weights, with boundaries' heads and the drafter's, and keys and values of as many tokens as the settings
    have stages keep.
    It does not count what is sized by the free memory, or what CUDA takes in each process.

    Args:
        specs: the workers, by their ranks.
        gpus: the GPUs that workers have found, by rank.
        config: the runtime's settings.
    """
    of_gpus = defaultdict[tuple[str, str], list[int]](list)
    for rank, gpu in gpus.items():
        of_gpus[gpu.host, gpu.number].append(rank)
    for ranks in of_gpus.values():
        here = [specs[rank] for rank in ranks]
        weights = sum(map(_weights, here))
        kept = sum(_kept(spec, config.max_cache_tokens or 0) for spec in here)
        free = min(gpus[rank].free for rank in ranks)
        if weights + kept > free:
            workers = f"{len(here)} workers need" if len(here) > 1 else "a worker needs"
            raise ValueError(
                f"{gpus[ranks[0]].name}: {workers} {(weights + kept) / 1e9:.2f} GB there ({weights / 1e9:.2f} of "
                f"weights, {kept / 1e9:.2f} of keys and values) and {free / 1e9:.2f} GB are free: choose fewer "
                "workers or more GPUs, a smaller max_cache_tokens or prefix_cache_tokens, or free it"
            )


def _weights(spec: WorkerSpec) -> int:
    """What a worker's layers, heads and drafter take on its device."""
    tokens, drafter = len(spec.guess_tokens), drafter_needs(spec)
    own = weight_bytes(spec.info, spec.first_layer, spec.num_layers, spec.dtype, tokens)
    own += drafter.weights * (drafter.device == spec.device)
    if spec.rank == DECIDER or not isinstance(spec.exit_head, HeadInfo):
        return own
    return own + spec.exit_head.num_weights(tokens) * spec.dtype.itemsize


def _kept(spec: WorkerSpec, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens of requests, and of kept prefixes, on a worker's device."""
    layers, drafter = spec.num_layers - spec.first_layer, drafter_needs(spec)
    of_token = layers * layer_entry_bytes(model_config(spec.info.folder), spec.dtype)
    return (tokens + spec.prefix_cache_tokens) * of_token + tokens * drafter.of_token * (drafter.device == spec.device)
