"""One request through the state machines and real stages, in one thread; what the pipeline tests build on."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from machine_network import MachineNetwork
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.methods.ordinary import autoregressive
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.path_range import PathRange
from ppd_runtime.models.stage.state_range import StateRange, range_class
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import BoundaryHead, ModelHead, OracleHead
from ppd_runtime.pipeline.messages import MISS, NOT_ASKED, Begin, Token
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.speculation_policy import SpeculationPolicy
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.tree import MOST_HELD
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import CLIENT
from ppd_runtime.text import StopRule

PROMPTS = [" ".join(f"word{i}" for i in range(n)) for n in (1, 2, 3, 5, 8, 13, 21)]
GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=14, temperature=0.9, top_p=0.95, top_k=40, seed=7, ignore_eos=True)


@functools.cache
def _layers(info: ModelInfo, last: int, dtype: torch.dtype, first: int = 0) -> PreTrainedModel:
    return load_layers(info, last, dtype, "cpu", first)


class _Recording(LayerRange):
    """A stage that keeps the hidden states which decided a token, and the ranges of layers that were run."""

    decisive: list[Tensor]
    ranges: list[tuple[int, int]]

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Note the range, then do as a stage does."""
        self.ranges.append((first, last))
        return super().run(first, last, inputs, position)

    def logits(self, hidden: Tensor) -> Tensor:
        """Keep the newest hidden state, then do as a stage does."""
        self.decisive.append(hidden[:, -1:].clone())
        return super().logits(hidden)


class RecordingStage(_Recording, LayerRange):
    """A stage that records."""


class RecordingStateRange(_Recording, StateRange):
    """A stage with states that records."""


class RecordingPathRange(_Recording, PathRange):
    """A stage of layers that attend in chunks that records."""


_RECORDING: dict[type[LayerRange], type[_Recording]] = {
    LayerRange: RecordingStage,
    StateRange: RecordingStateRange,
    PathRange: RecordingPathRange,
}


@dataclass
class Decoded:
    """What a run gave."""

    tokens: list[int]
    reason: str
    decisive: list[Tensor]
    winners: list[int] = field(default_factory=list)
    main: MainProcess | None = None
    subs: list[SubProcess | RunAheadSubProcess] = field(default_factory=list)
    stages: list[LayerRange] = field(default_factory=list)
    network: MachineNetwork | None = None
    first: FirstStage | None = None

    @property
    def hits(self) -> int:
        """Passes that began with a sub-process' early start."""
        return sum(winner not in (MISS, NOT_ASKED) for winner in self.winners)


def same(got: Decoded, expected: Decoded) -> None:
    """Tokens and the hidden states that decided them, to the last bit."""
    assert got.tokens == expected.tokens
    assert got.reason == expected.reason
    assert len(got.decisive) == len(expected.decisive)
    assert all(torch.equal(a, b) for a, b in zip(got.decisive, expected.decisive, strict=True))


