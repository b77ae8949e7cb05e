"""The server's log on standard error, as words or with a JSON object a line: requests, and whatever else is logged."""

import json
import logging
import sys

REQUEST = "request"
"""The attribute of a request's record that holds its fields."""
_REQUESTS = "ppd_runtime.server"


def log_to_stderr(as_json: bool) -> None:
    """Write requests, and all warnings of a program that has given its log no place of its own."""
    root, requests = logging.getLogger(), logging.getLogger(_REQUESTS)
    requests.setLevel(logging.INFO)
    if requests.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if as_json else logging.Formatter("%(message)s"))
    requests.addHandler(handler)
    requests.propagate = False
    if not root.handlers:
        root.addHandler(handler)


class JsonLine(logging.Formatter):
    """A record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Implements `logging.Formatter.format`."""
        told = getattr(record, REQUEST, None) or {"message": record.getMessage()}
        if record.exc_info:
            told = {**told, "traceback": self.formatException(record.exc_info)}
        return json.dumps({"time": round(record.created, 3), "level": record.levelname.lower(), **told})
