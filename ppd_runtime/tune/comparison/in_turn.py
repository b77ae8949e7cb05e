"""Runs a method and ordinary decoding text by text in turn: what `ppd bench`, `plan` and `demo` time."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ppd_runtime.cost_model.staged import expected_first_boundary
from ppd_runtime.cost_model.theory import latency_ratio
from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores, on_cores
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.early_exit import EarlyExitDrafting
from ppd_runtime.methods.in_process import OneProcessDecoding
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.methods.self_speculative import SelfSpeculativeDecoding
from ppd_runtime.results import GenerationResult
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.tune.comparison.figures import Agreement, Drafting, Pair, TextRun
from ppd_runtime.tune.machine_load import LoadMeter

Generated = tuple[tuple[int, ...], TextRun]
"""New tokens, and what they took."""
Way: TypeAlias = PPDRuntime | OneProcessDecoding
"""What is timed beside ordinary decoding."""
_LEAST_TEXTS = 3
_PROBED = 8  # texts between two looks at the machine's load


class OwnMethod:
    """One of this project's ways of decoding, by its `generate`."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generated:
        """Implements `TextGenerator.generate`."""
        result = self.generator.generate(prompt_ids, params)
        return result.token_ids, TextRun(
            new_tokens=len(result.token_ids),
            latency_s=result.stats.latency_s,
            first_s=result.stats.time_to_first_token_s,
            layers_s=result.stats.ledger_per_token.layers_s,
            drafting=self._drafting(result),
            predicted_ratio=self._predicted_ratio(result),
        )

    def _drafting(self, result: GenerationResult) -> Drafting | None:
        found = result.stats.speculation
        if found is None or not isinstance(self.generator, SelfSpeculativeDecoding):
            return None
        reuses = isinstance(self.generator.method, EarlyExitDrafting)
        return Drafting(
            lengths=result.stats.run_lengths[1:],
            drafted=found.drafted,
            accepted=found.accepted,
            draft_s=found.draft_s,
            verify_s=found.verify_s,
            reused_share=found.draft_cost if reuses else 0.0,
        )

    def _predicted_ratio(self, result: GenerationResult) -> float | None:
        """E[J]/N, or Theorem 4.1 without the first token, whose pass over the prompt every way of decoding has."""
        tokens, runtime = len(result.token_ids), self.generator
        if not isinstance(runtime, PPDRuntime) or tokens == 1:
            return None
        first = result.stats.first_boundary
        if told := sum(first):
            return expected_first_boundary([named / told for named in first]) / len(first)
        if not result.stats.asked or result.stats.match_rate is None:  # in a pause of guessing nothing is known
            return None
        whole = latency_ratio(runtime.info.num_layers, runtime.exit_layer, result.stats.match_rate, tokens)
        return (whole * tokens - 1) / (tokens - 1)


def pairs_in_turn(
    way: Way,
    ordinary: OrdinaryDecoding,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    seconds: float,
    load: LoadMeter,
) -> list[Pair]:
    """Decode text after text with both for `seconds`, at least three texts.

    The two take turns in going first. The first text warms both up and is dropped. Ordinary decoding stays on the main
    process's core, so that both run under the same conditions.
    """
    pairs: list[Pair] = []
    began = time.perf_counter()
    for number, prompt in enumerate(itertools.cycle(prompts)):
        if len(pairs) >= _LEAST_TEXTS and time.perf_counter() - began > seconds:
            return pairs
        if number % _PROBED == 0:
            load.probe()
        pair = _pair(way, ordinary, prompt, params, load, way_first=number % 2 == 1)
        if number:
            pairs.append(pair)
        else:
            began = time.perf_counter()
    return pairs


def _pair(
    way: Way,
    ordinary: OrdinaryDecoding,
    prompt: Sequence[int],
    params: SamplingParams,
    load: LoadMeter,
    way_first: bool,
) -> Pair:
    early = OwnMethod(way).generate(prompt, params) if way_first else None
    with on_core_of(way if isinstance(way, PPDRuntime) else ordinary), load.computing.running():
        expected, usual = OwnMethod(ordinary).generate(prompt, params)
    got, run = early or OwnMethod(way).generate(prompt, params)
    return Pair(usual, run, Agreement(common_start(expected, got), max(len(expected), len(got))))


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs, or before one text ends."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cores_of(way: Way) -> list[int]:
    """The cores of a runtime's workers, or of decoding in this process; all cores if they share them."""
    threads = way.config.threads_per_worker
    processes = 1 + way.config.num_subs if isinstance(way, PPDRuntime) else 1
    return [core for cores in assign_cores(min(processes * threads, available_cores()), 1) for core in cores]


@contextlib.contextmanager
def on_core_of(way: Way) -> Iterator[None]:
    """Keep this thread on the cores of `core_beside` while the block lasts."""
    with on_cores(core_beside(way)):
        yield


def core_beside(way: Way) -> tuple[int, ...]:
    """The cores of a runtime's main process; beside decoding in this process, the last ones. Empty: anywhere."""
    if isinstance(way, PPDRuntime):
        return way.main_cores
    threads = way.config.threads_per_worker
    return assign_cores(max(available_cores() // threads, 1), threads, device=str(way.stage.device))[-1]
