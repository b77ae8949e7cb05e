"""Pipelined beside ordinary decoding on the same prompts, in turn, in one run."""

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ppd_runtime.cost_model.staged import expected_first_boundary
from ppd_runtime.cost_model.theory import latency_ratio, realised_saving
from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores, on_cores
from ppd_runtime.measure.machine_load import LoadMeter
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.results import GenerationResult
from ppd_runtime.runtime import PPDRuntime


@dataclass(frozen=True)
class Comparison:
    """What paired runs gave; times are medians over the pairs, in seconds for a token after the first."""

    new_tokens: int
    hits: int
    misses: int
    ordinary_time_per_token_s: float
    ppd_time_per_token_s: float
    ratio: float
    """Median over the pairs of PPD's time for a token over ordinary decoding's."""
    predicted_ratio: float
    """What Theorem 4.1 gives for the match rate of these runs; of stages, E[J]/N for their first boundaries."""
    identical: bool
    """Whether every pair's tokens were the same."""
    cpu_share: float | None = None
    """Of the CPU time that was there for the timing, what it could have; None where it was not looked at."""
    first_boundary: tuple[int, ...] = ()
    """Of stages, as `Stats.first_boundary`; what a boundary named counts as a hit."""

    @property
    def match_rate(self) -> float:
        """Hits among the tokens that had candidates."""
        return self.hits / (self.hits + self.misses)

    @property
    def realised_saving(self) -> float | None:
        """The share of the predicted saving that was measured; None where none was predicted."""
        return realised_saving(self.ratio, self.predicted_ratio) if self.predicted_ratio < 1 else None


def compare(
    runtime: PPDRuntime,
    ordinary: OrdinaryDecoding,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    rounds: int = 3,
) -> Comparison:
    """Decode every prompt with both, one after the other, `rounds` times; a first round is dropped as warm-up.

    Ordinary decoding stays on the core that the main process has, so that both run under the same conditions.
    """
    threads = ordinary.config.threads_per_worker
    for prompt in prompts:
        _pair(runtime, ordinary, prompt, max_new_tokens, LoadMeter((), threads))
    load = LoadMeter(cores_of(runtime), threads)
    pairs = [_pair(runtime, ordinary, prompt, max_new_tokens, load) for _ in range(rounds) for prompt in prompts]
    return replace(summarise(runtime, pairs, max_new_tokens), cpu_share=load.share)


def _pair(
    runtime: PPDRuntime, ordinary: OrdinaryDecoding, prompt: str | Sequence[int], max_new_tokens: int, load: LoadMeter
) -> tuple[GenerationResult, GenerationResult]:
    load.probe()
    with on_core_of(runtime), load.computing.running():
        expected = ordinary.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
    return expected, runtime.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)


def cores_of(runtime: PPDRuntime) -> list[int]:
    """The cores of the runtime's workers; where they share what there is, all of that."""
    needed = (1 + runtime.config.num_subs) * runtime.config.threads_per_worker
    return [core for cores in assign_cores(min(needed, available_cores()), 1) for core in cores]


def summarise(
    runtime: PPDRuntime, pairs: list[tuple[GenerationResult, GenerationResult]], max_new_tokens: int
) -> Comparison:
    """Medians over pairs of (ordinary, pipelined) results for the same prompts."""
    first = tuple(map(sum, zip(*(p.stats.first_boundary for _, p in pairs), strict=True)))
    hits, misses = sum(p.stats.hits for _, p in pairs), sum(p.stats.misses for _, p in pairs)
    if told := sum(first):
        hits, misses = sum(first[:-1]), first[-1]
        predicted = expected_first_boundary([named / told for named in first]) / len(first)
    else:
        asked = sum(p.stats.asked for _, p in pairs)
        rate = sum(p.stats.foreseen for _, p in pairs) / asked if asked else hits / max(hits + misses, 1)
        predicted = predicted_ratio_after_first(runtime, rate, max_new_tokens)
    times = [(o.stats.time_per_token_s, p.stats.time_per_token_s) for o, p in pairs]
    return Comparison(
        new_tokens=sum(len(p.token_ids) for _, p in pairs),
        hits=hits,
        misses=misses,
        ordinary_time_per_token_s=statistics.median(o for o, _ in times),
        ppd_time_per_token_s=statistics.median(p for _, p in times),
        ratio=statistics.median(p / o for o, p in times),
        predicted_ratio=predicted,
        identical=all(o.token_ids == p.token_ids for o, p in pairs),
        first_boundary=first,
    )


def predicted_ratio_after_first(runtime: PPDRuntime, match_rate: float, num_new_tokens: int) -> float:
    """Theorem 4.1 without the first token, whose pass over the prompt is the same for both."""
    whole = latency_ratio(runtime.info.num_layers, runtime.exit_layer, match_rate, num_new_tokens)
    return (whole * num_new_tokens - 1) / (num_new_tokens - 1)


@contextlib.contextmanager
def on_core_of(runtime: PPDRuntime) -> Iterator[None]:
    """Keep this thread on the main process' cores, where those are fixed."""
    with on_cores(runtime.main_cores):
        yield
