"""Entry point of a worker: a Python process, whose argument is its name, or a Ray actor.

Nothing is imported before the worker: imports are most of its start.
"""

import logging
import socket
import sys
import threading

from ppd_runtime.imports import quick_imports


class Actor:
    """A Ray actor with a worker, made from the line of `start_order`, on the host with `own_address`.

    `own_device` is its GPU there, such as cuda:1, if Ray gave it one; for `code` see `open_worker`. `serve` loads the
    layers, and meanwhile the actor answers other calls.
    """

    _name = "worker"
    """A default, as Ray asks for it even if creation fails."""

    def __init__(self, name: str, order: str, own_address: str, own_device: str, code: bytes = b"") -> None:
        self._name, self._told = name, (order, own_address, own_device, code)
        self._answer: str | None = None
        self._loaded, self._welcome = threading.Event(), threading.Event()

    def __repr__(self) -> str:
        """The name that Ray puts before each line of this actor's log."""
        return self._name

    def answer(self, patience_s: float) -> str | None:
        """`ready_answer`'s line; None if the layers are not loaded within `patience_s`."""
        self._loaded.wait(patience_s)
        return self._answer

    def welcome(self) -> None:
        """Let it serve: its bits match the others."""
        self._welcome.set()

    def serve(self) -> None:
        """Load the layers, and serve requests, once welcome, until told to shut down."""
        with quick_imports():
            from ppd_runtime.workers.process import open_worker, ready_answer

        logging.basicConfig(format="%(levelname)s %(message)s")  # Ray can bring it to the driver
        logging.getLogger("ppd_runtime").setLevel(logging.INFO)
        worker, endpoint = open_worker(*self._told)
        self._answer = ready_answer(worker, endpoint)
        self._loaded.set()
        self._welcome.wait()
        spec, dtype = worker.spec, str(worker.spec.dtype).removeprefix("torch.")
        held, host = spec.num_layers - spec.first_layer, socket.gethostname()
        layers = f"{held} of {spec.info.num_layers} layers"
        logging.getLogger(__name__).info("serves with %s in %s on %s of %s", layers, dtype, spec.device, host)
        worker.serve(endpoint)
        endpoint.close()


def main() -> None:
    """A worker as a plain process, or the fork server that workers come from."""
    with quick_imports():
        from ppd_runtime.workers import fork_server
        from ppd_runtime.workers.process import serve_from_standard_input

    if sys.argv[1:] == [fork_server.NAME]:
        fork_server.fork_workers()
    else:
        fork_server.show_name(sys.argv[1])
    serve_from_standard_input()
