"""What the tests with real processes and threads share: one fork server, and one Ray node for all that need no own."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import ray
import torch

from ppd_runtime.launch.fork_server import ForkServer, can_fork, open_fork_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes or threads."""
    for item in items:
        if "/processes/" in item.path.as_posix():
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Runtimes share a fork server while the environment stays; this variable names the test."""
    _forget_the_tests_name()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """As `pytest_fixture_setup`."""
    _forget_the_tests_name()


def _forget_the_tests_name() -> None:
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.fixture(scope="session", autouse=True)
def _first_fork_server(_test_cache: None) -> Iterator[None]:
    """It has imported PyTorch before the first runtime starts, and runs as long as the last."""
    with _open_server():
        yield


@pytest.fixture(scope="module", autouse=True)
def one_fork_server(_first_fork_server: None) -> Iterator[ForkServer | None]:
    """The module's: the first one, unless a library has changed what programs inherit, such as the import path."""
    with _open_server() as server:
        yield server


@contextlib.contextmanager
def _open_server() -> Iterator[ForkServer | None]:
    _forget_the_tests_name()  # no hook of this folder is asked where a fixture is the session's
    server = open_fork_server() if can_fork() else None
    try:
        yield server
    finally:
        if server:
            server.close()


@pytest.fixture(scope="session")
def ray_node() -> Iterator[None]:
    """A Ray node that outlives single runtimes: they use a Ray that is there, and leave it running.

    Where there is no GPU it says that it has two, which it hands out all the same.
    """
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=None if torch.cuda.is_available() else 2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
        _system_config={"worker_niceness": 0},
    )
    yield
    ray.shutdown()
