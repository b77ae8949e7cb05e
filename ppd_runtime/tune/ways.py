"""This project's ways of decoding, and transformers', as `compare` takes them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.early_exit import EarlyExitDrafting
from ppd_runtime.methods.in_process import OneProcessDecoding
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.methods.registry import SELF_SPECULATIVE, open_method
from ppd_runtime.methods.self_speculative import SelfSpeculativeDecoding
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.results import Stats
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import without_earlier_texts
from ppd_runtime.tune.compare import Comparison, Drafting, Text, Way, compare
from ppd_runtime.tune.rows import BASELINE, MethodRow, full_settings
from ppd_runtime.tune.transformers_methods import (
    TRANSFORMERS_METHODS,
    TransformersMethod,
    generate_arguments,
    load_whole,
)

Generator: TypeAlias = PPDRuntime | OneProcessDecoding
SHARED_SETTINGS = ("model", "weights", "device", "compile", "rows_share_weights", "generation_config")
"""Settings of ordinary decoding that whatever is compared with it has too, besides dtype and threads."""


def own_way(name: str, generator: TextGenerator, cores: tuple[int, ...] = ()) -> Way:
    """One of this project's ways; `cores` are for what decodes in this process."""

    def decode(prompt_ids: Sequence[int], params: SamplingParams) -> Text:
        result = generator.generate(prompt_ids, params)
        stats = result.stats
        return Text(
            result.token_ids, stats.latency_s, stats.time_to_first_token_s, 1, _drafting(generator, stats), stats
        )

    if isinstance(generator, OneProcessDecoding):
        return Way(name, decode, cores, generator.config.threads_per_worker)
    return Way(name, decode)


def _drafting(generator: TextGenerator, stats: Stats) -> Drafting | None:
    found = stats.speculation
    if found is None or not isinstance(generator, SelfSpeculativeDecoding):
        return None
    reuses = isinstance(generator.method, EarlyExitDrafting)
    return Drafting(
        lengths=stats.run_lengths[1:],
        drafted=found.drafted,
        accepted=found.accepted,
        draft_s=found.draft_s,
        verify_s=found.verify_s,
        reused_share=found.draft_cost if reuses else 0.0,
    )


def beside_ordinary(
    name: str,
    generator: Generator,
    ordinary: OrdinaryDecoding,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    rounds: int = 1,
    seconds: float | None = None,
) -> Comparison:
    """Compare one way with ordinary decoding, which stays on the main process's cores unless it has more threads."""
    cores = core_beside(generator if isinstance(generator, PPDRuntime) else ordinary)
    fits = len(cores) >= ordinary.config.threads_per_worker
    ways = [own_way(BASELINE, ordinary, cores if fits else ()), own_way(name, generator)]
    probed = _cores_of(generator) if seconds is not None and ordinary.stage.device.type == "cpu" else ()
    return compare(ways, prompts, params, rounds=rounds, seconds=seconds, probed=probed)


def core_beside(generator: Generator) -> tuple[int, ...]:
    """The cores of a runtime's main process; beside decoding in this process, the last ones. Empty: anywhere."""
    if isinstance(generator, PPDRuntime):
        return generator.main_cores
    threads = generator.config.threads_per_worker
    return assign_cores(max(available_cores() // threads, 1), threads, device=str(generator.stage.device))[-1]


def _cores_of(generator: Generator) -> list[int]:
    """The cores of a runtime's workers, or of decoding in this process; all cores if they share them."""
    processes = 1 + generator.config.num_subs if isinstance(generator, PPDRuntime) else 1
    used = min(processes * generator.config.threads_per_worker, available_cores())
    return [core for cores in assign_cores(used, 1) for core in cores]


@contextlib.contextmanager
def opened_rows(ordinary: OrdinaryDecoding, rows: Sequence[MethodRow]) -> Iterator[list[Way]]:
    """The ways of checked rows, open until the block ends, with ordinary decoding's model, dtype, device and so on.

    Those that draft in this process share one model's weights. What runs in this process stays on the cores of the
    first row's main process that has one.
    """
    opened = list[TextGenerator | TransformersMethod]()
    library: PreTrainedModel | None = None
    drafting: LayerRange | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(ordinary)
        for row in rows:
            if row.method in TRANSFORMERS_METHODS:
                library = library or load_whole(ordinary.info, ordinary.dtype, ordinary.stage.device)
                arguments = generate_arguments(row.method, row.settings, ordinary.info)
                threads = ordinary.config.threads_per_worker
                opened.append(TransformersMethod(library, ordinary.info, arguments, threads))
            elif row.method == BASELINE:
                opened.append(ordinary)
            else:
                generator = stack.enter_context(_open(row, ordinary, drafting))
                drafting = drafting or (generator.stage if isinstance(generator, SelfSpeculativeDecoding) else None)
                opened.append(generator)
        pipelines = [one for one in opened if isinstance(one, PPDRuntime)]
        cores = core_beside(pipelines[0] if pipelines else ordinary)
        yield [
            Way(row.label, one.generate, cores, one.threads)
            if isinstance(one, TransformersMethod)
            else own_way(row.label, one, cores)
            for row, one in zip(rows, opened, strict=True)
        ]


def _open(row: MethodRow, ordinary: OrdinaryDecoding, drafting: LayerRange | None) -> TextGenerator:
    config = ordinary.config
    shared = {name: getattr(config, name) for name in SHARED_SETTINGS}
    shared |= {"dtype": ordinary.dtype, "threads": config.threads_per_worker}
    own: dict[str, Any] = {"stage": drafting} if row.method in SELF_SPECULATIVE else {}
    return open_method(method=row.method, **without_earlier_texts(full_settings(row)), **shared, **own)
