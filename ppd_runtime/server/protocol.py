"""uvicorn's HTTP/1.1, and limits on what strangers do below requests: connections, headers, what is no HTTP."""

import asyncio
import resource
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ppd_runtime.server.errors import ApiError

_HEADERS_S = 30.0
"""A connection that is new, or has begun a request, has to send all of its headers in this time."""
_MOST_CONNECTIONS = 4096


class HttpProtocol(H11Protocol):
    """Refuses connections beyond what the process may open, slow headers, and what is no HTTP, with an error object."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Implements asyncio's `connection_made`."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            message = f"{len(self.connections)} connections, that is too many: come again later"
            self._refuse(ApiError(503, message, retry_after_s=5))
        else:
            self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Implements asyncio's `data_received`."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._have_headers()
        elif self._due is None:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implements asyncio's `connection_lost`."""
        self._have_headers()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP; uvicorn calls it."""
        self._refuse(ApiError(400, f"{msg.rstrip('.')}: send HTTP/1.1 as its standard has it"))

    def _unsupported_upgrade_warning(self) -> None:
        """Websockets are not supported: a request for one is answered as plain HTTP, without a warning."""

    def _await_headers(self) -> None:
        self._due = self.loop.call_later(_HEADERS_S, self._too_slow)

    def _have_headers(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _too_slow(self) -> None:
        if not self.conn.trailing_data[0]:  # nothing has come, as from a browser that connects ahead
            self.transport.close()
            return
        self._refuse(ApiError(408, f"the headers did not come within {_HEADERS_S:g} s: send them sooner"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless an answer has begun, and close."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def most_connections() -> int:
    """Connections at once: half of the files that this process may have open, so that its workers can be replaced."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(files // 2, _MOST_CONNECTIONS)
