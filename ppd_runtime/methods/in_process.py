"""What decoding methods in this process share: threads, the clock, the ledger and the trace of a request."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ppd_runtime.client.ending import Ending
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.steps import Step, Steps, Totals
from ppd_runtime.models.build import load_stage, share_weights
from ppd_runtime.models.checkpoint.description import ModelInfo, load_tokenizer
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype, cpu_threads
from ppd_runtime.models.checkpoint.generation import generation_defaults
from ppd_runtime.models.compiling import code_for, wants_code
from ppd_runtime.models.stage.emulation import EmulatedDevice, emulated, emulation_note
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.results import NOTHING_NEW, Live, News, PathStats
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.checks import check_threads
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.text import StopRule
from ppd_runtime.tracing.trace import Trace

_RANK = 0  # a main process's


class OneProcessDecoding(TextGenerator):
    """Decoding with one stage that holds the whole model; subclasses load it with `load_whole`.

    Args:
        info: the model.
        config: dtype, device, threads, whether passes over few tokens run in compiled code, and whether to trace.
        emulate: a slower device to emulate.
    """

    stage: LayerRange
    _sampler: Sampler
    """The running request's sampler."""

    def __init__(self, info: ModelInfo, config: RuntimeConfig, emulate: EmulatedDevice | None = None) -> None:
        check_threads("threads", config.threads_per_worker)
        super().__init__(info, load_tokenizer(info), generation_defaults(info, config.generation_config))
        self.config, self._emulate = config, emulate

    def load_whole(self, pass_kinds: Sequence[int]) -> LayerRange:
        """The whole model, with code for these kinds of passes if they are compiled, which `config` then says."""
        info, config = self.info, self.config
        place = choose_device(config.device, info.weights)
        wanted = wants_code(config.compile, place)
        number = choose_dtype(config.dtype, place, info, config.threads_per_worker, compiled=wanted)
        code = code_for(config.compile, info, number, place, pass_kinds)
        self.config = replace(config, compile=bool(code))
        share_weights(info, number, place, bool(code))
        rows_on = config.threads_per_worker if config.rows_share_weights else None
        stage = load_stage(info, info.num_layers, number, place, code, rows_on=rows_on)
        return emulated(stage, self._emulate)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described()})"

    def _described(self) -> str:
        return f"{self.info.name!r}, {self.info.num_layers} layers, {self.stage.device}, {self.dtype}"

    @property
    def dtype(self) -> str:
        """The dtype of weights and passes, such as float32; what "auto" came to."""
        return str(self.stage.model.dtype).removeprefix("torch.")

    @abstractmethod
    def _tokens(
        self, prompt_ids: list[int], params: SamplingParams, stop: StopRule
    ) -> Iterator[tuple[int, bool | None, str | None]]:
        """Yield each new token, whether its draft was right, and with the last one why it is the last."""

    def _counted(self, totals: Totals) -> Totals:
        """The totals with what the method counted in this request."""
        return totals

    def _steps(self, prompt_ids: list[int], params: SamplingParams, live: int, ending: Ending) -> Steps:
        recorder, passes = self.stage.recorder, self.stage.layer_passes
        ending.start_clock()
        spent, first, first_ledger, reason = 0.0, 0.0, None, None
        with cpu_threads(self.config.threads_per_worker):
            stop = StopRule(params, self.info.eos_token_ids, self.tokenizer, prompt_ids)
            tokens = self._tokens(prompt_ids, params, stop)
            recorder.begin(self.config.trace, live == Live.PASSES)
            while reason is None:
                began = recorder.resume()
                token, right, reason = next(tokens)
                spent += recorder.pause() - began  # the caller's own time between two tokens does not count
                reason = reason or ending.reason()
                first, first_ledger = first or spent, first_ledger or recorder.ledger()
                yield Step(token, right, reason is not None, self._sampler.take_logprobs(), self._news())
        path = PathStats(
            latency_s=spent,
            time_to_first_token_s=first,
            main_layer_passes=self.stage.layer_passes - passes,
            ledger=recorder.ledger(),
            first_token_ledger=first_ledger or recorder.ledger(),
        )
        yield self._counted(Totals(reason, path, trace=self._trace()))

    def _news(self) -> News:
        watched = self.stage.recorder.take_watched(_RANK)
        return News(spans=(watched,)) if watched else NOTHING_NEW

    def _trace(self) -> Trace | None:
        recorded = self.stage.recorder.spans(_RANK)
        return Trace(self.info.num_layers, None, emulation_note(self._emulate), (recorded,)) if recorded else None
