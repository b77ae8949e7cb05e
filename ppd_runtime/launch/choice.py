"""Which launcher "auto" means, and which Ray a runtime joins."""

import os
import socket
import sys
from collections.abc import Mapping

from ppd_runtime.settings.config import RuntimeConfig

_CONNECT_DEADLINE_S = 5.0
_A_JOBS = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_ID")
"""Variables that Ray sets for a submitted job, and for what its workers start."""


def choose_launcher(config: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> str:
    """What starts a runtime's workers: "threads", "processes" or "ray".

    Threads if the transport is local; else the launcher that the settings name. "auto" is Ray if there is one to join:
    this program is connected to it already, `ray_address` or the variable RAY_ADDRESS tells where it is, or the program
    is a Ray job. It is also Ray if a setting asks for what only Ray can do: workers on several hosts (a
    `bind_interface` that others reach), a `placement`, or `gpus_per_worker`. Else it is plain processes of this host,
    which start in half the time and leave the program's Ray alone.
    """
    if config.in_threads:
        return "threads"
    if config.launcher != "auto":
        return config.launcher
    joins = ray_is_initialized() or address_to_join(config, environment)[1] is not None or config.ray_address
    asks = not config.one_host or config.placement != "auto" or config.gpus_per_worker is not None
    return "ray" if joins or asks else "processes"


def ray_is_initialized() -> bool:
    """Whether this program is connected to Ray; if it has not imported Ray, it is not."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def address_to_join(config: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> tuple[str, str | None]:
    """Which setting or variable says where a Ray to join is, and the address; None: a node of our own.

    The address is host:port, or "auto" for the Ray that runs on this host. "local" asks for a node of our own.
    """
    if config.ray_address is not None:
        source, address = "ray_address", config.ray_address
    elif address := environment.get("RAY_ADDRESS", ""):
        source = "RAY_ADDRESS"
    else:
        source, address = "a job of Ray's", "auto" if any(name in environment for name in _A_JOBS) else "local"
    return source, None if address == "local" else address


def check_ray_address(address: str, source: str = "ray_address") -> None:
    """Raise ValueError if nothing answers at a Ray address, which is host:port or "auto".

    Args:
        source: the setting or variable that has it.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{source}={address!r}: give host:port, as `ray start --head` prints it, or auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_DEADLINE_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"{source}={address!r}: nothing answers there ({error}); is the cluster running?") from error
