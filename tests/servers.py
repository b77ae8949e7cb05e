"""A server on a socket of this process, over a generator whose tokens may wait for a test's permission."""

import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from ppd_runtime import OrdinaryDecoding, SamplingParams
from ppd_runtime.client.ending import Ending
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.steps import Step, Totals
from ppd_runtime.server.run import Prepared, Server
from ppd_runtime.server.settings import ServerSettings

DEADLINE_S = 60.0
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools> <tool_call>…</tool_call>\n"
    "{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{{ '<think>' if thinks }}{% endif %}"
)
"""A template that tells the model of tools, as Qwen's does."""


class Stepwise(OrdinaryDecoding):
    """Ordinary decoding that goes on behind each token once a permit is there; a request that is cancelled ends."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.permits = threading.Semaphore(0)

    def _steps(
        self, prompt_ids: list[int], params: SamplingParams, live: bool, ending: Ending
    ) -> Generator[Step | Totals, None, None]:
        for step in super()._steps(prompt_ids, params, live, ending):
            yield step
            while not self.permits.acquire(timeout=0.01):
                if ending.reason():
                    break

    @property
    def is_busy(self) -> bool:
        """Whether a request has its turn."""
        return bool(self.queue.running)

    def allow(self, tokens: int) -> None:
        """Let so many tokens follow."""
        self.permits.release(tokens)


@dataclass
class Running:
    """A server that listens."""

    server: Server
    url: str
    headers: dict[str, str]

    def client(self, **settings: object) -> httpx.Client:
        """A client of its own, for raw requests."""
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=DEADLINE_S, trust_env=False, **settings)

    def post(self, path: str, **body: object) -> httpx.Response:
        """One request."""
        with self.client() as client:
            return client.post(path, json=body)

    def counts(self) -> dict[str, float]:
        """What `/metrics` tells, by name; of several with other labels the sum."""
        found = Counter[str]()
        with self.client() as client:
            for line in client.get("/metrics").text.splitlines():
                if not line.startswith("#"):
                    found[line.partition("{")[0]] += float(line.rpartition(" ")[2])
        return dict(found)

    @property
    def taken(self) -> int:
        """Choices that run or wait."""
        return self.server.service.generator.queue.taken


@contextmanager
def running(generator: TextGenerator, key: str | None = None, **settings: object) -> Iterator[Running]:
    """Serve a generator on a free port of the loopback."""
    prepared = Prepared(ServerSettings(port=0, api_key=key, **settings))
    started = threading.Event()
    server = Server(generator, prepared, started.set)
    thread = threading.Thread(target=server.run, args=([prepared.listener],))
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        yield Running(server, prepared.url, {"authorization": f"Bearer {key}"} if key else {})
    finally:
        server.should_exit = server.force_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
