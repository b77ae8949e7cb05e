"""What every request passes before and after the application: identity, key, size, log."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ppd_runtime.server.errors import GONE, ApiError
from ppd_runtime.server.log import REQUEST
from ppd_runtime.server.settings import ServerSettings

logger = logging.getLogger("ppd_runtime.server")
OPEN_PATHS = ("/", "/health", "/ready")
"""Answered without a key."""
_BODY_DEADLINE_S = 60.0
_MOST_HEADERS = 100
MOST_HEADER_BYTES = 2**16
_MOST_READ_AWAY = 8  # times a body's limit: a client that still sends would not see the answer
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_OWN_NAMES = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class Gate:
    """Wraps an application: refuses what has no key, is too large or no JSON, and logs what passes.

    The whole body is read here, so the application can only receive that the client went away. It gets HEAD as GET; the
    answer's body stays here.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, key: bytes | None, refused: Callable[[int], None]
    ) -> None:
        self._app, self._key, self._refused = app, key, refused
        self._most_bytes = settings.max_body_mib * 2**20
        self._only_own_names = key is None and settings.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        began, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            elif scope["method"] == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            try:
                self._check(scope, headers)
                body = await asyncio.wait_for(self._read(receive), _BODY_DEADLINE_S)
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body did not come within {_BODY_DEADLINE_S:.0f} s: send it sooner") from None
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, answer)
        else:
            if body is not None:
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": method}, _replayed(body, receive), answer)
        finally:
            if status >= 400 and status != GONE and scope["path"] not in OPEN_PATHS:
                self._refused(status)
            self._log(scope, status or GONE, time.monotonic() - began)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if len(scope["headers"]) > _MOST_HEADERS:
            raise ApiError(431, f"{len(scope['headers'])} headers: send at most {_MOST_HEADERS}")
        if (size := sum(len(name) + len(value) for name, value in scope["headers"])) > MOST_HEADER_BYTES:
            raise ApiError(431, f"headers of {size} bytes: send at most {MOST_HEADER_BYTES}")
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if self._only_own_names and not _OWN_NAMES.fullmatch(host):
            raise ApiError(421, f"Host {host!r:.200}: names another host, ask 127.0.0.1 or start the server with a key")
        if self._key is not None and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer":
                key = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
            if not hmac.compare_digest(key.strip(), self._key):
                message = "no valid API key: send the header Authorization: Bearer KEY"
                raise ApiError(401, message, code="invalid_api_key")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            message = f"content-type {kind.decode('latin-1')[:100] or 'missing'}: send application/json"
            raise ApiError(415, message)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client has gone. The rest of too large a body is read and dropped, within limits."""
        body, size, more = bytearray(), 0, True
        while more and size <= _MOST_READ_AWAY * self._most_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size <= self._most_bytes:
                body += part
        if size > self._most_bytes:
            most = f"{self._most_bytes // 2**20} MiB"
            raise ApiError(413, f"the body has more than {most}: send less, or start the server with more")
        return bytes(body)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        client = scope.get("client")
        fields: dict[str, Any] = {
            "request_id": scope["state"]["request_id"],
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
        }
        words = {**fields, "path": repr(fields["path"])}  # in one line, whatever it holds
        logger.info("%s", " ".join(f"{name}={value}" for name, value in words.items()), extra={REQUEST: fields})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, and then what else comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
