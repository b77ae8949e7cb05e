"""`SelfSpeculativeDecoding`: LayerSkip, AdaSPEED, SWIFT and Kangaroo with the same `generate` and `stream`."""

import time
from collections.abc import Generator

import torch

from ppd_runtime.config import RuntimeConfig, SamplingParams
from ppd_runtime.cost_model.theory import drafting_ratio
from ppd_runtime.decoding.speculation import MethodSettings, Progress, speculate
from ppd_runtime.decoding.verification import ACCEPTANCE_RULES, acceptance_rule
from ppd_runtime.generation import Step, TextGenerator, Totals
from ppd_runtime.models.loading import choose_device, choose_dtype, compile_ahead, describe, load_stage, load_tokenizer
from ppd_runtime.models.stage import Stage
from ppd_runtime.results import Speculation
from ppd_runtime.sampling import Sampler
from ppd_runtime.text import StopRule
from ppd_runtime.trace import Trace

_RANK = 0  # as a main process has
_CHAIN = 0  # `models.compiled.CHAIN`, without all that its module imports


class SelfSpeculativeDecoding(TextGenerator):
    """Drafts with part of a model and verifies with the whole of it, in this process.

    Args:
        method: which method and how, such as `LayerSkipSettings()`.
        model: a local folder, a hub name (`name@revision` pins a commit), or "demo" for the embedded model.
        acceptance: shared-noise (the tokens are ordinary decoding's, sampled ones too) or rejection (speculative
            sampling as in the papers: as exact a sampler, but other tokens than ordinary decoding's).
        dtype: float32, bfloat16, float16 or auto.
        device: cpu, cuda or auto.
        threads: CPU threads for matrix products; set for the whole process while a generation runs.
        compile: run one-token passes in compiled code; the first time takes a while, then it is kept on disk.
        trace: record what is done when; results have a `trace` then.
        stage: the whole model, loaded already, to share with others, one at a time; dtype, device and compile are as
            it was loaded with. None loads one.

    Raises:
        ValueError: for settings that the model cannot be run with, before its weights are read.
    """

    def __init__(
        self,
        method: MethodSettings,
        model: str = "demo",
        *,
        acceptance: str = "shared-noise",
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        compile: bool = False,
        trace: bool = False,
        stage: Stage | None = None,
    ) -> None:
        if acceptance not in ACCEPTANCE_RULES:
            raise ValueError(f"acceptance={acceptance!r}: choose one of {', '.join(ACCEPTANCE_RULES)}")
        self.config = RuntimeConfig(model, dtype=dtype, device=device, threads_per_worker=threads, compile=compile)
        info = describe(model)
        start = method.prepare(info)
        super().__init__(info, load_tokenizer(info))
        self._acceptance, self._traced = acceptance, trace
        self.stage = stage or self._load_stage()
        self.method = start(self.stage)

    def _load_stage(self) -> Stage:
        info, config = self.info, self.config
        place = choose_device(config.device)
        number = choose_dtype(config.dtype, place, info, config.threads_per_worker)
        code = compile_ahead(info, number, place, (1, _CHAIN)) if config.compile else None
        return load_stage(info, info.num_layers, number, place, code)

    @property
    def dtype(self) -> str:
        """The dtype of weights and passes, such as float32; what "auto" came to."""
        return str(self.stage.model.dtype).removeprefix("torch.")

    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: bool) -> Generator[Step | Totals, None, None]:
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self.config.threads_per_worker)
        try:
            yield from self._timed_steps(prompt_ids, params)
        finally:
            torch.set_num_threads(threads_before)

    def _timed_steps(self, prompt_ids: list[int], params: SamplingParams) -> Generator[Step | Totals, None, None]:
        stop = StopRule(params, self.info.eos_token_ids, self.tokenizer)
        rule, progress = acceptance_rule(self._acceptance, Sampler(params)), Progress()
        recorder, passes = self.stage.recorder, self.stage.layer_passes
        spent, first, first_ledger, reason = 0.0, 0.0, None, None
        tokens = speculate(self.method, self.stage, rule, prompt_ids, params.max_new_tokens, stop, progress)
        recorder.begin(self._traced)
        while reason is None:
            began = time.perf_counter()
            recorder.resume()
            token, right, reason = next(tokens)
            recorder.pause()
            spent += time.perf_counter() - began  # the caller's own time between two tokens does not count
            first, first_ledger = first or spent, first_ledger or recorder.ledger()
            yield Step(token, right, last=reason is not None)
        yield Totals(
            finish_reason=reason,
            latency_s=spent,
            time_to_first_token_s=first,
            stall_s=0.0,
            ledger=recorder.ledger(),
            first_token_ledger=first_ledger or recorder.ledger(),
            main_layer_passes=self.stage.layer_passes - passes,
            trace=self._trace(),
            speculation=progress.outcome(self.method.draft_cost),
            run_lengths=tuple(progress.lengths),
        )

    def _trace(self) -> Trace | None:
        recorded = self.stage.recorder.spans(_RANK)
        return Trace(self.info.num_layers, None, "", (recorded,)) if recorded else None

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        assert totals.speculation is not None
        return _predicted_ratio(totals.speculation, num_new_tokens)


def _predicted_ratio(found: Speculation, num_new_tokens: int) -> float:
    """SWIFT's equation 6 for all tokens but the prompt's pass' own, which costs what it does in ordinary decoding."""
    verifications = len(found.drafted)
    if not verifications or num_new_tokens == 1:
        return 1.0
    length, steps = (num_new_tokens - 1) / verifications, sum(found.drafted) / verifications
    return drafting_ratio(max(length, 1.0), steps, found.draft_cost)
