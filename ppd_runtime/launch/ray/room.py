"""Whether a cluster has room for the workers: equal bundles of resources, and how many each host holds."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict-pack": "STRICT_PACK", "strict-spread": "STRICT_SPREAD"}
"""Ray's names, by those of the setting `placement`."""
_MOST_NAMED = 6  # hosts in an error


@dataclass(frozen=True)
class RayNode:
    """What a Ray node has in all, in use or not."""

    host: str
    """The host's address."""
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.host} with {_amount(self.cpus, 'CPU')}, {_amount(self.gpus, 'GPU')}"


@dataclass(frozen=True)
class Bundle:
    """What a worker takes."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        cpus = _amount(self.cpus, "CPU") if self.cpus else "no CPU to itself"
        return cpus + (f" and {_amount(self.gpus, 'GPU')}" if self.gpus else "")

    def resources(self, host: str = "") -> dict[str, float]:
        """Resources in Ray's form. If `host` is given, only nodes of that host have them."""
        named = {"CPU": self.cpus, "GPU": self.gpus, f"node:{host}": 0.001 if host else 0.0}
        return {name: amount for name, amount in named.items() if amount}

    def places_on(self, node: RayNode) -> int:
        """How many such bundles a node holds when nothing else runs on it."""
        wanted = ((self.cpus, node.cpus), (self.gpus, node.gpus))
        return min((int(has / amount + 1e-9) for amount, has in wanted if amount), default=sys.maxsize)


def cpus_beside_others(count: int, threads: int, free: float) -> float:
    """CPUs that each of `count` workers asks for, with one of the free ones left for others.

    It is all that a worker uses, if there are enough; else an equal part, in hundredths, and they share cores.
    """
    if count * threads <= free - 1:
        return threads
    return max(0, math.floor(100 * (free - 1) / count) / 100)


def strategies(placement: str, one_host: bool, bundle: Bundle, count: int, nodes: Sequence[RayNode]) -> list[str]:
    """Ray's strategies to try, one after the other.

    Args:
        placement: "auto" or a name in `STRATEGIES`. "auto" takes one node if all workers fit there, since a hop within
            a host is the shortest, else as few nodes as possible.
        one_host: whether the transport reaches this host only.
        bundle: what a worker takes.
        count: workers.
        nodes: those that the transport reaches.
    """
    if placement != "auto":
        return [STRATEGIES[placement]]
    fits_one = any(bundle.places_on(node) >= count for node in nodes)
    return (["STRICT_PACK"] if one_host or fits_one else []) + ([] if one_host else ["PACK"])


def check_room(strategy: str, host: str, bundle: Bundle, count: int, nodes: Sequence[RayNode]) -> None:
    """Raise RuntimeError if `count` bundles could not be placed even if nothing else ran on these nodes.

    Args:
        host: the one host that they have to be on; empty if they may be anywhere.
    """
    usable = [node for node in nodes if not host or node.host == host]
    places = [bundle.places_on(node) for node in usable]
    if strategy == "STRICT_PACK":
        found, where = max(places, default=0), " on one node"
    elif strategy == "STRICT_SPREAD":
        found, where = sum(map(bool, places)), ", each on a node of its own"
    else:
        found, where = sum(places), ""
    if found < count:
        raise RuntimeError(
            f"{needs(bundle, count)}{where}, {_there_is(usable, host)} (room for {found}); {way_out(host)}"
        )


def needs(bundle: Bundle, count: int) -> str:
    """What the workers need, for people."""
    return f"the runtime needs {count} bundles of {bundle}"


def way_out(host: str) -> str:
    """What helps if there is too little room."""
    others = "give bind_interface to use other hosts too" if host else "add nodes"
    return f"run fewer workers, or {others}, or wait for an autoscaler's with placement_timeout_s"


def _there_is(nodes: Sequence[RayNode], host: str) -> str:
    named = "; ".join(map(str, nodes[:_MOST_NAMED])) + ("; …" if len(nodes) > _MOST_NAMED else "")
    if host:
        return f"the transport reaches this host only, and the cluster has here {named or 'no node'}"
    return f"the cluster has {len(nodes)} node{'s' * (len(nodes) != 1)}: {named}"


def _amount(number: float, unit: str) -> str:
    return f"{number:g} {unit}{'' if number <= 1 and number else 's'}"
