"""What one process is told of the network that it takes part in, and what is checked before it does."""

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppd_runtime.settings.layouts import CLIENT


@dataclass(frozen=True)
class Keys:
    """One process' CURVE keys, made for one run; 40 characters of Z85 each."""

    public: str
    secret: str = field(repr=False)
    peers: Mapping[int, str]
    """All public keys by address, with its own: who is not among them is refused."""


@dataclass(frozen=True)
class Network:
    """The network of one runtime, as one of its processes sees it."""

    transport: str = "auto"
    folder: str = ""
    """It holds the sockets between processes of one host."""
    interface: str = ""
    """An address of this host to bind at, for TCP with CURVE; empty: the folder."""
    keys: Keys | None = None
    """Needed with an interface: nothing leaves the host in plain text."""
    client: str = ""
    """Where the client can be reached, if the folder does not say it."""


def read_network(fields: Mapping[str, Any]) -> Network:
    """The network from its fields in JSON."""
    keys = fields["keys"]
    if keys is not None:
        keys = Keys(**keys | {"peers": {int(address): key for address, key in keys["peers"].items()}})
    return Network(**{**fields, "keys": keys})


def socket_path(folder: str, address: int) -> Path:
    """Where an address' socket is; raises ValueError for a folder that others than this user may enter."""
    try:
        status = Path(folder).lstat()
    except OSError as error:
        raise ValueError(f"folder of sockets {folder!r}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"folder of sockets {folder!r}: others may enter it; give one of your own with mode 0700")
    return Path(folder) / ("client" if address == CLIENT else f"worker-{address}")


def check_interface(interface: str) -> None:
    """Raise ValueError for what is not the address of one interface of this host."""
    refuse = f"bind_interface={interface!r}: "
    try:
        address = ipaddress.ip_address(interface)
    except ValueError as error:
        raise ValueError(f"{refuse}give an IP address of this host, such as 127.0.0.1") from error
    if address.is_unspecified or address.is_multicast or "%" in interface:
        raise ValueError(f"{refuse}give the address of one interface, as other hosts know it")
    try:
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((interface, 0))
    except OSError as error:
        raise ValueError(f"{refuse}not an address of this host ({error.strerror})") from error
