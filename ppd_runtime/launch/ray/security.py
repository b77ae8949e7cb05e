"""What a Ray cluster must offer before anything of ours runs on it."""

import os

from packaging.version import Version

OLDEST_RAY = "2.54"
_GUIDE = "https://docs.ray.io/en/latest/ray-security/token-auth.html"


def check_version(version: str) -> None:
    """Raise RuntimeError for a Ray with known holes."""
    if Version(version) < Version(OLDEST_RAY):
        raise RuntimeError(
            f"Ray {version} is too old: before {OLDEST_RAY} its dashboard lets any web page delete jobs "
            f"(CVE-2026-27482), install ray>={OLDEST_RAY} on every node"
        )


def no_cluster(address: str) -> str:
    """What to say if Ray finds no cluster; Ray says no more if the cluster asks for a token and gets none."""
    mode, place = os.environ.get("RAY_AUTH_MODE", ""), "on this host" if address == "auto" else f"at {address}"
    return (
        f"no Ray cluster takes this program in {place}: start one with `ray start --head`, or, where one runs "
        f"that asks for a token (RAY_AUTH_MODE={mode!r} here), set RAY_AUTH_MODE=token and see that the token is in "
        "~/.ray/auth_token or RAY_AUTH_TOKEN_PATH"
    )


def check_authentication(hosts: set[str]) -> None:
    """Raise RuntimeError if several hosts take part and Ray asks for no token."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if len(hosts) > 1 and mode.lower() != "token":
        raise RuntimeError(
            f"the cluster has {len(hosts)} hosts and RAY_AUTH_MODE={mode!r}: whoever reaches a port of Ray runs code "
            "on all of them; start every node and this command with RAY_AUTH_MODE=token and the same token "
            f"(`ray get-auth-token --generate`, RAY_AUTH_TOKEN_PATH), see {_GUIDE}"
        )
