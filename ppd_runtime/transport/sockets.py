"""The sockets that a transport's name stands for, between processes of one host."""

from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.unix import UnixEndpoint
from ppd_runtime.transport.zeromq import ZmqEndpoint

_SPIN_S = 0.002


def open_endpoint(transport: str, folder: str, address: int, has_own_core: bool = False) -> Endpoint:
    """A process' place in the network of `folder`; "auto" is Unix sockets.

    A process with a core of its own looks for messages for a while before it sleeps: it disturbs nobody.
    """
    if transport == "zeromq":
        return ZmqEndpoint(folder, address)
    return UnixEndpoint(folder, address, _SPIN_S if has_own_core else 0.0)
