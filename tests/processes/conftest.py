"""What the tests with real processes and threads share: prompts, and one Ray node for all that need no own."""

from collections.abc import Iterator

import pytest
import ray

_TOGETHER = {"test_cluster_job", "test_damaged_code", "test_embedding", "test_hosts", "test_runtime"}
"""Files whose tests share what takes long to start, or cannot be there twice."""


@pytest.hookimpl(tryfirst=True)  # before groups are formed
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes or threads."""
    for item in items:
        if "/processes/" in item.path.as_posix():
            item.add_marker(pytest.mark.processes)
            if item.path.stem in _TOGETHER:
                item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def ray_node() -> Iterator[None]:
    """A Ray node that outlives single runtimes: they use a Ray that is there, and leave it running."""
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        _system_config={"worker_niceness": 0},
    )
    yield
    ray.shutdown()
