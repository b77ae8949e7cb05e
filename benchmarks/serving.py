"""`ppd serve` with several requests at once; with clients that leave, nonsense and killed workers where asked for.

    python -m benchmarks.serving --stages 2 --at-once 1,2,4,8,16
    python -m benchmarks.serving --at-once 12 --minutes 60 --kill-every-s 45 --bad-share 0.2 --leave-share 0.2

The server is a process of its own; the clients here are threads of this one. So many clients ask again as soon as
they have their answer, and every text is compared with the one that ordinary decoding gave before. "Over one" is over a
second server, ordinary decoding on one core, which is asked for one request at a time behind each load. Whatever is
wrong is listed below the table, and the exit code is 1 then.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from benchmarks.faults import Trouble, left_behind, serving
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, new_parser, positive, run, share, table_of, whole_numbers
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.settings.config import DTYPES
from ppd_runtime.tune.prompt_files import read_prompts

_START_S, _ANSWER_S, _SETTLE_S, _END_S = 300.0, 300.0, 60.0, 120.0
_TOLD_TO_END = 143  # exit code
_MOST_MORE = {"MB": 50.0, "open files": 3, "threads": 8}
"""What the server may hold at the end beyond what it held at the start."""
OUTCOMES = ("right", "wrong text", "lost", "refused", "client left", "bad, refused", "bad, taken")
"""Ordinary decoding's text, another, none, status 429 or 503, left by the client; nonsense with status 4xx or not."""
_WRONG = ("wrong text", "lost", "bad, taken")
BAD = (
    b"", b"null", b"[]", b'"text"', b"{", b'{"prompt": "a"}}', b"[" * 100_000, b"\xff\xfe{}", b"9" * 10_000,
    b'{"prompt": 5}', b'{"prompt": []}', b'{"prompt": [-1]}', b'{"prompt": [1000000000]}', b'{"prompt": [null]}',
    b'{"prompt": "a", "max_tokens": -2}', b'{"prompt": "a", "max_tokens": "5"}', b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": "hot"}', b'{"prompt": "a", "top_p": 1.01}', b'{"prompt": "a", "n": 1000000000}',
    b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "seed": 18446744073709551616}', b'{"prompt": "a", "x": {}}',
)  # fmt: skip
"""Bodies of completions that no server should take."""


class Known(NamedTuple):
    """A streamed completion or chat, and the text that it has to give."""

    body: dict[str, Any]
    text: str
    last: bytes = b"data: [DONE]"
    """What the stream ends with."""


