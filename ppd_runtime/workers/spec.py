"""The specification of a worker."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.named_drafter import NamedInfo
from ppd_runtime.models.native.library import is_available
from ppd_runtime.models.pass_kinds import PassKind, head_kind
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.pipeline.speculation_policy import Always, Guessing, QuickestGuessing, SpeculationPolicy
from ppd_runtime.settings.config import ALWAYS, AUTO, NEVER, SHARED
from ppd_runtime.settings.layouts import Layout, PaperLayout


@dataclass(frozen=True)
class WorkerSpec:
    """All settings with which one worker starts."""

    rank: int
    layout: Layout
    info: ModelInfo
    dtype: torch.dtype
    device: str
    threads: int
    exit_head: str | HeadInfo | OracleHead = SHARED
    cores: tuple[int, ...] = ()
    """CPU cores that the worker is pinned to; empty: none in particular."""
    emulate: EmulatedDevice | None = None
    """A slower device whose times the worker imitates; None: full speed."""
    code: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    """Files of compiled code, one for each layer, by `PassKind`; empty: passes run uncompiled."""

    rows_on: int | None = None
    """CPU threads of passes whose rows share the reading of weights; None: rows need not."""

    guess_tokens: tuple[int, ...] = ()
    """Tokens that this process' exit head guesses among, ascending; empty: the whole vocabulary."""
    speculation: str = AUTO
    """`RuntimeConfig.speculation`."""
    heavy_length: float = math.inf
    """Tokens whose keys and values take about as long to read as the weights."""
    way_seconds: tuple[float, ...] = ()
    """`SpeculationPolicy.way_seconds` of earlier runs."""

    has_whole_model: bool = False
    """Whether a last stage may load all layers too; their weights are in memory that the stages share."""
    drafter: NamedInfo | None = None
    """The drafter that the first or the only stage asks; the others send it the states that it reads, if any."""
    draft_memory_mb: int = 0
    """Megabytes of earlier requests' texts in which a first or single stage looks for guesses."""
    prefix_cache_tokens: int = 0
    """Tokens of earlier prompts whose entries a stage keeps."""
    cache_tokens: int | None = None
    """Room in the KV cache, in tokens of all requests at once; None: unknown."""

    def new_policy(self) -> SpeculationPolicy:
        """The deciding process' policy of how much to guess."""
        if self.speculation in (ALWAYS, NEVER):
            return Always(Guessing.EXITS if self.speculation == ALWAYS else Guessing.NOTHING)
        ways = [Guessing.NOTHING]
        if self.layout.repetitions:
            ways.append(Guessing.REPETITIONS)
        if self.layout.num_processes > 1 or self.drafter is not None:
            ways.append(Guessing.EXITS)
        return QuickestGuessing(ways, self.way_seconds, self.heavy_length)

    @property
    def pass_kinds(self) -> frozenset[int]:
        """The kinds of passes that the worker runs: over one token, and over its candidates, or over rows if they share
        passes."""
        if isinstance(self.layout, PaperLayout):
            return frozenset({PassKind.ONE, self.layout.candidates(self.rank)})
        shares = is_available(torch.device(self.device), self.dtype) or self.rank == self.layout.drafter
        return frozenset({PassKind.ONE, PassKind.SEVERAL} if shares else {PassKind.ONE})

    @property
    def code_kinds(self) -> frozenset[int]:
        """The kinds that need compiled code: those of passes, and that of the head."""
        return self.pass_kinds | {head_kind(len(self.guess_tokens))}

    @property
    def first_layer(self) -> int:
        """The first layer that the worker holds, from 0."""
        return self.layout.layers(self.rank, self.info.num_layers)[0]

    @property
    def num_layers(self) -> int:
        """The number of layers up to the worker's last one: all, those of the head start, or up to the cut."""
        return self.layout.layers(self.rank, self.info.num_layers)[1]
