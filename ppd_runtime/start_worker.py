"""Where a worker in a Python of its own begins: `python -m ppd_runtime.start_worker NAME`, or a Ray actor.

Nothing is imported before the worker is: the imports are most of its start.
"""

import logging
import socket

from ppd_runtime.imports import quick_imports


class Actor:
    """A worker as Ray runs it, made from the line that `start_order` gives, on the host with `own_address`.

    `own_device` is its GPU there, such as cuda:1, where Ray gave it one.
    """

    _name = "worker"
    """Until it is made, for Ray asks for it when that fails, too."""

    def __init__(self, order: str, own_address: str, own_device: str) -> None:
        with quick_imports():
            from ppd_runtime.supervision import name_of
            from ppd_runtime.worker_process import open_worker

        logging.basicConfig(format="%(levelname)s %(message)s")  # Ray can bring it to the driver
        logging.getLogger("ppd_runtime").setLevel(logging.INFO)
        self._worker, self._endpoint = open_worker(order, own_address, own_device)
        self._name = name_of(self._worker.spec.rank).removeprefix("the ")

    def __repr__(self) -> str:
        """What Ray puts before each line of its log, once it is made."""
        return self._name

    def ready(self) -> str:
        """Where the worker's peers reach it, once its layers are loaded."""
        return self._endpoint.location

    def serve(self) -> None:
        """Serve requests until told to shut down."""
        spec, dtype = self._worker.spec, str(self._worker.spec.dtype).removeprefix("torch.")
        layers, host = f"{spec.num_layers} of {spec.info.num_layers} layers", socket.gethostname()
        logging.getLogger(__name__).info("serves with %s in %s on %s of %s", layers, dtype, spec.device, host)
        self._worker.serve(self._endpoint)
        self._endpoint.close()


def main() -> None:
    """A worker as a plain process."""
    with quick_imports():
        from ppd_runtime.worker_process import serve_from_standard_input

    serve_from_standard_input()


if __name__ == "__main__":
    main()
