"""What "auto" comes to, where a Ray to join is, and how runtimes share a host's cores."""

import os
import socket
import subprocess
import sys

import pytest

from ppd_runtime.host import available_cores
from ppd_runtime.launch.choice import address_to_join, check_ray_address, choose_launcher
from ppd_runtime.launch.cpu_affinity import CoreShare, assign_cores
from ppd_runtime.launch.ray.room import Bundle, RayNode, cpus_beside_others
from ppd_runtime.settings.config import RuntimeConfig


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd_runtime.launch.choice.ray_is_initialized", lambda: False)  # other tests may be connected


@pytest.mark.parametrize(
    ("settings", "environment", "launcher"),
    [
        ({}, {}, "processes"),
        ({}, {"RAY_ADDRESS": ""}, "processes"),
        ({}, {"RAY_ADDRESS": "local"}, "processes"),
        ({}, {"RAY_ADDRESS": "host:6379"}, "ray"),
        ({}, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, "ray"),
        ({}, {"RAY_JOB_ID": "01000000"}, "ray"),
        ({"ray_address": "host:6379"}, {}, "ray"),
        ({"ray_address": "auto"}, {}, "ray"),
        ({"ray_address": "local"}, {}, "ray"),
        ({"placement": "pack"}, {}, "ray"),
        ({"gpus_per_worker": 0.5}, {}, "ray"),
        ({"bind_interface": "10.0.0.5"}, {}, "ray"),
        ({"bind_interface": "127.0.0.1"}, {}, "processes"),
        ({"launcher": "processes"}, {"RAY_ADDRESS": "host:6379"}, "processes"),
        ({"launcher": "ray"}, {}, "ray"),
        ({"transport": "local"}, {"RAY_ADDRESS": "host:6379"}, "threads"),
        ({"transport": "local", "launcher": "ray"}, {}, "threads"),
    ],
)
def test_what_auto_comes_to(settings: dict[str, object], environment: dict[str, str], launcher: str) -> None:
    config = RuntimeConfig(**settings)
    assert choose_launcher(config, environment) == launcher
    assert config.launcher == settings.get("launcher", "auto"), "what was said is kept"


def test_a_connection_to_ray_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd_runtime.launch.choice.ray_is_initialized", lambda: True)
    assert choose_launcher(RuntimeConfig(), {}) == "ray"
    assert choose_launcher(RuntimeConfig(launcher="processes"), {}) == "processes"


def test_ray_is_not_imported_to_find_out() -> None:
    code = "import sys; from ppd_runtime.launch.choice import *; from ppd_runtime.settings.config import *; "
    code += "print(choose_launcher(RuntimeConfig(), {}), 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "processes False\n"


def test_where_a_ray_to_join_is() -> None:
    both = {"RAY_ADDRESS": "there:1"}
    assert address_to_join(RuntimeConfig(ray_address="here:2"), both) == ("ray_address", "here:2")
    assert address_to_join(RuntimeConfig(ray_address="local"), both) == ("ray_address", None)
    assert address_to_join(RuntimeConfig(), both) == ("RAY_ADDRESS", "there:1")
    assert address_to_join(RuntimeConfig(), {"RAY_JOB_ID": "1"})[1] == "auto"
    assert address_to_join(RuntimeConfig(), {})[1] is None


def test_a_wrong_address_is_named_with_where_it_was_given() -> None:
    with pytest.raises(ValueError, match=r"RAY_ADDRESS='somewhere': give host:port.*or auto or local"):
        check_ray_address("somewhere", "RAY_ADDRESS")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_ray_address(f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match=rf"ray_address='127.0.0.1:{port}': nothing answers"):
        check_ray_address(f"127.0.0.1:{port}")
    check_ray_address("auto")


def test_cores_that_others_have_are_given_last() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert assign_cores(1, 1, taken=cores[:1]) == [(cores[1] if len(cores) > 1 else cores[0],)]
    assert assign_cores(len(cores), 1, taken=cores[:1])[-1] == (cores[0],)


def test_a_second_runtime_says_with_whom_it_shares() -> None:
    count = available_cores()
    first = CoreShare(count, 1, pinned=True)
    assert first.crowding() is None
    first.begin()
    second = CoreShare(1, 1, pinned=False)
    words = f"1 workers, beside {count} of other runtimes, share {count} CPU cores"
    assert str(second.crowding()).startswith(words)
    assert second.cores == [()]
    first.release()
    assert second.crowding() is None


@pytest.mark.parametrize(
    ("count", "threads", "free", "cpus"),
    [(3, 1, 8, 1), (3, 2, 7, 2), (3, 1, 3, 0.66), (4, 1, 2, 0.25), (4, 1, 1, 0), (4, 1, 0, 0), (3, 1, 0.5, 0)],
)
def test_a_cpu_stays_for_the_programs_own_tasks(count: int, threads: int, free: float, cpus: float) -> None:
    assert cpus_beside_others(count, threads, free) == cpus
    assert count * cpus <= max(0, free - 1)


def test_a_worker_without_a_cpu_to_itself_finds_room_anywhere() -> None:
    assert Bundle(0, 0).places_on(RayNode("h", 1, 0)) >= 1000
    assert Bundle(0, 0).resources("h") == {"node:h": 0.001}
    assert str(Bundle(0, 0.5)) == "no CPU to itself and 0.5 GPU"
