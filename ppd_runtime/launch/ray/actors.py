"""What Ray runs for a worker: an actor that answers while it loads its layers, and while it serves.

It answers before it imports anything heavy: one that falls silent later counts as lost.
"""

import os

import ray

from ppd_runtime.imports import quick_imports
from ppd_runtime.launch.ray.gpus import own_device
from ppd_runtime.workers.entry import Actor


class _HostActor(Actor):
    """A worker that knows the address of the Ray node it came to, and which of its GPUs is its own."""

    def __init__(self, name: str, order: str, code: bytes = b"") -> None:
        super().__init__(name, order, ray.util.get_node_ip_address(), own_device(ray.get_gpu_ids(), os.environ), code)


@ray.remote(max_restarts=0)
class PPDMain(_HostActor):
    """The main process; the class' name is what `ps` shows."""


@ray.remote(max_restarts=0)
class PPDSub(_HostActor):
    """A sub-process; the class' name is what `ps` shows."""


@ray.remote(max_restarts=0)
class PPDStage(_HostActor):
    """One of several stages; the class' name is what `ps` shows."""


@ray.remote(max_retries=0, max_calls=1)
def find_gpu() -> tuple[str, str, int]:
    """This place's GPU: its number on its host, the host's address, and its free bytes.

    Its process ends after it, and gives back what CUDA takes.
    """
    with quick_imports():
        from ppd_runtime.launch.gpus import free_bytes

    own = ray.get_gpu_ids()
    return str(own[0]), ray.util.get_node_ip_address(), free_bytes(own_device(own, os.environ))


@ray.remote(max_retries=0)
def compile_code(order: str, kinds: list[int]) -> bytes:
    """A bundle of compiled code for these kinds of passes, for the model and the kind of device of a worker's order."""
    with quick_imports():
        from ppd_runtime.models.compiling import compile_bundle
        from ppd_runtime.workers.process import read_order

    spec, _ = read_order(order)
    device = own_device(ray.get_gpu_ids(), os.environ) or spec.device
    return compile_bundle(spec.info, spec.dtype, device, kinds)
