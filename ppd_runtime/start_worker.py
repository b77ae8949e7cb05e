"""Where a worker in a Python of its own begins: `python -m ppd_runtime.start_worker NAME`, or a Ray actor.

Nothing is imported before the worker is: the imports are most of its start.
"""

from ppd_runtime.imports import quick_imports


class Actor:
    """A worker as Ray runs it, made from the line that `start_order` gives, on the host with `own_address`."""

    def __init__(self, order: str, own_address: str) -> None:
        with quick_imports():
            from ppd_runtime.worker_process import open_worker

        self._worker, self._endpoint = open_worker(order, own_address)

    def ready(self) -> str:
        """Where the worker's peers reach it, once its layers are loaded."""
        return self._endpoint.location

    def serve(self) -> None:
        """Serve requests until told to shut down."""
        self._worker.serve(self._endpoint)
        self._endpoint.close()


def main() -> None:
    """A worker as a plain process."""
    with quick_imports():
        from ppd_runtime.worker_process import serve_from_standard_input

    serve_from_standard_input()


if __name__ == "__main__":
    main()
