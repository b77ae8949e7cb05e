"""What the tests with real processes and threads share: prompts, and one Ray node for all that need no own."""

from collections.abc import Iterator

import pytest
import ray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes or threads."""
    for item in items:
        if "/processes/" in item.path.as_posix():
            item.add_marker(pytest.mark.processes)


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
