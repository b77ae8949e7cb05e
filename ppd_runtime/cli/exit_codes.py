"""What the command line's exit codes mean."""

FAILURE, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""The runtime failed; what was asked for cannot work; Ctrl-C; SIGTERM."""
STOPPED = "\nppd: stopped\n"
"""Ctrl-C's line."""
