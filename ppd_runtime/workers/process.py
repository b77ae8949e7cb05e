"""One worker in a process of its own, from its specification as a line of text.

A plain process reads the line from standard input. Once its layers are loaded, it writes a line of JSON to standard
output: its location and bits, or its error. It serves once it is told that the others have the same bits. Each warning
is a line there too. When standard input is closed, because the process at its other end has ended, the worker ends too.
"""

import contextlib
import json
import logging
import os
import select
import sys
import threading
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from ppd_runtime.host import available_cores
from ppd_runtime.models.checkpoint.description import read_info
from ppd_runtime.models.compiling import compiled_elsewhere, read_code
from ppd_runtime.models.named_drafter import read_drafter
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.settings.layouts import CLIENT, Layout, PaperLayout, StagedLayout
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.network import Network, read_network
from ppd_runtime.transport.sockets import open_endpoint, spins
from ppd_runtime.workers.bits import Bits
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker

WELCOME = b"w"
"""The byte on standard input that tells a plain process to serve."""
WARNING = b"!"
"""What a line on standard output begins with that is a warning."""
_MOST_PRIORITY = 40
_MOST_TOLD = 1000  # texts of warnings that are remembered


def start_order(spec: WorkerSpec, network: Network) -> str:
    """A worker's specification and network as a line of JSON, with the process' secret key if it has one."""
    return json.dumps({"spec": asdict(spec), "network": asdict(network)}, default=_as_json)


def read_order(order: str) -> tuple[WorkerSpec, Network]:
    """The specification and the network in a line that `start_order` wrote."""
    told = json.loads(order)
    return read_spec(told["spec"]), read_network(told["network"])


def read_spec(fields: dict[str, Any]) -> WorkerSpec:
    """The specification from its JSON fields, as `start_order` writes them."""
    return WorkerSpec(
        **fields
        | {
            "info": read_info(fields["info"]),
            "dtype": getattr(torch, fields["dtype"]),
            "exit_head": _read_head(fields["exit_head"]),
            "drafter": fields["drafter"] and read_drafter(fields["drafter"]),
            "cores": tuple(fields["cores"]),
            "layout": _read_layout(fields["layout"]),
            "guess_tokens": tuple(fields["guess_tokens"]),
            "way_seconds": tuple(fields["way_seconds"]),
            "code": read_code(fields["code"]),
            "emulate": fields["emulate"] and EmulatedDevice(**fields["emulate"]),
        }
    )


def _as_json(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _read_layout(fields: dict[str, Any]) -> Layout:
    return StagedLayout(**fields | {"cuts": tuple(fields["cuts"])}) if "cuts" in fields else PaperLayout(**fields)


def _read_head(head: str | dict[str, Any]) -> str | HeadInfo | OracleHead:
    if isinstance(head, str):
        return head
    if "texts" in head:
        return OracleHead(**head | {"texts": tuple(map(tuple, head["texts"]))})
    return HeadInfo(**head | {"folder": Path(head["folder"])})


def open_worker(order: str, own_address: str = "", own_device: str = "", code: bytes = b"") -> tuple[Worker, Endpoint]:
    """The worker that `start_order` described, with its layers loaded, and its endpoint.

    If the order has keys but no interface, the interface is `own_address`, the address of this host. If it names no
    particular GPU, the GPU is `own_device`. `code` is a bundle that another worker has compiled.
    """
    spec, network = read_order(order)
    if network.keys and not network.interface:
        network = replace(network, interface=own_address)
    if spec.device == "cuda" and own_device:
        spec = replace(spec, device=own_device)
    if code:
        spec = replace(spec, code=compiled_elsewhere(code, spec.device, spec.code_kinds))
    _come_first(spec.rank)
    worker = Worker(spec)
    spinning = spins(bool(spec.cores), spec.device, spec.layout.num_processes, available_cores())
    endpoint = open_endpoint(network, spec.rank, spinning, spec.device)
    endpoint.introduce(CLIENT, network.client)
    return worker, endpoint


def _come_first(rank: int) -> None:
    """Run this worker's process before those of higher ranks, if the system has given them real-time priorities.

    If workers share cores, the one whose work is least likely to be used should wait. This is not for threads of one
    process, which wait for each other's locks.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_RR:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(max(1, _MOST_PRIORITY - rank)))


def ready_answer(worker: Worker, endpoint: Endpoint) -> str:
    """The location and bits of a worker that has loaded its layers, as a line of JSON."""
    return json.dumps({"location": endpoint.location, "bits": asdict(worker.bits())})


def read_answer(line: str | bytes) -> tuple[str, Bits]:
    """The location and bits in a worker's answer; raises RuntimeError with the error of a failed worker."""
    try:
        answer = json.loads(line)
        if "error" not in answer:
            return answer["location"], Bits(**answer["bits"])
        words = answer["error"]
    except (ValueError, TypeError, KeyError) as error:
        words = f"its answer cannot be read: {type(error).__name__}: {error}"
    raise RuntimeError(words)


def serve_from_standard_input() -> None:
    """Load the layers, answer, and serve from the welcome until a shutdown or the end of standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print, and that is no answer
    logging.getLogger().addHandler(_ToOwner(answers.fileno()))
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}"
    order = sys.stdin.readline()
    welcome = threading.Event()
    threading.Thread(target=_answer_parent, args=(answers, welcome), daemon=True).start()
    try:
        worker, endpoint = open_worker(order)
        answer = ready_answer(worker, endpoint)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise
    print(answer, file=answers, flush=True)
    welcome.wait()
    with contextlib.closing(endpoint):
        worker.serve(endpoint)


class _ToOwner(logging.Handler):
    """Writes each warning to the process that started this one, as a line in one piece; a text that comes again once.

    If that process has left so much unread that it would have to be waited for, the warning is dropped.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.WARNING)
        self._descriptor, self._told = descriptor, set[bytes]()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            words = " ".join(record.getMessage().split()).encode(errors="replace")
            if words not in self._told and select.select([], [self._descriptor], [], 0)[1]:
                if len(self._told) >= _MOST_TOLD:
                    self._told.clear()
                self._told.add(words)
                os.write(self._descriptor, WARNING + words[: select.PIPE_BUF - 2] + b"\n")
        except Exception:  # noqa: BLE001 (as in every handler: what logs goes on)
            self.handleError(record)


def _answer_parent(answers: TextIO, welcome: threading.Event) -> None:
    """Answer each line that asks whether this process runs; leave once standard input is closed."""
    while read := os.read(sys.stdin.fileno(), 1):
        if read == WELCOME:
            welcome.set()
        else:
            print(file=answers, flush=True)
    os._exit(1)
