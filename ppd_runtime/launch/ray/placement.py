"""Places for the workers: a Ray placement group with a bundle for each."""

import time
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ppd_runtime.launch.ray.room import Bundle, RayNode, check_room, needs, strategies, way_out
from ppd_runtime.launch.supervisor import Progress

_PLACING_S = 10.0  # Ray needs milliseconds; an earlier run's workers may need longer to leave


def reserve(
    bundle: Bundle, count: int, placement: str, one_host: bool, timeout_s: float, progress: Progress
) -> PlacementGroup:
    """A place for every worker, the main process' first.

    Args:
        bundle: what a worker takes.
        count: workers.
        placement: "auto" or a name in `room.STRATEGIES`.
        one_host: whether all have to be on this host.
        timeout_s: seconds to wait for room if the cluster has none (yet); 0: fail at once.
        progress: is told the strategy.

    Raises:
        RuntimeError: naming what the workers need and the cluster lacks.
    """
    host, nodes = (this_host() if one_host else ""), cluster_nodes()
    reachable = [node for node in nodes if not host or node.host == host]
    chosen = strategies(placement, one_host, bundle, count, reachable)
    if not timeout_s:
        check_room(chosen[-1], host, bundle, count, nodes)
    deadline = time.monotonic() + max(timeout_s, _PLACING_S)
    for number, strategy in enumerate(chosen, start=1):
        places = f"{count} workers, each {bundle}, {strategy}" + (f" on {host}" if host else "")
        progress(f"placing {places}")
        patience = (deadline - time.monotonic()) / (len(chosen) + 1 - number)
        if group := _place([bundle.resources(host)] * count, strategy, patience):
            return group
    free = ray.available_resources()
    raise RuntimeError(
        f"{needs(bundle, count)} and got no place in {max(timeout_s, _PLACING_S):g} s: of the whole cluster "
        f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free; "
        f"wait for others to end, or {way_out(host)}"
    )


def release(group: PlacementGroup) -> None:
    """Give the places back; workers that are still there are ended."""
    remove_placement_group(group)


def cluster_nodes() -> list[RayNode]:
    """The Ray nodes that are alive."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [RayNode(n["NodeManagerAddress"], n["Resources"].get("CPU", 0), n["Resources"].get("GPU", 0)) for n in alive]


def this_host() -> str:
    """The address by which Ray knows the host of this process."""
    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)


def _place(bundles: Sequence[dict[str, float]], strategy: str, patience: float) -> PlacementGroup | None:
    group = placement_group(list(bundles), strategy=strategy)
    try:
        if group.wait(max(patience, 0.1)):
            return group
    except BaseException:
        remove_placement_group(group)
        raise
    remove_placement_group(group)
    return None