class Load:
    """So many clients of a server, a thread each, and what came of their requests."""

    def __init__(self, url: str, texts: Sequence[Known], options: argparse.Namespace, **others: float) -> None:
        self._place, self._texts = urlsplit(url).netloc, texts
        self._options = argparse.Namespace(**{**vars(options), **others})
        self._number, self._tokens = itertools.count(), list[int]()  # threads add to lists without losing anything
        self.outcomes, self.tokens_per_second = list[str](), 0.0
        self.first_ms, self.gaps_ms, self.problems = list[float](), list[float](), list[str]()

    def run(self, at_once: int) -> "Load":
        """Have each client ask again and again until there were enough requests and minutes."""
        began = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(partial(self._client, began + 60 * self._options.minutes), range(at_once)))
        self.tokens_per_second = sum(self._tokens) / (time.monotonic() - began)
        return self

    def _client(self, until: float, client: int) -> None:
        chance = random.Random(f"{self._options.seed} {client}")
        while (number := next(self._number)) < self._options.requests or time.monotonic() < until:
            try:
                if chance.random() < self._options.bad_share:
                    self._send_bad(chance.choice(BAD))
                else:
                    leave = chance.randint(0, 8) if chance.random() < self._options.leave_share else None
                    self._ask(self._texts[number % len(self._texts)], leave)
            except (OSError, HTTPException, ValueError, LookupError) as error:
                self._note("lost", repr(error))

    @contextlib.contextmanager
    def _posted(self, body: bytes, path: str = "/v1/completions") -> Iterator[HTTPResponse]:
        connection = HTTPConnection(self._place, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"content-type": "application/json"})
            yield connection.getresponse()

    def _ask(self, known: Known, leave_after: int | None) -> None:
        arrivals, pieces, line, began = list[float](), list[str](), b"", time.perf_counter()
        path = "/v1/chat/completions" if "messages" in known.body else "/v1/completions"
        with self._posted(json.dumps(known.body).encode(), path) as answer:
            for line in filter(bytes.strip, answer):
                if line.startswith(b'data: {"') and (choices := json.loads(line[6:]).get("choices")):
                    piece = choices[0]["delta"].get("content") or None if "delta" in choices[0] else choices[0]["text"]
                    pieces.append(piece or "")
                    is_token = piece is not None and choices[0].get("finish_reason") is None
                    arrivals += [time.perf_counter()] * is_token
                if leave_after is not None and len(pieces) > leave_after:
                    break
        self._tokens.append(len(arrivals))
        if leave_after is not None or answer.status in (429, 503):
            self._note("refused" if leave_after is None else "client left")
        elif answer.status != 200 or not line.strip().endswith(known.last) or not arrivals:
            self._note("lost", f"status {answer.status}, {known.body}, {line[-300:]!r}")
        else:
            is_right = (text := "".join(pieces)) == known.text
            self._note("right" if is_right else "wrong text", f"{known.body}: {text!r}, it has to be {known.text!r}")
            self.first_ms.append(1e3 * (arrivals[0] - began))
            self.gaps_ms += [1e3 * (late - early) for early, late in itertools.pairwise(arrivals)]

    def _send_bad(self, body: bytes) -> None:
        with self._posted(body) as answer:
            told = answer.read()
        is_refused = 400 <= answer.status < 500 and b'"message"' in told
        self._note("bad, refused" if is_refused else "bad, taken", f"{body[:100]!r} got {told[:300]!r}")

    def _note(self, outcome: str, problem: str = "") -> None:
        self.outcomes.append(outcome)
        self.problems += [f"{outcome}: {problem[:1000]}"] * (outcome in _WRONG)


class Server(NamedTuple):
    """A server that listens."""

    url: str
    program: psutil.Process
    log: Path

    def held(self) -> tuple[int, int, int]:
        """What `_MOST_MORE` names; memory is the server's own."""
        memory = self.program.memory_info()
        return round((memory.rss - memory.shared) / 1e6), self.program.num_fds(), self.program.num_threads()


@contextlib.contextmanager
def server(arguments: Sequence[str], cores: set[int]) -> Iterator[Server]:
    """`ppd serve` at a free port and on these cores, until the block ends.

    Raises:
        ValueError: where it does not start, or does not end as it is told to.
    """
    command = [sys.executable, "-m", "ppd_runtime.cli.entry", "serve", "--port", "0", *arguments]
    with program(command, cores, _address_in) as found:
        yield found
    if (code := found.program.wait()) != _TOLD_TO_END:
        raise ValueError(f"the server ended with code {code}")


