"""`OrdinaryDecoding`: the oracle with the same `generate` and `stream` as every other way of decoding."""

import time
from collections.abc import Generator

import torch

from ppd_runtime.config import RuntimeConfig, SamplingParams
from ppd_runtime.decoding.autoregressive import autoregressive
from ppd_runtime.generation import Step, TextGenerator, Totals
from ppd_runtime.models.emulation import EmulatedDevice, emulation_note
from ppd_runtime.models.loading import choose_device, choose_dtype, compile_ahead, describe, load_stage, load_tokenizer
from ppd_runtime.sampling import TimedSampler
from ppd_runtime.text import StopRule
from ppd_runtime.trace import Trace

_RANK = 0  # as a main process has


class OrdinaryDecoding(TextGenerator):
    """Autoregressive decoding in this process, with the same stage, sampling and threads as a main process has.

    Args:
        model: a local folder, a hub name (`name@revision` pins a commit), or "demo" for the embedded model.
        dtype: float32, bfloat16, float16 or auto.
        device: cpu, cuda or auto.
        threads: CPU threads for matrix products; set for the whole process while a generation runs.
        compile: run one-token passes in compiled code; the first time takes a while, then it is kept on disk.
        emulate: a slower device whose times to keep to, to compare with a runtime that does.
        trace: record what is done when; results have a `trace` then.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        compile: bool = False,
        emulate: EmulatedDevice | None = None,
        trace: bool = False,
    ) -> None:
        self.config = RuntimeConfig(model, dtype=dtype, device=device, threads_per_worker=threads, compile=compile)
        info = describe(model)
        super().__init__(info, load_tokenizer(info))
        place = choose_device(device)
        number = choose_dtype(dtype, place, info, threads)
        code = compile_ahead(info, number, place) if compile else None
        self._traced, self._conditions = trace, emulation_note(emulate)
        self.stage = load_stage(info, info.num_layers, number, place, code, emulate)

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
        capacity = len(prompt_ids) + params.max_new_tokens
        recorder = self.stage.recorder
        passes, spent, first, first_ledger, reason = self.stage.layer_passes, 0.0, 0.0, None, None
        tokens = autoregressive(self.stage, prompt_ids, capacity, TimedSampler(params, recorder), stop)
        recorder.begin(self._traced)
        while reason is None:
            began = time.perf_counter()
            recorder.resume()
            token, reason = next(tokens)
            recorder.pause()
            spent += time.perf_counter() - began  # the caller's own time between two tokens does not count
            first, first_ledger = first or spent, first_ledger or recorder.ledger()
            yield Step(token, None, last=reason is not None)
        yield Totals(
            finish_reason=reason,
            latency_s=spent,
            time_to_first_token_s=first,
            stall_s=0.0,
            ledger=recorder.ledger(),
            first_token_ledger=first_ledger or recorder.ledger(),
            main_layer_passes=self.stage.layer_passes - passes,
            trace=self._trace(),
        )

    def _trace(self) -> Trace | None:
        recorded = self.stage.recorder.spans(_RANK)
        return Trace(self.info.num_layers, None, self._conditions, (recorded,)) if recorded else None

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        return 1.0
