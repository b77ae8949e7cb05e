"""Runs a comparison: all methods on a prompt, then on the next; an interruption keeps what is measured."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppd_runtime.checks import check_whole
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.tune.comparison.figures import Agreement, Drafting, Pair, TextRun
from ppd_runtime.tune.comparison.methods import Methods
from ppd_runtime.tune.comparison.prompt_groups import GroupedPrompt
from ppd_runtime.tune.comparison.rows import BASELINE, MethodRow, full_settings
from ppd_runtime.tune.comparison.transformers_methods import TransformersFailedError
from ppd_runtime.tune.match_rates import cpu_threads
from ppd_runtime.tune.partial_results import PartialResults

_SEEDS = 2**64


@dataclass(frozen=True)
class Task:
    """A prompt in one round."""

    number: int
    """Among tasks, from 0."""
    seed: int
    group: str
    token_ids: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class TaskResult:
    """What the methods gave for a prompt, by label; the hash tells the prompt from another of the same number."""

    number: int
    sha256: str
    runs: Mapping[str, TextRun]
    agreements: Mapping[str, Agreement]
    failures: Mapping[str, str]


class ComparisonRun:
    """Decodes every prompt with every method and keeps the results of each prompt at once.

    Each prompt begins with another method, in turn. A first run of every method is dropped.

    Args:
        methods: open ones.
        prompts: those too long for the model's positions and the new tokens lose their beginnings.
        sampling: the seed is the first prompt's; each further prompt has the next one.
        rounds: how often all of it is done.
        out: where the report will go; until then results are kept beside it. None keeps them in memory.
        resume: go on from the results beside `out`, if there are any.

    Raises:
        ValueError: there is no room for prompts, or the results beside `out` are not those of this run.
    """

    def __init__(
        self,
        methods: Methods,
        prompts: Sequence[GroupedPrompt],
        sampling: SamplingParams,
        rounds: int = 1,
        out: Path | None = None,
        resume: bool = False,
    ) -> None:
        check_whole("rounds", rounds, 1)
        self.methods, self.sampling, self.rounds = methods, sampling, rounds
        self._tasks, self.cut_prompts = _tasks(methods, prompts, sampling, rounds)
        self.num_tasks, self.num_prompts = len(self._tasks), len(prompts)
        self.partial = PartialResults(out, self._header(), _result) if out else None
        hashes = {task.number: task.sha256 for task in self._tasks}
        self._results = self.partial.open(resume, hashes) if self.partial else {}
        self.failures = {label: reason for r in self._results.values() for label, reason in r.failures.items()}

    @property
    def num_done(self) -> int:
        """Tasks done: prompts, in each round again."""
        return len(self._results)

    def measure_rest(self, on_progress: Callable[[float], None] = lambda done: None) -> None:
        """Measure what is missing; `on_progress` gets the tasks done, the current one's methods as a fraction."""
        missing = [task for task in self._tasks if task.number not in self._results]
        with cpu_threads(self.methods.ordinary.config.threads_per_worker):
            if missing:
                self._warm_up(missing[0])
            for task in missing:
                result = self._measure(task, on_progress)
                if self.partial:
                    self.partial.append(result)
                self._results[task.number] = result
                on_progress(self.num_done)

    def pairs(self) -> dict[str, dict[str, list[Pair]]]:
        """What was measured, by group and label: every text beside ordinary decoding's."""
        found: dict[str, dict[str, list[Pair]]] = {}
        for task in self._tasks:
            if task.number in self._results:
                result, group = self._results[task.number], found.setdefault(task.group, {})
                for label, run in result.runs.items():
                    pair = Pair(result.runs[BASELINE], run, result.agreements[label])
                    group.setdefault(label, []).append(pair)
        return found

    def _warm_up(self, task: Task) -> None:
        for row in self._rows():
            self._try(row, task, self.failures)

    def _measure(self, task: Task, on_progress: Callable[[float], None]) -> TaskResult:
        texts, runs = {}, {}
        rows = self._rows()
        turned = task.number % len(rows)
        for done, row in enumerate([*rows[turned:], *rows[:turned]], start=1):
            generated = self._try(row, task, self.failures)
            if generated:
                texts[row.label], runs[row.label] = generated
            on_progress(self.num_done + done / (len(rows) + 1))
        agreements = {label: self._agreement(task, texts[BASELINE], text) for label, text in texts.items()}
        return TaskResult(task.number, task.sha256, runs, agreements, dict(self.failures))

    def _try(self, row: MethodRow, task: Task, failures: dict[str, str]) -> tuple[tuple[int, ...], TextRun] | None:
        try:
            return self.methods.generate(row, task.token_ids, self._params(task))
        except TransformersFailedError as error:
            failures[row.label] = str(error)
            return None

    def _agreement(self, task: Task, expected: Sequence[int], got: Sequence[int]) -> Agreement:
        return self.methods.agreement(expected, got, task.token_ids, self._params(task))

    def _rows(self) -> list[MethodRow]:
        return [row for row in self.methods.rows if row.label not in self.failures]

    def _params(self, task: Task) -> SamplingParams:
        return replace(self.sampling, seed=task.seed)

    def _header(self) -> dict[str, Any]:
        ordinary = self.methods.ordinary
        return {
            "model": ordinary.info.name,
            "dtype": ordinary.dtype,
            "weights": ordinary.info.weights_name,
            "device": str(ordinary.stage.device),
            "threads": ordinary.config.threads_per_worker,
            "compile": ordinary.config.compile,
            "sampling": self.sampling.as_dict(),
            "methods": {row.label: full_settings(row) for row in self.methods.rows},
        }


def _tasks(
    methods: Methods, prompts: Sequence[GroupedPrompt], sampling: SamplingParams, rounds: int
) -> tuple[list[Task], int]:
    """The tasks, and how many prompts were cut."""
    info = methods.ordinary.info
    room = None if info.max_positions is None else info.max_positions - sampling.max_new_tokens
    if room is not None and room < 1:
        raise ValueError(
            f"max_new_tokens={sampling.max_new_tokens} leaves no room for prompts in the model's {info.max_positions} "
            "positions: ask for fewer tokens"
        )
    whole = methods.ordinary.encoded([prompt.text for prompt in prompts])
    empty = next((prompt.text for prompt, token_ids in zip(prompts, whole, strict=True) if not token_ids), None)
    if empty is not None:
        raise ValueError(f"prompt {empty!r:.100}: has no tokens; leave it out")
    kept = [token_ids if room is None else token_ids[-room:] for token_ids in whole]
    tasks = [
        Task(
            number=turn * len(prompts) + number,
            seed=(sampling.seed + number) % _SEEDS,
            group=prompt.group,
            token_ids=tuple(token_ids),
            sha256=hashlib.sha256(repr((prompt.group, token_ids)).encode()).hexdigest(),
        )
        for turn in range(rounds)
        for number, (prompt, token_ids) in enumerate(zip(prompts, kept, strict=True))
    ]
    return tasks, sum(len(some) < len(all_of_it) for some, all_of_it in zip(kept, whole, strict=True))


def _result(row: Any) -> TaskResult:
    return TaskResult(
        number=row["number"],
        sha256=row["sha256"],
        runs={label: _text_run(**run) for label, run in row["runs"].items()},
        agreements={label: Agreement(**agreement) for label, agreement in row["agreements"].items()},
        failures=row["failures"],
    )


def _text_run(drafting: Mapping[str, Any] | None, **others: Any) -> TextRun:
    return TextRun(**others, drafting=Drafting(**drafting) if drafting else None)
