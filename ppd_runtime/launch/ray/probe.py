"""Asks a cluster whether it accepts this program, from a child Python; its argument is host:port or "auto".

`ray.init` asks for minutes, writes to stderr each time, and may end the whole program.
"""

import sys


def main() -> None:
    """End with exit code 0 if it does."""
    try:
        from ray._private.services import canonicalize_bootstrap_address_or_die as find
        from ray._private.worker import maybe_enable_token_auth_if_token_available as look_for_token
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its parts in C++ have no types
    except ImportError:  # another Ray has other names: then it is not asked
        return
    address = sys.argv[1]
    if address == "auto":
        look_for_token(warn_if_disabled=False)
    GcsClient(address=find(address))