@dataclass(frozen=True)
class Bench:
    """A model and how to decode with it."""

    info: ModelInfo
    dtype: torch.dtype

    @staticmethod
    def of(folder: Path | str, dtype: str = "float32") -> "Bench":
        """For a model folder."""
        return Bench(describe(str(folder)), getattr(torch, dtype))

    def stage(self, last: int | None = None, first: int = 0) -> _Recording:
        """Layers of the model from `first` on, all of them by default."""
        layers = _layers(self.info, last or self.info.num_layers, self.dtype, first)
        stage = _RECORDING[range_class(layers.config)](layers, None, first, self.info.longest_in_chunks)
        stage.decisive, stage.ranges = [], []
        return stage

    def prompt_ids(self, text: str) -> list[int]:
        """A text's tokens."""
        return load_tokenizer(self.info).encode(text)

    def text(self, token_ids: Sequence[int]) -> str:
        """What tokens say, without special ones."""
        return load_tokenizer(self.info).decode(token_ids, skip_special_tokens=True)

    def sampler(self, prompt: Sequence[int], params: SamplingParams) -> Sampler:
        """A request's, as a worker makes it."""
        constraint = constraint_of(self.info, params, len(prompt))
        return Sampler(params, len(prompt), self.info.eos_token_ids, constraint)

    def ordinary(self, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        """The oracle."""
        stage = self.stage()
        capacity = len(prompt) + params.max_new_tokens
        told = list(autoregressive(stage, prompt, capacity, self.sampler(prompt, params), self._stop(params)))
        return Decoded([token for token, *_ in told], told[-1][-1] or "", stage.decisive)

    def pipelined(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        k: int,
        exit_layer: int,
        head: OracleHead | None = None,
        seed: int | None = None,
        impatience: float = 0.0,
        lost: Sequence[int] = (),
        workers: int | None = None,
        run_ahead: bool = False,
        policy: SpeculationPolicy | None = None,
    ) -> Decoded:
        """PPD over a network with the order of `seed` (None: fair); sub-processes in `lost` never answer."""
        network, ranks = MachineNetwork(seed, impatience), range(1, (workers or k) + 1)
        begin, sampler = begin_message(prompt, params), self.sampler(prompt, params)
        for rank in lost:
            network.add(rank, iter_forever())
        main = MainProcess(self.stage(), exit_layer, ranks, network.send, begin, not run_ahead, policy)
        subs: list[SubProcess | RunAheadSubProcess] = []
        for rank in (rank for rank in ranks if rank not in lost):
            stage = self.stage(self.info.num_layers - exit_layer)
            exit_head = head or ModelHead(stage, sampler)
            if run_ahead:
                stage.layers_at_once = 1 + (seed or 0) % stage.num_layers
                sub = RunAheadSubProcess(stage, exit_head, rank, network.send, begin)
            else:
                sub = SubProcess(stage, exit_head, rank, ranks, k, network.send, begin, ranks_ahead=True)
            network.add(rank, sub.serve())
            subs.append(sub)
        network.add(0, main.decode(sampler, self._stop(params)))
        network.run()
        told = [message for to, message in network.sent if to == CLIENT and isinstance(message, Token)]
        return Decoded(
            tokens=[message.token_id for message in told],
            reason=main.finish_reason,
            decisive=main.stage.decisive,
            winners=[message.winner for message in told],
            main=main,
            subs=subs,
            network=network,
        )

    def staged(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        cuts: Sequence[int],
        k: int,
        rows: int = 1,
        seed: int | None = None,
        impatience: float = 0.0,
        head: BoundaryHead | None = None,
        policy: SpeculationPolicy | None = None,
    ) -> Decoded:
        """The staged layout over a network with the order of `seed` (None: fair)."""
        network, begin = MachineNetwork(seed, impatience), begin_message(prompt, params)
        sampler = self.sampler(prompt, params)
        stages = [self.stage(last, first) for first, last in pairwise([0, *cuts, self.info.num_layers])]
        rows_of = [TreeRange(stage, MOST_HELD) for stage in stages]
        size = len(stages)
        heads = [head or ModelHead(stage, sampler) for stage in stages]
        constraint = sampler.constraint
        first = FirstStage(rows_of[0], heads[0], size, k, rows, network.send, begin, constraint=constraint)
        others = [MiddleStage(rows_of[i], heads[i], i + 1, size, k, network.send, begin) for i in range(1, size - 1)]
        last = LastStage(rows_of[-1], self.info.num_layers, range(1, size), network.send, begin, policy)
        for machine in (first, *others):
            network.add(machine.rank, machine.serve())
        network.add(0, last.decode(sampler, self._stop(params)))
        network.run()
        told = [message for to, message in network.sent if to == CLIENT and isinstance(message, Token)]
        return Decoded(
            tokens=[message.token_id for message in told],
            reason=last.finish_reason,
            decisive=stages[-1].decisive,
            first=first,
            stages=stages,
            network=network,
        )

    def _stop(self, params: SamplingParams) -> StopRule:
        return StopRule(params, self.info.eos_token_ids, load_tokenizer(self.info))

    def with_eos(self, token_id: int) -> "Bench":
        """The same model with another end-of-text token."""
        return replace(self, info=replace(self.info, eos_token_ids=frozenset([token_id])))


def iter_forever():
    """A machine that takes messages and never says anything."""
    return
    yield


def begin_message(prompt: Sequence[int], params: SamplingParams) -> Begin:
    """The request as the client would send it."""
    return Begin(CLIENT, 1, prompt, params, live=True)


def rehearsed(prompt: Sequence[int], tokens: Sequence[int], rate: float, vocab_size: int, seed: int = 0) -> OracleHead:
    """An exit head that is told the text."""
    return OracleHead(((*prompt, *tokens),), rate, vocab_size, seed)
