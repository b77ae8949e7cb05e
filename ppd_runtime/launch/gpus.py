"""This host's GPUs: which of them workers outside Ray get, and their free memory."""

import math
from collections.abc import Sequence

import torch

from ppd_runtime.launch.nvml import free_by_nvml, open_nvml


def free_bytes(device: str) -> int:
    """Free memory of a GPU that this process sees, in bytes, if possible without a context of this process there."""
    library = open_nvml()
    if library is not None:
        uuid = getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", None)
        free = free_by_nvml(library, uuid)
        library.nvmlShutdown()
        if free is not None:
            return free
    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def crowding(devices: Sequence[str]) -> str | None:
    """A message if workers on these devices, such as cuda:0, share GPUs, which then run them in turn."""
    on_gpus = [device for device in devices if device.startswith("cuda:")]
    gpus = len(set(on_gpus))
    if gpus == len(on_gpus):
        return None
    shared = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{len(on_gpus)} workers share {shared}: they take turns, so expect less speed than a GPU for each gives"


def assign_gpus(num_workers: int, num_gpus: int, gpus_per_worker: float | None) -> list[str]:
    """A GPU for each worker, such as cuda:0. Workers share all GPUs, unless `gpus_per_worker` says how many may.

    Raises:
        ValueError: if there are too few.
    """
    share = 1 if gpus_per_worker is None else gpus_per_worker
    needed = math.ceil(num_workers / math.floor(1 / share)) if share <= 1 else num_workers * int(share)
    if gpus_per_worker is not None and needed > num_gpus:
        raise ValueError(
            f"gpus_per_worker={gpus_per_worker:g}: {num_workers} workers need {needed} GPUs, and there are {num_gpus}: "
            "choose fewer workers, or a smaller share each"
        )
    return [f"cuda:{rank % num_gpus}" for rank in range(num_workers)]
