"""Match rates on many prompts, one after the other; what is measured is kept when the run is interrupted."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppd_runtime.tune.match_rate_report import MatchRateReport, summarise
from ppd_runtime.tune.match_rates import MatchRateMeter, TextPlaces
from ppd_runtime.tune.partial_results import PartialResults

_SEEDS = 2**64


@dataclass(frozen=True)
class _Task:
    """A prompt that fits the model, by its number among all prompts, from 0."""

    number: int
    token_ids: list[int]
    sha256: str


@dataclass(frozen=True)
class PromptResult:
    """What one prompt gave; the hash tells it from another prompt of the same number."""

    number: int
    sha256: str
    text: TextPlaces


class MatchRateRun:
    """Measures prompts and keeps each result at once.

    Args:
        meter: what measures one prompt.
        prompts: all prompts; those that leave no room for the new tokens are skipped and counted.
        out: where the report will go; until then results are kept beside it. None keeps them in memory.
        resume: go on from the results beside `out`, if there are any.

    Raises:
        ValueError: no prompt fits, or the results beside `out` are not those of this run.
    """

    def __init__(
        self, meter: MatchRateMeter, prompts: Sequence[str], out: Path | None = None, resume: bool = False
    ) -> None:
        self.meter = meter
        self._tasks = _validator(meter, prompts)
        self.num_prompts, self.skipped_prompts = len(self._tasks), len(prompts) - len(self._tasks)
        self.partial = PartialResults(out, self._header(), _result) if out else None
        hashes = {task.number: task.sha256 for task in self._tasks}
        self._results = self.partial.open(resume, hashes) if self.partial else {}

    @property
    def num_done(self) -> int:
        """Prompts measured."""
        return len(self._results)

    def measure_rest(self, on_progress: Callable[[float], None] = lambda done: None) -> None:
        """Measure what is missing; `on_progress` gets the prompts done, the current one's tokens as a fraction."""
        for task in self._tasks:
            if task.number not in self._results:
                result = self._measure(task, on_progress)
                if self.partial:
                    self.partial.append(result)
                self._results[task.number] = result
                on_progress(self.num_done)

    def report(self) -> MatchRateReport:
        """A report of the prompts done so far; raises ValueError if none is done."""
        texts = [self._results[number].text for number in sorted(self._results)]
        info, meter = self.meter.ordinary.info, self.meter
        known = (self.skipped_prompts, meter.exit_head, info.weights_name)
        return summarise(info.name, meter.ordinary.dtype, meter.setting, texts, *known)

    def _measure(self, task: _Task, on_progress: Callable[[float], None]) -> PromptResult:
        sampling, tokens = self.meter.setting.sampling, 0

        def on_token() -> None:
            nonlocal tokens
            tokens += 1
            on_progress(self.num_done + tokens / (sampling.max_new_tokens + 1))

        text = self.meter.measure(task.token_ids, (sampling.seed + task.number) % _SEEDS, on_token)
        return PromptResult(task.number, task.sha256, text)

    def _header(self) -> dict[str, object]:
        ordinary = self.meter.ordinary
        names = {
            "model": ordinary.info.name,
            "dtype": ordinary.dtype,
            "weights": ordinary.info.weights_name,
            "exit_head": self.meter.exit_head,
        }
        setting = {**asdict(self.meter.setting), "sampling": self.meter.setting.sampling.as_dict()}
        del setting["cuts"]  # whatever the cuts, the same places are kept
        return {**names, **setting}


def _result(row: Any) -> PromptResult:
    return PromptResult(row["number"], row["sha256"], TextPlaces(**row["text"]))


def _validator(meter: MatchRateMeter, prompts: Sequence[str]) -> list[_Task]:
    ordinary, new = meter.ordinary, meter.setting.sampling.max_new_tokens
    most = ordinary.info.max_positions
    tasks = []
    for number, (prompt, token_ids) in enumerate(zip(prompts, ordinary.encoded(prompts), strict=True)):
        if token_ids and (most is None or len(token_ids) + new <= most):
            tasks.append(_Task(number, token_ids, hashlib.sha256(prompt.encode()).hexdigest()))
    if not tasks:
        raise ValueError(
            f"none of the {len(prompts)} prompts and max_new_tokens={new} fit the model's {most} positions: "
            "give shorter prompts or ask for fewer tokens"
        )
    return tasks
