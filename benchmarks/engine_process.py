"""An engine of `benchmarks.engines` in a process of its own, on cores of its own, asked again and again."""

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES, Answer, Task
from ppd_runtime.tune.compare import CannotDecodeError

_START_S, _ANSWER_S = 900.0, 600.0


class EngineProcess:
    """It lives until it is closed; one that cannot be used says why whenever it is asked."""

    def __init__(self, task: Task) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reason = ""
        if missing := next((name for name in ENGINES[task.engine][1] if find_spec(name) is None), None):
            self._reason = f'{missing} is not installed: run pip install ".[peers]" in the project\'s folder'
            return
        self._log = Path(task.folder) / f"{task.engine}-{task.weights}-{task.threads}.log"
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.engines"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        os.sched_setaffinity(self._process.pid, sorted(os.sched_getaffinity(0))[-task.threads :])
        with contextlib.suppress(CannotDecodeError):
            self._ask(asdict(task), _START_S)

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        """What the engine answers; raises `CannotDecodeError` where it has ended, or there is none."""
        tokens, step_s = self._ask({"prompt": prompt, "num_tokens": num_tokens}, _ANSWER_S)
        return tokens, step_s

    def _ask(self, question: dict[str, Any], deadline_s: float) -> Any:
        if self._process is None:
            raise CannotDecodeError(self._reason)
        assert self._process.stdin and self._process.stdout
        self._reason = f"no answer within {deadline_s:.0f} s"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        if select.select([self._process.stdout], [], [], deadline_s)[0]:
            if line := self._process.stdout.readline():
                return json.loads(line)
            self._reason = self._last_words(self._process)
        self.close()
        raise CannotDecodeError(self._reason)

    def _last_words(self, process: "subprocess.Popen[bytes]") -> str:
        """Its last line of error, or how it ended."""
        code = process.wait(_ANSWER_S)
        said = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        if code > 0 and said:
            return said[-1][:200]
        return f"ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin and process.stdout
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
