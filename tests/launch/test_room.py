"""Whether workers find a place in a cluster, by the nodes that it has; and what a cluster must offer at all."""

import pytest

from ppd_runtime.launch.ray.room import Bundle, RayNode, check_room, strategies
from ppd_runtime.launch.ray.security import check_authentication, check_version

BIG, SMALL, GPU = RayNode("10.0.0.1", 8, 0), RayNode("10.0.0.2", 2, 0), RayNode("10.0.0.3", 4, 2)
CPU, WITH_GPU = Bundle(1, 0), Bundle(1, 1)


@pytest.mark.parametrize(
    ("bundle", "node", "places"),
    [
        (CPU, BIG, 8),
        (Bundle(3, 0), BIG, 2),
        (WITH_GPU, BIG, 0),
        (WITH_GPU, GPU, 2),
        (Bundle(1, 0.5), GPU, 4),
        (Bundle(1, 1 / 3), RayNode("", 9, 1), 3),
        (Bundle(2, 0.5), GPU, 2),
    ],
)
def test_places_on_a_node(bundle: Bundle, node: RayNode, places: int) -> None:
    assert bundle.places_on(node) == places


def test_a_bundle_can_be_tied_to_a_host() -> None:
    assert CPU.resources() == {"CPU": 1}
    assert WITH_GPU.resources("10.0.0.3") == {"CPU": 1, "GPU": 1, "node:10.0.0.3": 0.001}


def test_auto_prefers_one_host() -> None:
    assert strategies("auto", True, CPU, 4, [BIG]) == ["STRICT_PACK"]
    assert strategies("auto", True, CPU, 40, [BIG]) == ["STRICT_PACK"]
    assert strategies("auto", False, CPU, 4, [SMALL, BIG]) == ["STRICT_PACK", "PACK"]
    assert strategies("auto", False, CPU, 4, [SMALL, SMALL]) == ["PACK"]
    assert strategies("strict-spread", False, CPU, 4, [BIG]) == ["STRICT_SPREAD"]


@pytest.mark.parametrize(
    ("strategy", "host", "bundle", "count", "nodes", "words"),
    [
        (
            "STRICT_PACK",
            "10.0.0.2",
            CPU,
            4,
            [BIG, SMALL],
            "needs 4 bundles of 1 CPU on one node, the transport reaches this host only, and the cluster has "
            r"here 10.0.0.2 with 2 CPUs, 0 GPUs \(room for 2\); run fewer workers, or give bind_interface",
        ),
        (
            "STRICT_PACK",
            "",
            CPU,
            9,
            [BIG, SMALL],
            r"on one node, the cluster has 2 nodes: .*\(room for 8\).* add nodes",
        ),
        ("PACK", "", CPU, 11, [BIG, SMALL], r"11 bundles of 1 CPU, the cluster has 2 nodes: .*\(room for 10\)"),
        ("SPREAD", "", WITH_GPU, 4, [BIG, GPU], r"4 bundles of 1 CPU and 1 GPU, .*4 CPUs, 2 GPUs \(room for 2\)"),
        ("STRICT_SPREAD", "", CPU, 3, [BIG, SMALL], r"each on a node of its own, .*\(room for 2\)"),
        ("PACK", "", WITH_GPU, 1, [RayNode(str(i), 1, 0) for i in range(9)], "has 9 nodes: .*; …"),
    ],
)
def test_too_little_room_is_named(
    strategy: str, host: str, bundle: Bundle, count: int, nodes: list[RayNode], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        check_room(strategy, host, bundle, count, nodes)
    check_room(strategy, host, bundle, count, [*nodes, *[RayNode("10.0.0.2", 64, 64)] * count])


def test_an_old_ray_is_refused() -> None:
    for version in ("2.53.0", "2.9.3", "1.13"):
        with pytest.raises(RuntimeError, match=rf"Ray {version} is too old: .*CVE-2026-27482.*ray>=2.54"):
            check_version(version)
    check_version("2.54.0")
    check_version("2.100")


def test_several_hosts_need_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("", "disabled"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        check_authentication({"10.0.0.1"})
        with pytest.raises(RuntimeError, match=f"2 hosts and RAY_AUTH_MODE='{mode}'.*ray get-auth-token --generate"):
            check_authentication({"10.0.0.1", "10.0.0.2"})
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(RuntimeError, match="RAY_AUTH_MODE"):
        check_authentication({"10.0.0.1", "10.0.0.2"})
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_authentication({"10.0.0.1", "10.0.0.2"})
