"""Where `ppd` begins: Ctrl-C and SIGTERM are answered from here on, before anything is imported that takes its time."""

import os
import sys
from pathlib import Path

from ppd_runtime.cli.exit_codes import INTERRUPTED, STOPPED
from ppd_runtime.cli.sigterm import end_by_sigterm


def open_closed_streams() -> None:
    """Put the null device in the place of standard streams that the caller closed, which Python has as None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)


def main() -> None:
    """Run a command; Ctrl-C ends it with one line and exit code 130, SIGTERM with 143."""
    end_by_sigterm()
    open_closed_streams()
    try:
        from ppd_runtime.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
