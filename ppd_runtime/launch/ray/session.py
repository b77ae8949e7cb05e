"""This program's only connection to Ray, which its runtimes share.

The connection is made in a thread that lasts as long as it. Ray asks the kernel to kill a node's processes with their
parent (PR_SET_PDEATHSIG, in `ray._private.utils.set_kill_on_parent_death_linux`), and to the kernel the parent is the
thread that started them: a node that a request's thread had started would die with that thread.
"""

import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

import ray
from ray.job_config import JobConfig

from ppd_runtime.host import available_cores
from ppd_runtime.launch.child_python import PACKAGE, child_command, child_environment, folders_here, kept_path
from ppd_runtime.launch.ray import probe
from ppd_runtime.launch.ray.security import check_version, no_cluster
from ppd_runtime.launch.socket_folder import SocketFolder
from ppd_runtime.launch.supervisor import Progress

_LONGEST_NAME = 69  # Ray's sockets, below the folder that it is given
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing of ours goes through it
_BEGIN_DEADLINE_S = 120.0
_PROBE_DEADLINE_S = 15.0
_END_DEADLINE_S = 30.0


class Session:
    """A connection that runtimes of this program made, to a node of our own or to a running cluster."""

    def __init__(self, address: str | None, num_cpus: int, log_to_driver: bool) -> None:
        self.own_node, self.members = address is None, 0
        self._location: Future[str] = Future()
        self._over = threading.Event()
        arguments = (address, num_cpus, log_to_driver)
        self._thread = threading.Thread(target=self._live, args=arguments, name="ppd-ray", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is there; raises what Ray does, or TimeoutError."""
        try:
            self._location.result(_BEGIN_DEADLINE_S)
        except NotInTime:
            raise TimeoutError(f"Ray did not start, or answer, within {_BEGIN_DEADLINE_S:.0f} s") from None

    def is_there(self) -> bool:
        """Whether this program is connected to this very Ray still."""
        return self._location.done() and not self._location.exception() and self._location.result() == location()

    def end(self) -> None:
        """Disconnect, and stop the node if it is ours."""
        self._over.set()
        self._thread.join(_END_DEADLINE_S)

    def _live(self, address: str | None, num_cpus: int, log_to_driver: bool) -> None:
        folder = None
        try:
            folder = SocketFolder(_LONGEST_NAME) if address is None else None
            with _sigterm_kept():
                _connect(address, num_cpus, folder.path if folder else "", log_to_driver)
            self._location.set_result(location())
        except Exception as error:  # noqa: BLE001 (the waiting thread is told)
            self._location.set_exception(error)
        self._over.wait()
        if self.is_there():
            with _sigterm_kept():
                ray.shutdown()
        if folder:
            folder.remove()


class Membership:
    """A runtime's share in this program's connection to Ray, from `join`."""

    def __init__(self, session: Session | None) -> None:
        self._session, self._location, self._left = session, location(), False

    @property
    def own_node(self) -> bool:
        """Whether it is a node of our own, for runtimes of this program."""
        return self._session is not None and self._session.own_node

    @property
    def of_the_program(self) -> bool:
        """Whether the program itself has started this Ray, with `ray.init`, for more than us."""
        with contextlib.suppress(AttributeError):
            return self._session is None and bool(ray._private.worker._global_node.is_head())
        return False

    def is_there(self) -> bool:
        """Whether this program is connected to the same Ray still. Asking another would start it."""
        return location() == self._location

    def check(self) -> None:
        """Raise RuntimeError if it is not."""
        if not self.is_there():
            raise RuntimeError(
                "this program has shut down the Ray that the runtime's workers were on (ray.shutdown): make a new "
                "runtime, or one with launcher='processes', which needs no Ray"
            )

    def leave(self) -> None:
        """Disconnect, if no other runtime needs what we connected to; a second call does nothing."""
        with _SHARED.lock:
            if self._session is None or self._left:
                return
            self._left = True
            self._session.members -= 1
            if not self._session.members:
                if _SHARED.session is self._session:
                    _SHARED.session = None
                self._session.end()


class _Shared:
    """What the runtimes of this program share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.session: Session | None = None


_SHARED = _Shared()


def join(address: str | None, num_cpus: int, progress: Progress, log_to_driver: bool = False) -> Membership:
    """Take part in the Ray that this program is connected to; if there is none, connect.

    Args:
        address: where to connect, host:port of a cluster or "auto" for the one that runs on this host; None: a node of
            our own.
        num_cpus: least CPUs of a node of our own.
        progress: is told what it waits for.
        log_to_driver: whether what workers print is printed here.

    Raises:
        RuntimeError: no cluster there accepts this program.
        TimeoutError: Ray did not start in time.
    """
    check_version(ray.__version__)
    with _SHARED.lock:
        if not ray.is_initialized():
            _SHARED.session = _begin(address, num_cpus, progress, log_to_driver)
        session = _SHARED.session
        if session is not None and not session.is_there():
            session = _SHARED.session = None  # the program has shut ours down, and has another
        if session is not None:
            session.members += 1
        return Membership(session)


def location() -> str:
    """host:port of the Ray that this program is connected to; empty if there is none."""
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


def check_same(address: str) -> None:
    """Raise ValueError if this program is connected to another Ray than `ray_address` names."""
    here, session = location(), _SHARED.session
    if address == "local":
        same = session is not None and session.own_node and session.is_there()
    else:
        same = address == "auto" or _resolved(address) == _resolved(here)
    if here and not same:
        raise ValueError(
            f"ray_address={address!r}: this program is connected to Ray at {here} already, and can be to one only; "
            "leave ray_address out to use that, or call ray.shutdown() before"
        )


def _resolved(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return (ray.util.get_node_ip_address() if host.startswith("127.") else host), port


def _begin(address: str | None, num_cpus: int, progress: Progress, log_to_driver: bool) -> Session:
    progress("starting Ray" if address is None else f"connecting to Ray at {address}")
    if address is not None:
        _probe(address)
    session = Session(address, num_cpus, log_to_driver)
    try:
        session.wait()
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        session.end()
        raise RuntimeError(no_cluster(address or "auto")) from error
    except BaseException:
        session.end()
        raise
    return session


def _probe(address: str) -> None:
    """Raise RuntimeError if a cluster does not accept this program, or something else answers there."""
    if "://" in address:
        return
    try:
        subprocess.run(
            child_command(probe.__name__, address),
            env=child_environment(),
            capture_output=True,
            timeout=_PROBE_DEADLINE_S,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise RuntimeError(no_cluster(address)) from error


def _connect(address: str | None, num_cpus: int, folder: str, log_to_driver: bool) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not log_to_driver:
        _silence_notices()
    common: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
    if "://" not in (address or ""):  # else the program that Ray starts for this one connects
        common["job_config"] = _job_config()
    if address is not None:
        ray.init(address=address, **common)
        return
    ray.init(
        address="local",
        num_cpus=max(available_cores(), num_cpus),  # as many start at once
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _system_config={"worker_niceness": 0},  # Ray's own choice, 15, starves a worker beside any other program
        _temp_dir=f"{folder}/ray",
        **common,
    )


def _job_config() -> JobConfig:
    """Keeps Ray's workers from importing from the current folder, or from that of this program's script.

    Only if this package is there, and nowhere else, their path has the folder that it is in.
    """
    config, package = JobConfig(), str(PACKAGE.parent)
    config._py_driver_sys_path = _Fixed([] if package in kept_path(sys.path, folders_here()) else [package])
    return config


class _Fixed(list[str]):
    """What Ray puts first on its workers' import path. By default it adds both folders."""

    def extend(self, _: Iterable[str]) -> None:
        """Leave it as it is."""


def _silence_notices() -> None:
    """Ray prints its notices of lost workers to stdout, among the user's text; `check` says the same in a line."""
    with contextlib.suppress(AttributeError):
        ray._private.worker.stdout_deduplicator.skip_re = re.compile("")


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Leave SIGTERM as the program has it.

    Ray's core has its own handler, which prints a C++ stack trace and aborts the program. Python can only set a handler
    in the main thread, and only a Python one: so the system is asked.
    """
    if sys.platform not in ("linux", "darwin"):
        yield
        return
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # a struct sigaction has some 150 bytes
    libc.sigaction(int(signal.SIGTERM), None, before)
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGTERM), before, None)
