"""Bad requests drawn by chance, over real sockets: each is refused by its fault, and nothing is left of it."""

import asyncio
import os
import random
import time
from pathlib import Path

import bad_requests
import psutil
from seeds import SEED
from servers import DEADLINE_S, TEMPLATE, Running, running

from ppd_runtime import OrdinaryDecoding

_REQUESTS = int(os.environ.get("PPD_REQUESTS", "10")) * 20
"""10,000 in the night."""
_AT_ONCE = 8


def send_all(server: Running, number: int, seed: int) -> list[str]:
    """What was wrong with the answers."""
    generator = random.Random(seed)
    left = [bad_requests.draw(generator) for _ in range(number)]
    problems = []

    async def client() -> None:
        while left:
            if problem := await bad_requests.send(server.url, left.pop()):
                problems.append(problem)

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(_AT_ONCE)))

    asyncio.run(clients())
    return problems


def test_bad_requests_are_refused_and_leave_nothing(model_folder, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    with running(OrdinaryDecoding(model_folder("llama", num_layers=2)), chat_template=template) as server:
        send_all(server, 20, SEED + 1)
        before = psutil.Process().num_fds()
        assert send_all(server, _REQUESTS, SEED) == []
        deadline = time.monotonic() + DEADLINE_S
        while psutil.Process().num_fds() > before:  # the last connections are being closed
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert server.taken == 0
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
