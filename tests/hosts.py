"""Several hosts on one machine: network namespaces, each with an address of its own, and a link with delay and loss.

Each host's network card is a TAP device; a relay in this process hands the Ethernet frames on. Delay and loss are the
kernel's (`tc netem`) where it has them, else the relay's. Needs root and /dev/net/tun.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Sequence

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_MTU = 1500
_FRAME = 65536


def why_not() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if os.geteuid():
        return "needs root, for network namespaces"
    if not shutil.which("ip"):
        return "needs the program ip (iproute2)"
    if not os.access("/dev/net/tun", os.W_OK):
        return "needs /dev/net/tun"
    trial = f"ppd-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", trial], capture_output=True)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


class Hosts:
    """Hosts `ppd1`, `ppd2`, …, at 10.213.`net`.1 and so on, until the `with` block ends.

    Args:
        count: how many.
        delay_s: from one host to another, one way.
        loss: share of the frames that get lost.
        net: a number of 0 to 255, for more than one such network at a time.
    """

    def __init__(self, count: int, delay_s: float = 0.0, loss: float = 0.0, net: int = 7) -> None:
        self.names = [f"ppd{net}x{number}" for number in range(1, count + 1)]
        self.addresses = [f"10.213.{net}.{number}" for number in range(1, count + 1)]
        self._link = (delay_s, loss)
        self._cards: list[int] = []
        self._relay: _Relay | None = None

    def __enter__(self) -> "Hosts":
        try:
            for name, address in zip(self.names, self.addresses, strict=True):
                _run("ip", "netns", "add", name)
                self._cards.append(_tap(name))
                _run("ip", "link", "set", name, "netns", name)
                self.run(name, "ip", "addr", "add", f"{address}/24", "dev", name)
                self.run(name, "ip", "link", "set", name, "up", "mtu", str(_MTU))
                self.run(name, "ip", "link", "set", "lo", "up")
            self._relay = _Relay(self._cards)
            self._relay.start()
            self.set_link(*self._link)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay:
            self._relay.stop()
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), 9)
        for card in self._cards:
            os.close(card)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def command(self, name: str, *words: str) -> list[str]:
        """A command as it is run on a host."""
        return ["ip", "netns", "exec", name, *words]

    def run(self, name: str, *words: str, **settings) -> subprocess.CompletedProcess[str]:
        """Run a command on a host; raises RuntimeError with its words where it fails."""
        return _run(*self.command(name, *words), **settings)

    def set_link(self, delay_s: float, loss: float = 0.0) -> None:
        """From now on frames from one host to another take so long, and so large a share of them gets lost."""
        by_kernel = min([self._netem(name, delay_s, loss) for name in self.names])  # every host has to be asked
        if self._relay:
            self._relay.delay_s, self._relay.loss = (0.0, 0.0) if by_kernel else (delay_s, loss)

    def _netem(self, name: str, delay_s: float, loss: float) -> bool:
        """Have the kernel delay and lose what a host sends; whether it can."""
        how = ["delay", f"{delay_s * 1000:g}ms", "loss", f"{loss * 100:g}%"]
        words = self.command(name, "tc", "qdisc", "replace", "dev", name, "root", "netem", *how)
        return shutil.which("tc") is not None and subprocess.run(words, capture_output=True).returncode == 0


class _Relay:
    """Hands each frame to every other card after a while, or loses it."""

    def __init__(self, cards: Sequence[int]) -> None:
        self._cards = list(cards)
        self.delay_s = self.loss = 0.0
        self._random = random.Random(0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hand_on, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _hand_on(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._over.is_set():
            patience = max(0.0, min(0.1, waiting[0][0] - time.perf_counter())) if waiting else 0.1
            ready, _, _ = select.select(self._cards, [], [], patience)
            for card in ready:
                frame = os.read(card, _FRAME)
                if self._random.random() >= self.loss:
                    due = time.perf_counter() + self.delay_s
                    for other in self._receivers(card, frame):
                        heapq.heappush(waiting, (due, next(numbers), other, frame))
            while waiting and waiting[0][0] <= time.perf_counter():
                _, _, card, frame = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # a card that is down
                    os.write(card, frame)

    def _receivers(self, sender: int, frame: bytes) -> list[int]:
        return [card for card in self._cards if card != sender]


def _tap(name: str) -> int:
    """A new TAP device; its file."""
    card = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return card


def _run(*words: str, **settings) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, **settings)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
    return done
