"""Rows at work: ordinary decoding and what is compared with it, warm, each thread on a core of its own."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores, on_cores
from ppd_runtime.measure.against_ordinary import predicted_ratio_after_first
from ppd_runtime.measure.comparison.figures import Agreement, Drafting, TextRun
from ppd_runtime.measure.comparison.rows import BASELINE, MethodRow, full_settings
from ppd_runtime.measure.comparison.transformers_methods import TRANSFORMERS_METHODS, TransformersMethod, load_whole
from ppd_runtime.measure.machine_load import CpuTime
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.early_exit import EarlyExitDrafting
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.methods.registry import SELF_SPECULATIVE, open_method
from ppd_runtime.methods.self_speculative import SelfSpeculativeDecoding
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.results import GenerationResult
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams

Generated = tuple[tuple[int, ...], TextRun]
"""New tokens, and what they took."""


class ComparedMethod(Protocol):
    """A way of decoding at work."""

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generated:
        """Continue a prompt."""
        ...


class OwnMethod:
    """One of this project's, by its `generate`."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generated:
        """As `TextGenerator.generate`."""
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
        rate, tokens = result.stats.match_rate, len(result.token_ids)
        if not isinstance(self.generator, PPDRuntime) or rate is None or tokens == 1:
            return None
        return predicted_ratio_after_first(self.generator, rate, tokens)


class Methods:
    """Every row's method, open until the `with` block ends; those that draft in this process share one model's weights.

    Args:
        ordinary: ordinary decoding; the others have its model, dtype, weights, device, threads and compile.
        rows: checked ones, ordinary decoding's among them.
    """

    def __init__(self, ordinary: OrdinaryDecoding, rows: Sequence[MethodRow]) -> None:
        self.ordinary, self.rows = ordinary, tuple(rows)
        self._closing = contextlib.ExitStack()
        self._methods: dict[str, ComparedMethod] = {}
        self._pipeline: PPDRuntime | None = None
        threads = ordinary.config.threads_per_worker
        places = max(available_cores() // threads, 1)
        *_, self._last_cores = assign_cores(places, threads, device=str(ordinary.stage.device))
        self._stage: Stage | None = None

    def __enter__(self) -> "Methods":
        with contextlib.ExitStack() as opening:
            self._open(opening)
            self._closing = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def generate(self, row: MethodRow, prompt_ids: Sequence[int], params: SamplingParams) -> Generated:
        """Continue a prompt by a row's method."""
        with self._core(row):
            spent = CpuTime()
            with spent.running():
                text, run = self._methods[row.label].generate(prompt_ids, params)
            return text, replace(run, cpu_s=spent.cpu_s)

    def agreement(
        self, expected: Sequence[int], got: Sequence[int], prompt_ids: Sequence[int], params: SamplingParams
    ) -> Agreement:
        """How far a text is ordinary decoding's; where it leaves it, ordinary decoding runs once more, for the gap."""
        equal = common_start(expected, got)
        compared, gap = max(len(expected), len(got)), None
        if equal < min(len(expected), len(got)):
            history = [*prompt_ids, *expected[:equal]]
            sampler = Sampler(params, len(prompt_ids), self.ordinary.info.eos_token_ids)
            scores = sampler.noisy_scores(self._next_logits(history), history)
            gap = float(scores[expected[equal]] - scores[got[equal]])
        return Agreement(equal, compared, gap)

    def _open(self, opening: contextlib.ExitStack) -> None:
        library = None
        for row in self.rows:
            if row.method in TRANSFORMERS_METHODS:
                info, stage = self.ordinary.info, self.ordinary.stage
                library = library or load_whole(info, self.ordinary.dtype, stage.device)
                arguments = TRANSFORMERS_METHODS[row.method](row.settings, info)
                self._methods[row.label] = TransformersMethod(library, info, arguments)
            else:
                self._methods[row.label] = OwnMethod(opening.enter_context(self._generator(row)))

    def _generator(self, row: MethodRow) -> TextGenerator:
        if row.method == BASELINE:
            return self.ordinary
        config = self.ordinary.config
        shared = {
            "dtype": self.ordinary.dtype,
            "weights": config.weights,
            "device": config.device,
            "threads": config.threads_per_worker,
            "compile": config.compile,
            "generation_config": config.generation_config,
        }
        if row.method in SELF_SPECULATIVE:
            drafting = open_method(config.model, row.method, stage=self._stage, **row.settings, **shared)
            assert isinstance(drafting, SelfSpeculativeDecoding)
            self._stage = drafting.stage
            return drafting
        pipeline = open_method(config.model, row.method, **full_settings(row), **shared)
        assert isinstance(pipeline, PPDRuntime)
        self._pipeline = self._pipeline or pipeline
        return pipeline

    @contextlib.contextmanager
    def _core(self, row: MethodRow) -> Iterator[None]:
        """What runs in this process stays on cores of its own: a main process', if there is one to be compared with."""
        if row.method == "ppd":
            yield
        else:
            with on_cores(self._pipeline.main_cores if self._pipeline else self._last_cores):
                yield

    @torch.inference_mode()
    def _next_logits(self, token_ids: list[int]) -> torch.Tensor:
        stage = self.ordinary.stage
        stage.begin(len(token_ids))
        return stage.logits(stage.run(0, stage.num_layers, token_ids, 0))


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs, or before one text ends."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
