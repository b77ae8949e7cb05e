"""Ordinary decoding: every token through all layers, one after the other. It is the oracle for every other method."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ppd_runtime.methods.in_process import OneProcessDecoding
from ppd_runtime.methods.steps import Totals
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler, TimedSampler
from ppd_runtime.settings.config import IN_PROCESS_SETTINGS, RuntimeConfig, in_process_config
from ppd_runtime.settings.fields import takes_settings
from ppd_runtime.text import StopRule


@takes_settings(RuntimeConfig, IN_PROCESS_SETTINGS)
class OrdinaryDecoding(OneProcessDecoding):
    """Autoregressive decoding in this process, with the same stage, sampling and threads as a main process has.

    Args:
        model: a local folder, a GGUF file, a hub name (`name@revision` pins a commit), "demo" for the embedded
            model, or "smollm2".
        emulate: a slower device to emulate, to compare with a runtime that does.
        settings: dtype, device, threads, compile and trace of `RuntimeConfig`; threads are set for the whole process
            while a generation runs.
    """

    def __init__(self, model: str | Path = "demo", *, emulate: EmulatedDevice | None = None, **settings: Any) -> None:
        config = in_process_config("OrdinaryDecoding", {"model": model, **settings})
        super().__init__(describe(config.model, config.weights), config, emulate)
        self.stage = self.load_whole((PassKind.ONE,))

    @property
    def shape(self) -> dict[str, Any]:
        """Implements `TextGenerator.shape`."""
        return {"method": "autoregressive"}

    def _tokens(
        self, prompt_ids: list[int], params: SamplingParams, stop: StopRule
    ) -> Iterator[tuple[int, bool | None, str | None]]:
        size = len(prompt_ids)
        constraint = constraint_of(self.info, params, size)
        self._sampler = TimedSampler(params, self.stage.recorder, size, self.info.eos_token_ids, constraint)
        capacity = len(prompt_ids) + params.max_new_tokens
        return autoregressive(self.stage, prompt_ids, capacity, self._sampler, stop)

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        return 1.0


def autoregressive(
    stage: LayerRange, prompt_ids: Sequence[int], capacity: int, sampler: Sampler, stop: StopRule
) -> Iterator[tuple[int, None, str | None]]:
    """Yield each new token, None for the draft that it has not, and with the last one why it is the last.

    `stage` holds the whole model; `capacity` is the most tokens that prompt and text can come to.
    """
    history = list(prompt_ids)
    stage.begin(capacity)
    inputs, position, reason = history, 0, None
    while reason is None:
        hidden = stage.run(0, stage.num_layers, inputs, position)
        if not position:
            sampler.note_prompt(stage.logits, hidden, history)
        position = len(history)
        token = sampler.choose(stage.unread_logits(hidden), history)
        history.append(token)
        inputs, reason = [token], stop.finish_reason(token)
        yield token, None, reason
