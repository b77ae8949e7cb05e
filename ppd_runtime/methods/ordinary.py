"""`OrdinaryDecoding`: the oracle with the same `generate` and `stream` as every other way of decoding."""

from collections.abc import Iterator
from pathlib import Path

import torch

from ppd_runtime.config import RuntimeConfig, SamplingParams, dtype_name, model_name
from ppd_runtime.methods.autoregressive import autoregressive
from ppd_runtime.methods.in_process import OneProcessDecoding
from ppd_runtime.methods.steps import Totals
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.sampling import TimedSampler
from ppd_runtime.text import StopRule


class OrdinaryDecoding(OneProcessDecoding):
    """Autoregressive decoding in this process, with the same stage, sampling and threads as a main process has.

    Args:
        model: a local folder, a hub name (`name@revision` pins a commit), or "demo" for the embedded model.
        dtype: float32, bfloat16, float16 (or PyTorch's own, such as torch.bfloat16), or auto.
        device: cpu, cuda or auto.
        threads: CPU threads for matrix products; set for the whole process while a generation runs.
        compile: run one-token passes in compiled code; the first time takes a while, then it is kept on disk.
        emulate: a slower device whose times to keep to, to compare with a runtime that does.
        trace: record what is done when; results have a `trace` then.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        threads: int = 1,
        compile: bool = False,
        emulate: EmulatedDevice | None = None,
        trace: bool = False,
    ) -> None:
        config = RuntimeConfig(
            model_name(model),
            dtype=dtype_name(dtype),
            device=device,
            threads_per_worker=threads,
            compile=compile,
        )
        super().__init__(describe(config.model), config, trace, emulate)
        self.stage = self.load_whole()

    def _tokens(
        self, prompt_ids: list[int], params: SamplingParams, stop: StopRule
    ) -> Iterator[tuple[int, bool | None, str | None]]:
        sampler = TimedSampler(params, self.stage.recorder, len(prompt_ids))
        capacity = len(prompt_ids) + params.max_new_tokens
        for token, reason in autoregressive(self.stage, prompt_ids, capacity, sampler, stop):
            yield token, None, reason

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        return 1.0
