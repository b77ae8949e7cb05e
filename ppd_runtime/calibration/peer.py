"""A second process for `calibrate`, told what to do in JSON lines.

It holds the model as a worker does. It echoes hidden states, works so that its neighbours' slow-down can be measured,
or measures ordinary decoding on several cores, and answers each command with a JSON line when it is done.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from ppd_runtime.launch.child_python import child_command, child_environment
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.opening import load_stage
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.pipeline.messages import MAIN, ExitState, HeadStart, Shutdown
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.sockets import open_endpoint

_SPEED_UP_TOKENS, _SPEED_UP_ROUNDS, _SPEED_UP_S = 16, 5, 3.0


@dataclass(frozen=True)
class CalibrationPeerSpec:
    """What a peer is started with; it travels as JSON."""

    rank: int
    model: str
    weights: str | None
    dtype: str
    device: str
    compile: bool
    threads: int
    cores: Sequence[int]
    """CPU cores to stay on; empty: wherever the system likes."""
    folder: str
    """Where the sockets are."""
    prompt_ids: Sequence[int]
    num_new_tokens: int

    def to_json(self) -> str:
        """The specification as one argument."""
        return json.dumps(asdict(self))


class CalibrationPeer:
    """Does what it is told, one command after the other."""

    def __init__(self, spec: CalibrationPeerSpec) -> None:
        self._spec = spec
        _stay_on(spec.cores)
        torch.set_num_threads(spec.threads)
        self._endpoint = open_endpoint(Network(folder=spec.folder), spec.rank, has_own_core=bool(spec.cores))
        if spec.device == "cpu":  # elsewhere it only echoes
            self._stage.begin(1)

    @cached_property
    def _stage(self) -> Stage:
        spec, info = self._spec, describe(self._spec.model, self._spec.weights)
        dtype = getattr(torch, spec.dtype)
        code = compile_ahead(info, dtype, spec.device) if spec.compile else None
        return load_stage(info, info.num_layers, dtype, spec.device, code)

    def echo(self) -> None:
        """Send every hidden state back at once, until told to stop."""
        while not isinstance(message := self._endpoint.receive(None), Shutdown):
            if isinstance(message, ExitState):
                reply = HeadStart(self._spec.rank, message.request, message.position, (0,), message.hidden)
                self._endpoint.send(MAIN, reply)

    def work(self, seconds: float) -> None:
        """Run the first half of the layers for so long, as a sub-process does."""
        end, half = time.perf_counter() + seconds, self._stage.num_layers // 2
        while time.perf_counter() < end:
            self._stage.begin(self._spec.num_new_tokens)
            for position in range(self._spec.num_new_tokens):
                self._stage.run(0, half, [0], position)
                if time.perf_counter() > end:
                    return

    def speed_up(self, threads: int, cores: Sequence[int]) -> float:
        """One thread group's time for a token over that of `threads` threads on `cores`, in turn."""
        _stay_on(cores)
        ratios: list[float] = []
        end = time.perf_counter() + _SPEED_UP_S
        while len(ratios) < 2 or (len(ratios) <= _SPEED_UP_ROUNDS and time.perf_counter() < end):
            times = [self._timed(number) for number in (self._spec.threads, threads)]
            ratios.append(times[0] / times[1])
        torch.set_num_threads(self._spec.threads)
        return statistics.median(ratios[1:])

    def close(self) -> None:
        """Release the sockets."""
        self._endpoint.close()

    def _timed(self, threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        self._decode()
        return time.perf_counter() - began

    def _decode(self) -> None:
        stage, prompt = self._stage, list(self._spec.prompt_ids)
        stage.begin(len(prompt) + _SPEED_UP_TOKENS)
        token = int(stage.logits(stage.run(0, stage.num_layers, prompt, 0)).argmax())
        for position in range(len(prompt), len(prompt) + _SPEED_UP_TOKENS):
            token = int(stage.logits(stage.run(0, stage.num_layers, [token], position)).argmax())


class CalibrationPeerProcess:
    """A running peer; commands go in, answers come out, in JSON lines."""

    def __init__(self, spec: CalibrationPeerSpec) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            child_command(__name__, spec.to_json()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=child_environment(),
        )

    def __enter__(self) -> "CalibrationPeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, *command: object) -> None:
        """Give a command."""
        if self._process.stdin:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def wait(self) -> Any:
        """The answer to the oldest command without one."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self._errors.seek(0)
            words = [line for line in self._errors.read().splitlines() if line.strip()] or ["no last words"]
            raise RuntimeError(f"a process to measure with ended: {words[-1]}")
        return json.loads(line)


def main() -> None:
    """Serve commands from standard input until it ends."""
    spec = CalibrationPeerSpec(**json.loads(sys.argv[1]))
    peer = CalibrationPeer(spec)
    _answer("ready")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        commands: dict[str, Callable[..., object]] = {
            "echo": peer.echo,
            "work": peer.work,
            "speed_up": peer.speed_up,
        }
        _answer(commands[name](*arguments))
    peer.close()


def _stay_on(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
