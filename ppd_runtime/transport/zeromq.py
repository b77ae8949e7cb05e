"""Messages over ZeroMQ PUSH and PULL sockets: over ipc on one host, over TCP with CURVE between hosts.

Between hosts every connection is encrypted, and both ends are authenticated: the connecting end knows the public key of
its peer, and the accepting end looks the other's key up in its list. No other process gets a message through.
"""

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ppd_runtime.pipeline.messages import Entries, Message
from ppd_runtime.pipeline.tensors import Frame
from ppd_runtime.pipeline.wire import encode, received
from ppd_runtime.transport.network import Keys, Network, check_interface, socket_path

logger = logging.getLogger(__name__)
_MOST_WAITING = 2000  # messages to a peer that does not take them, before newer ones are dropped …
_MOST_ENTRIES_WAITING = 64  # … and key/value entries, which are larger and have a connection of their own
_LINGER_MS = 500
_MOST_FRAME_BYTES = 2**31
_DOMAIN = b"ppd"
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 5000
_HANDSHAKE_MS = 5000
_TELL_EVERY_S = 60.0
_GUARD_DEADLINE_S = 10.0
_REFUSALS = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL  # before keys are looked at


class ZmqEndpoint:
    """One process' place: a socket to receive at, and one to each peer it has written to.

    Key/value entries have a connection of their own, so that a hidden state never queues behind them. Not to be shared
    between threads.
    """

    def __init__(self, network: Network, address: int) -> None:
        self._network, self._address = network, address
        self._path: Path | None = None
        if network.interface or network.keys:
            _check_keys(network.keys, address)
            check_interface(network.interface)
        else:
            self._path = socket_path(network.folder, address)
        self._context = zmq.Context()
        self._guard: _Guard | None = None
        self._inbox = self._context.socket(zmq.PULL)
        self._locations: dict[int, str] = {}
        self._peers: dict[tuple[int, bool], zmq.Socket[bytes]] = {}
        self._last: tuple[Message, list[Frame]] | None = None
        try:
            self._bind()
        except BaseException:
            self.close()
            raise
        self.location = "" if self._path else bytes(self._inbox.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        """Where peers reach it, such as tcp://10.0.0.2:40123; empty if the folder says it."""

    def _bind(self) -> None:
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MOST_FRAME_BYTES)
        if keys := self._network.keys:
            self._guard = _Guard(self._context, self._inbox, keys)
            _secure(self._inbox, keys)
            self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
            self._inbox.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            self._inbox.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the guard everybody is refused
        is_v6 = ":" in self._network.interface
        self._inbox.setsockopt(zmq.IPV6, is_v6)
        host = f"[{self._network.interface}]" if is_v6 else self._network.interface
        self._inbox.bind(f"ipc://{self._path}" if self._path else f"tcp://{host}:*")

    def introduce(self, address: int, location: str) -> None:
        """A peer is now there; what waited for its last place is dropped."""
        self._locations[address] = location
        for bulk in (False, True):
            if old := self._peers.pop((address, bulk), None):
                old.close(linger=0)

    def send(self, address: int, message: Message) -> None:
        """Hand the message to ZeroMQ; the same message to the next address is not encoded again."""
        if self._last is None or self._last[0] is not message:
            self._last = (message, encode(message))
        place = (address, isinstance(message, Entries))
        peer = self._peers.get(place) or self._connect(*place)
        try:
            peer.send_multipart(self._last[1], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("peer %d takes no messages: dropped a %s", address, type(message).__name__)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or None after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self._has_message() and (timeout == 0 or not self._wait(deadline)):
                return None
            try:
                message = received(self._inbox.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                continue
            if message is not None:
                return message

    def _has_message(self) -> bool:
        return bool(int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN)  # far cheaper than a poll or a vain receive

    def _wait(self, deadline: float | None) -> bool:
        left_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
        return bool(self._inbox.poll(left_ms))

    def close(self) -> None:
        """Close the sockets and remove the inbox' file; what was sent has half a second to leave."""
        if self._guard and not self._inbox.closed:
            self._guard.stop()
        self._context.destroy(linger=_LINGER_MS)
        if self._path:
            self._path.unlink(missing_ok=True)

    def _connect(self, address: int, bulk: bool) -> "zmq.Socket[bytes]":
        """A socket to a peer; for one not introduced yet it leads nowhere, and takes nothing."""
        peer = self._context.socket(zmq.PUSH)
        peer.setsockopt(zmq.SNDHWM, _MOST_ENTRIES_WAITING if bulk else _MOST_WAITING)
        if self._path:
            peer.connect(f"ipc://{socket_path(self._network.folder, address)}")
        elif (keys := self._network.keys) and address in keys.peers and (location := self._locations.get(address)):
            _secure(peer, keys)
            peer.setsockopt(zmq.IPV6, "[" in location)
            peer.setsockopt(zmq.CURVE_SERVERKEY, keys.peers[address].encode())
            peer.connect(location)
        self._peers[address, bulk] = peer
        return peer


def make_keys(addresses: Sequence[int]) -> dict[int, Keys]:
    """New keys for everybody, by address."""
    pairs = {address: [key.decode() for key in zmq.curve_keypair()] for address in addresses}
    peers = {address: public for address, (public, _) in pairs.items()}
    return {address: Keys(public, secret, peers) for address, (public, secret) in pairs.items()}


def _check_keys(keys: Keys | None, address: int) -> None:
    """Raise ValueError for keys that do not tell members from strangers."""
    if keys is None:
        raise ValueError("an interface to bind at, but no keys: nothing leaves the host in plain text")
    for name, key in {"secret": keys.secret, **{f"public {peer}": key for peer, key in keys.peers.items()}}.items():
        if not _is_key(key):
            fault = "no CURVE key, which has 40 characters of Z85" if key else "empty"
            raise ValueError(f"the {name} key of process {address} is {fault}")
    if not keys.public == keys.peers.get(address) == zmq.curve_public(keys.secret.encode()).decode():
        raise ValueError(f"the secret key of process {address} does not belong to its public key")


def _is_key(key: object) -> bool:
    try:
        return isinstance(key, str) and len(key) == 40 and len(z85.decode(key)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _secure(sock: "zmq.Socket[bytes]", keys: Keys) -> None:
    """Set this process' keys; dead hosts are noticed, and silent connections are closed."""
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)


class _Guard:
    """Admits peers with a listed public key, in its own thread, and logs now and then who was refused."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", inbox: "zmq.Socket[bytes]", keys: Keys) -> None:
        self._inbox, self._authenticator = inbox, _Authenticator(context, keys, self.note)
        self._num_refused, self._tell_at = 0, 0.0
        events = f"inproc://refused-{id(self)}"
        inbox.monitor(events, _REFUSALS | zmq.Event.MONITOR_STOPPED)
        self._monitor = zmq.asyncio.Socket(context, zmq.PAIR)
        self._monitor.connect(events)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), name="ppd-guard", daemon=True)
        self._thread.start()
        if not self._ready.wait(_GUARD_DEADLINE_S):
            raise RuntimeError("the thread that checks keys did not start")

    def note(self, who: str) -> None:
        """Count a refused peer, and log it unless one was logged a moment ago."""
        self._num_refused += 1
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_EVERY_S
            logger.warning("refused %s (%d refused so far)", who, self._num_refused)

    def stop(self) -> None:
        """End the thread; no connection is accepted any more."""
        self._inbox.disable_monitor()
        self._thread.join()

    async def _watch(self) -> None:
        self._authenticator.start()
        self._ready.set()
        while (await recv_monitor_message(self._monitor))["event"] != zmq.Event.MONITOR_STOPPED:
            self.note("somebody who does not know this process' key")
        self._authenticator.stop()
        self._monitor.close(linger=0)


class _Authenticator(AsyncioAuthenticator):
    """pyzmq's authenticator with a list of keys; peers that it refuses are noted with their address."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys, note: Callable[[str], None]) -> None:
        super().__init__(context)
        self._listed, self._tell = frozenset(key.encode() for key in keys.peers.values()), note
        self._asking = ""
        self.configure_curve_callback(_DOMAIN.decode(), self)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer ZeroMQ's question about somebody at the address in its fourth frame."""
        self._asking = b"".join(msg[3:4]).decode(errors="replace")
        await super().handle_zap_message(msg)

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether the owner of a public key may come in."""
        if key not in self._listed:
            self._tell(f"{self._asking}, whose key is not of this run")
        return key in self._listed
