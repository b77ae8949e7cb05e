"""`ppd serve` beside other servers, on one GGUF file: the same greedy chats, several at once, free and with a schema.

    python -m benchmarks.servers --at-once 1,4,8,16 --rounds 3
    python -m benchmarks.servers --model smollm2:BF16 --python vllm=VENV/bin/python

Every server runs on all cores and has one thread for each, or a stage. All of them stay up, and one is asked at a time:
each load goes to every server before the next load begins, as often as there are rounds. A server's texts are compared
with its own answers to the same requests alone. Our servers keep no prompts' entries, since these requests repeat
earlier ones. A server that does not start, for instance because it is not installed, is left out with its last words.
transformers and vLLM read the folder of floats that `ppd_runtime` keeps for the file, so they need a file of floats.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.forms import SCHEMA
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, environment, names, new_parser, positive, run, table_of, whole_numbers
from benchmarks.serving import Known, Load, program
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.packages import packaged_file
from ppd_runtime.settings.config import DTYPES

FREE, FORMED = "no", "yes"
PEOPLE = tuple(itertools.product(("Anna Berg", "Ivo Kern", "Mia Roth", "Tom Lind"), ("Oslo", "Bern", "Porto", "Turku")))
QUESTION = "{} is {} years old, likes chess and rowing, and lives in {}. {}"
TASKS = {FREE: "Write a long story about a day of theirs.", FORMED: "Write all of this as JSON."}
_ANSWER_S = 300.0


class Peer(NamedTuple):
    """A server that answers OpenAI's chats."""

    command: Sequence[str]
    """With places for the Python, the model's file or its folder of floats, a port, a dtype, and the threads."""
    package: str = "ppd-runtime"
    """The package that has it."""
    settings: Mapping[str, Any] = {}
    """Of each request besides the usual ones."""
    form: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """The field for a JSON schema; None if there is none."""
    last: bytes = b"data: [DONE]"
    """What a stream ends with."""


_AT = ("--host", "127.0.0.1", "--port", "{port}")


def _ours(*options: str) -> Peer:
    command = ("{python}", "-m", "ppd_runtime.cli.entry", "serve", "--model", "{file}", *_AT, "--dtype", "{dtype}")
    return Peer((*command, *options), form=_json_schema)


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


