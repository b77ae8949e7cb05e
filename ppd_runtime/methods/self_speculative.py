"""`SelfSpeculativeDecoding`: LayerSkip, AdaSPEED, SWIFT and Kangaroo with the same `generate` and `stream`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppd_runtime.cost_model.theory import drafting_ratio
from ppd_runtime.methods.choices import ACCEPTANCE_RULES
from ppd_runtime.methods.in_process import OneProcessDecoding
from ppd_runtime.methods.speculation import MethodSettings, SpeculationCounts, speculate
from ppd_runtime.methods.steps import Totals
from ppd_runtime.methods.verification import acceptance_rule
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.results import Speculation
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.checks import check_choice
from ppd_runtime.settings.config import IN_PROCESS_SETTINGS, RuntimeConfig, in_process_config
from ppd_runtime.settings.fields import takes_settings
from ppd_runtime.text import StopRule


@takes_settings(RuntimeConfig, IN_PROCESS_SETTINGS)
class SelfSpeculativeDecoding(OneProcessDecoding):
    """Drafts with part of a model and verifies with the whole of it, in this process.

    Args:
        method: which method and how, such as `LayerSkipSettings()`.
        model: a local folder, a GGUF file, a hub name (`name@revision` pins a commit), "demo" for the embedded
            model, or "smollm2".
        acceptance: shared-noise (the tokens are ordinary decoding's, sampled ones too) or rejection (speculative
            sampling as in the papers: as exact a sampler, but other tokens than ordinary decoding's).
        stage: the loaded whole model, to share with others, one at a time; dtype, device and compile are the loaded
            one's. None loads one.
        settings: dtype, device, threads, compile and trace of `RuntimeConfig`; threads are set for the whole process
            while a generation runs.

    Raises:
        ValueError: for settings that the model cannot be run with, before its weights are read.
    """

    def __init__(
        self,
        method: MethodSettings,
        model: str | Path = "demo",
        *,
        acceptance: str = "shared-noise",
        stage: LayerRange | None = None,
        **settings: Any,
    ) -> None:
        check_choice("acceptance", acceptance, ACCEPTANCE_RULES)
        config = in_process_config("SelfSpeculativeDecoding", {"model": model, **settings})
        info = describe(config.model, config.weights)
        start = method.prepare(info)
        super().__init__(info, config)
        self._acceptance, self._progress = acceptance, SpeculationCounts()
        self._name = type(method).__name__.removesuffix("Settings").lower()
        self.stage = stage or self.load_whole(method.pass_kinds)
        self.stage.compile_for(*method.pass_kinds)  # another method may have loaded it
        self.method = start(self.stage)

    @property
    def shape(self) -> dict[str, Any]:
        """Implements `TextGenerator.shape`."""
        return {"method": self._name}

    def _described(self) -> str:
        return f"{self._name}, {super()._described()}"

    def _tokens(
        self, prompt_ids: list[int], params: SamplingParams, stop: StopRule
    ) -> Iterator[tuple[int, bool | None, str | None]]:
        self._progress = SpeculationCounts()
        size = len(prompt_ids)
        constraint = constraint_of(self.info, params, size)
        sampler = self._sampler = Sampler(params, size, self.info.eos_token_ids, constraint)
        rule = acceptance_rule(self._acceptance, sampler, size, self.method.steered_by)
        return speculate(self.method, self.stage, rule, prompt_ids, params.max_new_tokens, stop, self._progress)

    def _counted(self, totals: Totals) -> Totals:
        found = self._progress.outcome(self.method.draft_cost)
        return replace(totals, speculation=found, run_lengths=tuple(self._progress.lengths))

    def _predicted_ratio(self, match_rate: float | None, num_new_tokens: int, totals: Totals) -> float:
        return _predicted_ratio(totals.speculation, num_new_tokens) if totals.speculation else 1.0


def _predicted_ratio(found: Speculation, num_new_tokens: int) -> float:
    """SWIFT's equation 6 for all tokens but the prompt pass's, which costs the same in ordinary decoding."""
    verifications = len(found.drafted)
    if not verifications or num_new_tokens == 1:
        return 1.0
    length, steps = (num_new_tokens - 1) / verifications, sum(found.drafted) / verifications
    return drafting_ratio(max(length, 1.0), steps, found.draft_cost)
