"""Where a runtime's processes run and how they reach each other: the choices, and checks of what is combined."""

from collections.abc import Mapping
from dataclasses import dataclass

from ppd_runtime.settings.checks import check_choice, check_range


@dataclass(frozen=True)
class TransportKind:
    """What a way for messages to travel can do."""

    reach: str
    """Who can take part: threads of one process, processes of one host, or those of a cluster."""
    device_tensors: bool = False
    """Whether tensors go from device to device."""


TRANSPORTS: Mapping[str, TransportKind] = {
    "auto": TransportKind("cluster"),
    "local": TransportKind("threads"),
    "unix": TransportKind("host"),
    "zeromq": TransportKind("cluster"),
    "collective": TransportKind("cluster", device_tensors=True),
}
LAUNCHERS = ("auto", "ray", "processes")
PLACEMENTS = ("auto", "pack", "spread", "strict-pack", "strict-spread")


class Placed:
    """The part of `RuntimeConfig` that says where processes run, on which devices, and how messages travel."""

    device: str
    transport: str
    launcher: str
    ray_address: str | None
    bind_interface: str | None
    placement: str
    placement_timeout_s: float
    gpus_per_worker: float | None

    @property
    def in_threads(self) -> bool:
        """Whether the workers are threads of this process."""
        return TRANSPORTS[self.transport].reach == "threads"

    @property
    def one_host(self) -> bool:
        """Whether only processes of this host reach each other."""
        interface = self.bind_interface
        return interface is None or interface == "localhost" or interface.startswith("127.") or interface == "::1"

    def _check_network(self) -> None:
        if self.ray_address is not None and self.in_threads:
            way = f"transport={self.transport!r}"
            raise ValueError(f"ray_address={self.ray_address!r} with {way}, which uses no Ray: drop one")
        if self.ray_address is not None and self.launcher == "processes":
            raise ValueError(f"ray_address={self.ray_address!r} with launcher='processes', without Ray: drop one")
        if self.bind_interface is not None and TRANSPORTS[self.transport].reach != "cluster":
            raise ValueError(
                f"bind_interface={self.bind_interface!r} with transport={self.transport!r}, which stays on one host: "
                "choose transport auto, zeromq or collective"
            )
        if self.launcher == "processes" and self.in_threads:
            raise ValueError(f"launcher='processes' with transport={self.transport!r}, which runs threads: drop one")

    def _check_placement(self) -> None:
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("launcher", self.launcher, LAUNCHERS)
        check_choice("placement", self.placement, PLACEMENTS)
        check_range("placement_timeout_s", self.placement_timeout_s, lambda seconds: seconds >= 0, "0 or more")
        if self.gpus_per_worker is not None:
            range_text = "above 0, and whole from 1 on"
            check_range(
                "gpus_per_worker", self.gpus_per_worker, lambda g: 0.001 <= g <= 1 or g == int(g) > 0, range_text
            )
            if self.device not in ("auto", "cuda"):
                raise ValueError(
                    f"gpus_per_worker={self.gpus_per_worker:g} with device={self.device!r}, where all workers are: "
                    "drop it, or choose device cuda"
                )
        if self.placement != "auto" and (self.launcher == "processes" or self.in_threads):
            raise ValueError(
                f"placement={self.placement!r} is for Ray's workers: drop it, or the launcher or transport"
            )
        if "spread" in self.placement and self.one_host:
            raise ValueError(
                f"placement={self.placement!r} with bind_interface={self.bind_interface!r}, where only processes of "
                "this host reach each other: give bind_interface an address that others know, or choose auto or pack"
            )
