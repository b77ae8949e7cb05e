"""A server from its first signal to its last: what is checked before workers start, and how it ends."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn

from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.chat import template_of
from ppd_runtime.server.app import application
from ppd_runtime.server.completions import Service
from ppd_runtime.server.gate import MOST_HEADER_BYTES
from ppd_runtime.server.log import log_to_stderr
from ppd_runtime.server.protocol import HttpProtocol
from ppd_runtime.server.settings import ServerSettings, share_port

logger = logging.getLogger("ppd_runtime.server")
_LOOK_EVERY_S = 1.0
_LAST_ANSWERS_S = 5
_IDLE_S = 75
"""How long a connection waits for its next request: longer than clients keep theirs, else they ask as it is closed."""


class Prepared:
    """A server's port, key and certificates, checked and held before any worker starts.

    Raises:
        ValueError: for a port in use, a key file that others may read, a template that is none, and such.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.key = settings.key()
        settings.check_tls()
        template_of(settings.chat_template)
        self.listener, self.settings = settings.bound()

    @property
    def url(self) -> str:
        """Where the server is."""
        scheme = "https" if self.settings.ssl_certfile else "http"
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{scheme}://{host}:{self.settings.port}"

    def close(self) -> None:
        """Give the port back."""
        self.listener.close()


def serve_prepared(generator: TextGenerator, prepared: Prepared, started: Callable[[], None] = lambda: None) -> None:
    """Answer requests until a signal ends it; `started` is called when it listens.

    The first SIGTERM or Ctrl-C lets what runs finish, a second one does not.

    Raises:
        RuntimeError: if the workers are lost for good.
    """
    log_to_stderr(prepared.settings.log_format == "json")
    server = Server(generator, prepared, started)
    server.run([prepared.listener])
    if server.failed:
        raise RuntimeError(server.failed)


class Server(uvicorn.Server):
    """Drains before it ends."""

    def __init__(self, generator: TextGenerator, prepared: Prepared, started: Callable[[], None]) -> None:
        settings = prepared.settings
        self.service, self._settings, self._on_started = Service(generator, settings), settings, started
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = ""
        """Why it had to end."""
        super().__init__(
            uvicorn.Config(
                application(self.service, settings, prepared.key),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
                h11_max_incomplete_event_size=2 * MOST_HEADER_BYTES,  # a little too much gets an error object
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and look after the workers from then on."""
        self.loop = asyncio.get_running_loop()
        for listener in sockets or ():
            share_port(listener, True)
        await super().startup(sockets)
        self._keep(self._look_after_workers())
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and leave no thread."""
        await super().shutdown(sockets)
        self.service.end_threads()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal refuses new requests and lets the others finish, a second one ends everything."""
        at_once = bool(self._captured_signals) or not self.started
        self._captured_signals.append(sig)
        if at_once:
            self.should_exit = self.force_exit = True
        else:
            self.loop.call_soon_threadsafe(lambda: self._keep(self.drain()))

    async def drain(self) -> None:
        """Refuse new requests, give the others their time, and end."""
        admission, patience_s = self.service.admission, self._settings.shutdown_timeout_s
        logger.info("shutting down: %d choices have %.0f s", admission.drain(), patience_s)
        if late := await admission.empty(patience_s):
            logger.warning("%d choices did not finish in time", late)
            self.service.generator.cancel()
            await admission.empty(_LAST_ANSWERS_S)
        self.should_exit = True

    async def _look_after_workers(self) -> None:
        admission, generator = self.service.admission, self.service.generator
        while not self.should_exit:
            admission.unwell = await asyncio.to_thread(generator.unwell)
            if admission.unwell == ["the runtime"]:
                self.failed, self.should_exit = "the workers are lost, and were replaced too often", True
            await asyncio.sleep(_LOOK_EVERY_S)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
