"""Where `ppd` begins: Ctrl-C and SIGTERM are answered from here on, before anything is imported that takes its time."""

import sys

from ppd_runtime.cli.exit_codes import INTERRUPTED, STOPPED
from ppd_runtime.cli.sigterm import end_by_sigterm


def main() -> None:
    """Run a command; Ctrl-C ends it with one line and exit code 130, SIGTERM with 143."""
    end_by_sigterm()
    try:
        from ppd_runtime.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
