"""Opens a comparison's methods: ordinary decoding and others, warm, each thread on its own core."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.methods.registry import SELF_SPECULATIVE, open_method
from ppd_runtime.methods.self_speculative import SelfSpeculativeDecoding
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.tune.comparison.figures import Agreement
from ppd_runtime.tune.comparison.in_turn import Generated, OwnMethod, common_start, on_core_of
from ppd_runtime.tune.comparison.rows import BASELINE, MethodRow, full_settings
from ppd_runtime.tune.comparison.transformers_methods import TRANSFORMERS_METHODS, TransformersMethod, load_whole
from ppd_runtime.tune.machine_load import CpuTime


class ComparedMethod(Protocol):
    """A way of decoding at work."""

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generated:
        """Continue a prompt."""
        ...


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
        self._stage: LayerRange | None = None

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
        """How far a text is ordinary decoding's; if it differs, ordinary decoding runs once more, for the gap."""
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
        """Keep what runs in this process on its own cores: the compared main process's, if there is one."""
        if row.method == "ppd":
            yield
        else:
            with on_core_of(self._pipeline or self.ordinary):
                yield

    @torch.inference_mode()
    def _next_logits(self, token_ids: list[int]) -> torch.Tensor:
        stage = self.ordinary.stage
        stage.begin(len(token_ids))
        return stage.logits(stage.run(0, stage.num_layers, token_ids, 0))
