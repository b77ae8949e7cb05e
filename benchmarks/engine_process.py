"""An engine of `benchmarks.engines` in a process of its own, on cores of its own, asked again and again."""

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

_START_S, _ANSWER_S = 900.0, 600.0


class EngineProcess:
    """It lives until it is closed; one that cannot be used says why, and answers nothing."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.reason: str | None = None
        """Why there are no answers."""
        self._process: subprocess.Popen[bytes] | None = None
        if missing := next((name for name in ENGINES[task.engine][1] if find_spec(name) is None), None):
            self.reason = f'{missing} is not installed: run pip install ".[peers]" in the project\'s folder'
            return
        self._log = Path(task.folder) / f"{task.engine}-{task.weights}-{task.threads}.log"
        command = [sys.executable, "-m", "benchmarks.engines"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        os.sched_setaffinity(self._process.pid, sorted(os.sched_getaffinity(0))[-task.threads :])
        self._ask(asdict(task), _START_S)

    def generate(self, prompt: list[int], num_tokens: int) -> Answer | None:
        """What the engine answers; None where it has ended, or there is none."""
        answer = self._ask({"prompt": prompt, "num_tokens": num_tokens}, _ANSWER_S)
        return answer and (answer[0], answer[1])

    def _ask(self, question: dict[str, Any], deadline_s: float) -> Any:
        if self._process is None:
            return None
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            if select.select([self._process.stdout], [], [], deadline_s)[0]:
                if line := self._process.stdout.readline():
                    return json.loads(line)
                self.reason = self._last_words(self._process)
            else:
                self.reason = f"no answer within {deadline_s:.0f} s"
        except BrokenPipeError:
            self.reason = self._last_words(self._process)
        self.close()
        return None

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
        if process is None:
            return
        assert process.stdin and process.stdout
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
