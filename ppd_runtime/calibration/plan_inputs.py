"""What a plan needs of a model, measured here: match rates of tokens after the first, and a calibration."""

from collections.abc import Sequence
from dataclasses import replace

from ppd_runtime.calibration.calibrate import CalibrationConditions, Calibrator
from ppd_runtime.calibration.stages_at_work import with_stages_at_work
from ppd_runtime.checks import even_cuts
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.tradeoff import MatchRates
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.measure.match_rate_report import summarise
from ppd_runtime.measure.match_rates import MatchRateMeter, MatchRateSetting, TextPlaces
from ppd_runtime.measure.prompt_files import read_prompts
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.sampling_params import SamplingParams


class Measurement:
    """A model and the prompts to measure it with.

    Raises:
        ValueError: for a model, a setting or a file of prompts that cannot be used, before anything is measured.
    """

    def __init__(
        self,
        model: str,
        prompts: str | Sequence[str] = "demo",
        *,
        limit: int | None = None,
        sampling: SamplingParams | None = None,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        weights: str | None = None,
        compile: bool | None = None,
        generation_config: bool = True,
    ) -> None:
        texts = [prompt.text for prompt in read_prompts(prompts, limit)] if isinstance(prompts, str) else prompts
        self.ordinary = OrdinaryDecoding(
            model,
            dtype=dtype,
            device=device,
            threads=threads,
            weights=weights,
            compile=compile,
            generation_config=generation_config,
        )
        self.sampling = self.ordinary.settled(sampling or SamplingParams())
        self.prompts = self._validator(texts)

    @property
    def num_layers(self) -> int:
        """The model's layers."""
        return self.ordinary.info.num_layers

    def match_rates(
        self, ks: Sequence[int], progress: Progress = lambda line: None, most_stages: int = 1
    ) -> MatchRates:
        """Rates of every exit layer from half depth on, and first boundaries of 2 to `most_stages` even stages.

        The first token of a text, which has no candidates, is out.
        """
        layers = range((self.num_layers + 1) // 2, self.num_layers)
        vocab_size = self.ordinary.info.vocab_size
        cuts = tuple(even_cuts(self.num_layers, n) for n in range(2, min(most_stages, self.num_layers) + 1))
        setting = MatchRateSetting(self.num_layers, vocab_size, tuple(layers), tuple(ks), self.sampling, cuts)
        meter = MatchRateMeter(self.ordinary, setting)
        texts = []
        for number, prompt in enumerate(self.prompts):
            progress(f"measuring match rates, prompt {number + 1} of {len(self.prompts)}")
            text = _after_first(meter.measure(prompt, self.sampling.seed + number))
            texts += [text] if text.places[setting.rankings[0]][0] else []
        if not texts:
            raise ValueError("every text ended with its first token: give other prompts")
        report = summarise(self.ordinary.info.name, "", setting, texts)
        rates, found = report.runtime_rates, report.first_boundaries[setting.rankings[0]]
        table = {(layer, k): rates.rate(layer, k) for layer in layers for k in setting.ks}
        boundaries = {(row.cuts, k): row.shares(k) for row in found for k in setting.ks}
        source, weights = f"{len(texts)} prompts, {rates.comparisons} tokens", self.ordinary.info.weights_name
        return MatchRates(source, table, self.num_layers, boundaries, weights)

    def calibrate(
        self,
        max_devices: int,
        k: int,
        widths: Sequence[int] = (),
        stages: Sequence[int] = (),
        progress: Progress = lambda line: None,
    ) -> Calibration:
        """The times of this machine's parts of a token, of passes over so many `widths`, and of so many `stages`."""
        conditions = self.conditions(max_devices, k, widths)
        with Calibrator(self.ordinary, conditions, progress) as calibrator:
            times = calibrator.measure()
        return with_stages_at_work(times, self.ordinary, conditions, stages, progress)

    def conditions(self, max_devices: int, k: int, widths: Sequence[int] = ()) -> CalibrationConditions:
        """How to calibrate: the same prompts, sampling and text length."""
        return CalibrationConditions(max_devices, k, self.prompts, replace(self.sampling, ignore_eos=True), widths)

    def _validator(self, texts: Sequence[str]) -> list[list[int]]:
        most, new = self.ordinary.info.max_positions, self.sampling.max_new_tokens
        if new < 2:
            raise ValueError(f"max_new_tokens={new}: a plan is for tokens after the first, give at least 2")
        fitting = [ids for ids in self.ordinary.encoded(texts) if ids and (most is None or len(ids) + new <= most)]
        if not fitting:
            raise ValueError(
                f"none of the {len(texts)} prompts and max_new_tokens={new} fit the model's {most} positions: "
                "give shorter prompts or ask for fewer tokens"
            )
        return fitting


def _after_first(text: TextPlaces) -> TextPlaces:
    return replace(text, places={ranking: [row[1:] for row in rows] for ranking, rows in text.places.items()})
