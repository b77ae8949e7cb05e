"""The sockets that a network's transport stands for."""

import os
from collections.abc import Sequence
from typing import Any

from ppd_runtime.imports import whole_imports
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.unix import UnixEndpoint

_SPIN_S = 0.002
_RING_FROM_ON_GPUS = 2**16 + 1
"""Bytes of a tensor; CUDA copies up to 64 KB to a GPU together with the command, from any memory."""
_SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"


def check_collective(device: str) -> None:
    """Raise ValueError if this PyTorch has no collectives for tensors of a device."""
    from ppd_runtime.transport.collective_groups import check_backend  # its import takes a while

    check_backend(device)


def choose_transport(transport: str, on_gpus: bool, own_gpus: bool) -> str:
    """The transport for a setting; collectives only if asked for.

    Raises:
        ValueError: if NCCL would refuse: workers share a GPU, and it has not been told to try that.
    """
    if transport == "collective" and on_gpus and not own_gpus and os.environ.get(_SHARED_GPUS) != "1":
        raise ValueError(
            "transport='collective' with workers that share a GPU, which NCCL refuses: choose transport auto, or fewer "
            f"workers (or try {_SHARED_GPUS}=1 with NCCL 2.30 or newer, an experiment)"
        )
    return transport


def spins(has_own_core: bool, device: str, num_workers: int, num_cores: int) -> bool:
    """Whether a worker polls for messages for a while before it sleeps.

    It does with a core of its own. On a GPU it has none, and does if the host has a core for each worker and one more.
    """
    return has_own_core or (device.startswith("cuda") and num_cores > num_workers)


def open_endpoint(network: Network, address: int, spinning: bool = False, device: str = "cpu") -> Endpoint:
    """A process' place in a network; "auto" is Unix sockets on one host, and ZeroMQ if there is an interface.

    A `spinning` process polls for messages for 2 ms before it sleeps, over Unix sockets. `device` is where its tensors
    live, for the collective transport and for a ring. A GPU's large tensors go through rings, also all tensors of the
    transport "ring", which is Unix sockets with rings on every device, for tests and measurements.

    Raises:
        ValueError: for a folder that others may enter, an interface of another host, missing or wrong keys, a PyTorch
            without the collectives that are asked for, or if ZeroMQ is needed and not installed; nothing is bound then.
    """
    endpoint: Endpoint
    if network.transport == "collective":
        _zeromq()  # carries what is not a tensor
        from ppd_runtime.transport.collective_endpoint import CollectiveEndpoint  # its import takes a while

        endpoint = CollectiveEndpoint(network, address, device)
    elif network.transport == "zeromq" or network.interface or network.keys:
        endpoint = _zeromq().ZmqEndpoint(network, address)
    else:
        ring_from = 1 if network.transport == "ring" else _RING_FROM_ON_GPUS if device.startswith("cuda") else None
        endpoint = UnixEndpoint(network.folder, address, _SPIN_S if spinning else 0.0, ring_from, device)
    return endpoint


def make_networks(transport: str, folder: str, interface: str | None, addresses: Sequence[int]) -> dict[int, Network]:
    """What each address is told; with an interface everybody has keys of its own, made for this run."""
    if interface is None:
        return dict.fromkeys(addresses, Network(transport, folder))
    keys = _zeromq().make_keys(addresses)
    return {address: Network(transport, folder, interface, keys[address]) for address in addresses}


def _zeromq() -> Any:
    """The module of ZeroMQ's sockets, which processes of one host do not need; ValueError if it is not installed."""
    try:
        with whole_imports():
            from ppd_runtime.transport import zeromq
    except ModuleNotFoundError as error:
        raise ValueError(
            f"transport zeromq needs pyzmq, which is not installed ({error}): install it, or choose transport unix"
        ) from error
    return zeromq
