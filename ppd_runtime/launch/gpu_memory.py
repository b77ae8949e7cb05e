"""Whether the workers of a GPU fit there together, before any of them is loaded."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from ppd_runtime.config import RuntimeConfig
from ppd_runtime.launch.cache_room import layer_entry_bytes
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.loading import weight_bytes
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.pipeline.messages import MAIN
from ppd_runtime.workers.spec import WorkerSpec


def check_gpus(specs: Sequence[WorkerSpec], config: RuntimeConfig) -> None:
    """Raise ValueError where the workers of one of this host's GPUs need more memory together than is free there.

    Counted are weights, boundaries' heads among them, and the keys and values of as many tokens as the settings have
    stages keep. What is chosen by the free memory, and what CUDA takes in each process, are not.
    """
    of_gpus = defaultdict[str, list[WorkerSpec]](list)
    for spec in specs:
        if spec.device.startswith("cuda"):
            of_gpus[spec.device].append(spec)
    tokens = (config.max_cache_tokens or 0) + config.prefix_tokens
    entries = layer_entry_bytes(model_config(specs[MAIN].info.folder), specs[MAIN].dtype) if of_gpus else 0
    for device, here in of_gpus.items():
        weights = sum(map(_weights, here))
        kept = tokens * entries * sum(spec.num_layers - spec.first_layer for spec in here)
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        if weights + kept > free:
            workers = f"{len(here)} worker{'s' * (len(here) > 1)}"
            raise ValueError(
                f"device={device!r}: {workers} need {(weights + kept) / 1e9:.2f} GB there ({weights / 1e9:.2f} of "
                f"weights, {kept / 1e9:.2f} of keys and values) and {free / 1e9:.2f} GB are free: choose fewer "
                "workers or more GPUs, a smaller max_cache_tokens or prefix_cache_tokens, or free it"
            )


def _weights(spec: WorkerSpec) -> int:
    """What a worker's layers and heads take."""
    tokens = len(spec.guess_tokens)
    own = weight_bytes(spec.info, spec.first_layer, spec.num_layers, spec.dtype, tokens)
    if spec.rank == MAIN or not isinstance(spec.exit_head, HeadInfo):
        return own
    return own + spec.exit_head.num_weights(tokens) * spec.dtype.itemsize
