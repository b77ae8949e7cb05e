"""Programs as process 1 of a container: what they have no handler for, nobody can send them."""

import subprocess

COMMAND = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Before a program's own words; the exit code is the program's."""


def why_not() -> str | None:
    """Why there can be none here; None where there can."""
    try:
        tried = subprocess.run([*COMMAND, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "needs the program unshare (util-linux)"
    return None if tried.returncode == 0 else f"no namespaces of processes here: {tried.stderr.strip()}"
