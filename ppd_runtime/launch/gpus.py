"""This host's GPUs: which of them workers outside Ray get, and their free memory."""

import math

import torch


def free_bytes(device: str) -> int:
    """Free memory of a GPU that this process sees, in bytes."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0])


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
