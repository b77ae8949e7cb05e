"""A server as a process of its own, for tests that ask it as users do: `ppd serve`, or another program's."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PPD = ("ppd_runtime.cli.main", "serve")
DEADLINE_S = 300.0
PROMPT = "import os\n"


class Served:
    """A server that listens; what it says is in `log`."""

    def __init__(
        self, log: Path, *options: str, module: tuple[str, ...] = PPD, env: dict[str, str] | None = None
    ) -> None:
        self.log = log
        command = [sys.executable, "-m", *module, "--port", "0", *options]
        with log.open("w") as written:
            self.process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=env)
        self._wait(lambda: " at http" in log.read_text())
        url = log.read_text().rpartition(" at ")[2].split()[0]
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False)
        self.url = url

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)

    def complete(self, **settings: Any) -> dict[str, Any]:
        """One completion."""
        asked = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, **settings}
        return self.client.post("/v1/completions", json=asked).json()

    def stream(self, **settings: Any) -> list[dict[str, Any]]:
        """The pieces of one."""
        asked = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "stream": True, **settings}
        *events, done = self.client.post("/v1/completions", json=asked).text.strip().split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def wait_until(self, holds: Any) -> None:
        """Wait for something, while the server runs."""
        self._wait(holds)

    def _wait(self, holds: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