_ALONE = ("--prefix-cache-tokens", "0")
PEERS: Mapping[str, Peer] = {
    "ours-auto": _ours("--layout", "auto", *_ALONE),  # the first to start: it measures this machine
    "ours-threads": _ours("--method", "autoregressive", "--threads", "{threads}"),
    "ours-stages": _ours("--stages", "{threads}", *_ALONE),
    "ours-rows": _ours("--stages", "{threads}", "--rows-share-weights", *_ALONE),
    "llama.cpp": Peer(
        (
            *("{python}", "-m", "llama_cpp.server", "--model", "{file}", *_AT, "--n_ctx", "4096"),
            *("--n_threads", "{threads}", "--n_threads_batch", "{threads}", "--logits_all", "false"),
            *("--interrupt_requests", "false"),  # else a request ends the one before it
        ),
        "llama-cpp-python",
        {"repeat_penalty": 1.0},
        lambda schema: {"type": "json_object", "schema": schema},
    ),
    "transformers": Peer(
        (
            *("{python}", "-m", "transformers.cli.transformers", "serve", "{floats}", *_AT),
            *("--device", "cpu", "--dtype", "{dtype}"),
        ),
        "transformers",
        last=b"",
    ),
    "vllm": Peer(
        (
            *("env", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND={cores}"),
            *("{python}", "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", "{floats}", *_AT),
            *("--dtype", "{dtype}", "--max-model-len", "4096", "--no-enable-prefix-caching"),
        ),
        "vllm-cpu",
        form=_json_schema,
    ),
}
"""By name, in the order in which they start and are asked."""
_ASKED_FOR = ("ours-rows",)
"""Only where they are named."""


def measure(options: argparse.Namespace) -> Figures:
    """Run every load in turn; a row for each load and server, and why others are left out."""
    for name, python in options.python:
        if not Path(python).is_file():
            raise ValueError(f"--python {name}={python}: there is no such file, give a Python's path")
    with model_folder(options.model) as model, contextlib.ExitStack() as stack:
        file = packaged_file(model) or Path(model)
        if not file.is_file():
            raise ValueError(f"--model {options.model}: give one that is a GGUF file, such as smollm2")
        urls, texts, left_out = dict[str, str](), dict[tuple[str, str], list[Known]](), dict[str, str]()
        for name in (one for one in PEERS if one in options.engines):
            _note(f"{name} starts")
            try:
                urls[name] = stack.enter_context(_started(name, file, options))
                texts |= _answers_alone(urls[name], name, options.tokens)
            except (ValueError, OSError) as error:
                left_out[name] = str(error).strip().splitlines()[-1]
        loads = _loads(options, urls, texts)
    rows = [_row(*key, found) for key, found in loads.items()]
    about = {"file": file.name, "dtype": options.dtype, "versions": _versions(urls, options)}
    return {**about, "rows": rows, "left_out": left_out}


def _loads(
    options: argparse.Namespace, urls: Mapping[str, str], texts: Mapping[tuple[str, str], Sequence[Known]]
) -> dict[tuple[str, int, str], list[Load]]:
    """What came of each load, by whether there is a schema, by requests at once, and by server; rounds in turn."""
    began = time.monotonic()
    loads: dict[tuple[str, int, str], list[Load]] = {
        (form, at_once, name): []
        for (form, at_once) in itertools.product(TASKS, options.at_once)
        for (of, name) in texts
        if of == form
    }
    for number in range(options.rounds):
        if number and time.monotonic() - began > 60 * options.minutes:
            break
        _note(f"round {number + 1}")
        for (form, at_once, name), found in loads.items():
            asked = {"requests": max(at_once, options.requests), "minutes": 0.0, "bad_share": 0.0, "leave_share": 0.0}
            found.append(Load(urls[name], texts[form, name], options, **asked, seed=0).run(at_once))
    return loads


def _note(what: str) -> None:
    sys.stderr.write(f"{datetime.datetime.now():%H:%M:%S} {what}\n")


def _answers_alone(url: str, name: str, tokens: int) -> dict[tuple[str, str], list[Known]]:
    forms = [form for form in TASKS if form == FREE or PEERS[name].form]
    return {(form, name): [_alone(url, PEERS[name], form, *one, tokens) for one in enumerate(PEOPLE)] for form in forms}


@contextlib.contextmanager
def _started(name: str, file: Path, options: argparse.Namespace) -> Iterator[str]:
    """A server that listens at the URL, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores, peer = os.sched_getaffinity(0), PEERS[name]
    places = {"python": _python(name, options), "file": file, "port": port, "dtype": options.dtype}
    places |= {"threads": len(cores), "cores": ",".join(map(str, sorted(cores)))}
    if "{floats}" in peer.command:
        places["floats"] = _folder_of_floats(file)
    command = [part.format(**places) for part in peer.command]
    with program(command, cores, lambda log: _if_it_answers(f"http://127.0.0.1:{port}")) as found:
        yield found.url


def _folder_of_floats(file: Path) -> Path:
    """What transformers reads instead of the file; ValueError for a file of fewer bits."""
    info = describe(str(file))
    if info.weights:
        raise ValueError(f"it reads floats, and {file.name} has fewer bits: give a BF16 file")
    return info.folder


def _python(name: str, options: argparse.Namespace) -> str:
    return dict(options.python).get(name, sys.executable)


def _if_it_answers(url: str) -> str | None:
    with contextlib.closing(HTTPConnection(urlsplit(url).netloc, timeout=_ANSWER_S)) as connection:
        try:
            connection.request("GET", "/v1/models")
            connection.getresponse()
            return url
        except (OSError, HTTPException):
            return None


def _alone(url: str, peer: Peer, form: str, number: int, who: tuple[str, str], tokens: int) -> Known:
    """A streamed chat, and its text when nothing else is asked for."""
    question = QUESTION.format(who[0], 20 + number, who[1], TASKS[form])
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0.0}
    body |= peer.settings
    if form == FORMED and peer.form:
        body["response_format"] = peer.form(SCHEMA)
    with contextlib.closing(HTTPConnection(urlsplit(url).netloc, timeout=_ANSWER_S)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        told = answer.read()
    if answer.status != 200:
        raise ValueError(f"{url}: status {answer.status}, {told[:300]!r}")
    text = json.loads(told)["choices"][0]["message"]["content"]
    return Known({**body, "stream": True}, text, peer.last)


def _row(form: str, at_once: int, name: str, loads: Sequence[Load]) -> Figures:
    outcomes = [outcome for load in loads for outcome in load.outcomes]
    return {
        "form": form,
        "at_once": at_once,
        "server": name,
        "tokens_per_second": [load.tokens_per_second for load in loads],
        "first_ms": [ms for load in loads for ms in load.first_ms],
        "gaps_ms": [ms for load in loads for ms in load.gaps_ms],
        "right": f"{outcomes.count('right')} of {len(outcomes)}",
        "problems": [problem for load in loads for problem in load.problems][:3],
    }


def _versions(names: Iterable[str], options: argparse.Namespace) -> dict[str, str]:
    """Each package's version, as its own Python knows it."""
    found = {}
    for package, python in {PEERS[name].package: _python(name, options) for name in names}.items():
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        found[package] = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True).stdout
    return {package: number.strip() for package, number in found.items() if number}


