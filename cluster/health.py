"""Whether this host's server is well, for probes: `python -m cluster.health`, with `--ready` whether it takes requests.

The exit code is 0 where it is, or where nothing listens: a container may hold a batch, or a server that has not begun.
It is 1 where a server listens and is not well, or does not answer. PPD_SERVER_URL is where the server is, by default
http://127.0.0.1:8000.
"""

import os
import sys
import urllib.error
import urllib.request

_URL = "http://127.0.0.1:8000"
_ANSWER_S = 5.0


def is_well(url: str, path: str = "/health") -> bool:
    """Whether the server at a URL answers 200, or nothing listens there."""
    asking = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with asking.open(url + path, timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False
    except OSError as error:
        return isinstance(getattr(error, "reason", error), ConnectionRefusedError)


if __name__ == "__main__":
    asked = "/ready" if "--ready" in sys.argv[1:] else "/health"
    sys.exit(0 if is_well(os.environ.get("PPD_SERVER_URL", _URL), asked) else 1)