@contextlib.contextmanager
def program(command: Sequence[str], cores: set[int], address: Callable[[str], str | None]) -> Iterator[Server]:
    """A server on these cores, until the block ends; `address` gives its URL as soon as it listens, from its log.

    Raises:
        ValueError: where it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="ppd-serve-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as written:
            process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=written)
        process.cpu_affinity(sorted(cores))
        try:
            deadline = time.monotonic() + _START_S
            while (url := address(said := log.read_text(errors="replace"))) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ValueError(f"the server did not start: {said.strip()[-500:] or process.poll()}")
                time.sleep(0.05)
            yield Server(url, process, log)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
            process.wait(_END_S)


def _address_in(log: str) -> str | None:
    """Where `ppd serve` says that it listens."""
    found = re.search(r" at (http\S+)\n", log)
    return found and found[1]


def measure(options: argparse.Namespace) -> Figures:
    """Run each load; a row a load, and what is wrong."""
    cores = os.sched_getaffinity(0)
    with model_folder(options.model) as model, contextlib.ExitStack() as stack:
        texts = _texts(options, model)
        given = ["--model", model, "--dtype", options.dtype]
        staged = stack.enter_context(server([*given, f"--stages={options.stages}", "--max-restarts=1000000"], cores))
        one = stack.enter_context(server([*given, "--method=autoregressive"], {max(cores)}))
        rows = [_row(number, staged, one, texts, options) for number in options.at_once]
        family, log = staged.program.children(recursive=True), staged.log.read_text(errors="replace")
    wrong = [problem for row in rows for problem in row.pop("problems")]
    counts = {"tracebacks": log.count("Traceback"), "processes left": left_behind(family)}
    wrong += [f"{count} {what}" for what, count in counts.items() if count]
    return {"model": options.model, "stages": options.stages, "rows": rows, "wrong": wrong}


def _texts(options: argparse.Namespace, model: str) -> list[Known]:
    sampled = {"temperature": options.temperature, "seed": options.seed} if options.temperature else {"temperature": 0}
    shared, found = {"ignore_eos": True, **sampled}, []
    with OrdinaryDecoding(model, dtype=options.dtype) as ordinary:
        for prompt in read_prompts(options.prompts, options.limit):
            text = ordinary.generate(prompt.text, max_new_tokens=options.tokens, **shared).text
            found.append(Known({"prompt": prompt.text, "max_tokens": options.tokens, "stream": True, **shared}, text))
    return found


def _row(at_once: int, staged: Server, one: Server, texts: Sequence[Known], options: argparse.Namespace) -> Figures:
    alone = {"minutes": 0.0, "bad_share": 0.0, "leave_share": 0.0}
    warm, before = Load(staged.url, texts, options, **alone).run(at_once), staged.held()
    trouble = Trouble(random.Random(options.seed), options.kill_every_s, options.stages, program=staged.program)
    with trouble.brewing():
        load = Load(staged.url, texts, options).run(at_once)
    beside = Load(one.url, texts, options, **alone).run(1)
    deadline = time.monotonic() + _SETTLE_S
    while not (well := len(serving(staged.program)) == options.stages) and time.monotonic() < deadline:
        time.sleep(0.2)
    after = staged.held()
    problems = [*warm.problems, *load.problems, *beside.problems, *["not all workers came back"] * (not well)]
    for (what, most), early, late in zip(_MOST_MORE.items(), before, after, strict=True):
        problems += [f"the server's {what}: {early:.0f} before, {late:.0f} after"] * (late > early + most)
    return {
        "at_once": at_once,
        "outcomes": Counter(load.outcomes),
        "killed": trouble.done["killed"],
        "tokens_per_second": load.tokens_per_second,
        "over_one": load.tokens_per_second / beside.tokens_per_second,
        "first_token_ms": load.first_ms,
        "between_tokens_ms": load.gaps_ms,
        "held": (before, after),
        "problems": problems,
    }


def table(figures: Figures) -> str:
    """A row a load, and what is wrong."""
    rows = [
        {**row, **{name: row["outcomes"].get(name, 0) for name in OUTCOMES}, "held": "; ".join(map(str, row["held"]))}
        for row in figures["rows"]
    ]
    heads = {"at_once": f"at once, {figures['model']}, {figures['stages']} stages", **{name: name for name in OUTCOMES}}
    heads |= {"killed": "killed", "tokens_per_second": "tokens/s", "over_one": "over one"}
    heads |= {"first_token_ms": "first token, ms", "between_tokens_ms": "between tokens, ms"}
    heads["held"] = f"server's {', '.join(_MOST_MORE)}: before; after"
    wrong = "\n".join(f"- {line}" for line in figures["wrong"]) or "Nothing is wrong."
    return f"{table_of(rows, **heads)}\n\n{wrong}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo", help=MODEL_HELP)
    found.add_argument("--stages", type=positive, default=2)
    found.add_argument("--dtype", default="float32", choices=DTYPES)
    found.add_argument("--prompts", default="demo", help="as `ppd bench` takes them")
    found.add_argument("--limit", type=positive, default=16, help="prompts")
    found.add_argument("--tokens", type=positive, default=64, help="of an answer")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--at-once", type=whole_numbers, default=[1, 8], help="loads, with commas")
    found.add_argument("--requests", type=positive, default=32, help="of each load, at least")
    found.add_argument("--minutes", type=float, default=0.0, help="of each load, at least")
    found.add_argument("--bad-share", type=share, default=0.0, help="of the requests are nonsense")
    found.add_argument("--leave-share", type=share, default=0.0, help="of the others: their clients go away")
    found.add_argument("--kill-every-s", type=float, default=0.0, help="a worker, on average; 0: never")
    found.add_argument("--seed", type=int, default=0)
    return found


if __name__ == "__main__":
    sys.exit(bool(run(parser(), measure, table)["wrong"]))