def table(figures: Figures) -> str:
    """What ran where, a row a load and server, and who is left out."""
    where = environment()
    versions = ", ".join(f"{name} {number}" for name, number in {**where["versions"], **figures["versions"]}.items())
    said = f"{datetime.date.today()}, {where['machine']}, commit {where['commit'] or 'unknown'}; {versions}."
    rows = [{**row, **{name: _percentiles(row[name]) for name in ("first_ms", "gaps_ms")}} for row in figures["rows"]]
    what = f"{figures['file']}, dtype {figures['dtype']}"
    heads = {"form": "schema", "at_once": "at once", "server": what, "tokens_per_second": "tokens/s"}
    heads |= {"first_ms": "first token, ms: p50, p99", "gaps_ms": "between tokens, ms: p50, p99"}
    left_out = "".join(f"\n- {name} is left out: {why}" for name, why in figures["left_out"].items())
    return f"{said}\n\n{table_of(rows, **heads, right='texts as alone')}\n{left_out}".rstrip()


def _percentiles(values: Sequence[float]) -> str | None:
    if not values:
        return None
    cuts = statistics.quantiles([*values, *values], n=100, method="inclusive")
    return f"{cuts[49]:.3g}, {cuts[98]:.3g}"


def _peer_python(text: str) -> tuple[str, str]:
    """An option's server and the Python that it runs in."""
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=PATH, NAME one of {', '.join(PEERS)}")
    return name, path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    usual = [name for name in PEERS if name not in _ASKED_FOR]
    found.add_argument("--model", default="smollm2", help=MODEL_HELP)
    found.add_argument("--engines", type=names(PEERS), default=usual, help=f"some of: {', '.join(PEERS)}")
    found.add_argument("--python", type=_peer_python, action="append", default=[], help="a server's own: NAME=PATH")
    found.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights and passes; not llama.cpp's")
    found.add_argument("--at-once", type=whole_numbers, default=[1, 4, 8, 16], help="loads, with commas")
    found.add_argument("--requests", type=positive, default=4, help="of each load, at least one for each client")
    found.add_argument("--tokens", type=positive, default=48, help="of an answer, at the most")
    found.add_argument("--rounds", type=positive, default=3)
    found.add_argument("--minutes", type=float, default=60.0, help="after so many no further round begins")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
