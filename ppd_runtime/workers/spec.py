"""What a worker is told of itself."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ppd_runtime.checks import can_run_ahead
from ppd_runtime.config import ALWAYS, AUTO, NEVER, SHARED
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.pass_kinds import PassKind, head_kind
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.pipeline.messages import MAIN
from ppd_runtime.pipeline.speculation_policy import Always, Guessing, QuickestGuessing, SpeculationPolicy


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that one worker is started with."""

    rank: int
    """0 is the main process, 1 to `num_subs` the sub-processes."""
    k: int
    num_subs: int
    info: ModelInfo
    exit_layer: int
    dtype: torch.dtype
    device: str
    threads: int
    exit_head: str | HeadInfo | OracleHead = SHARED
    cores: tuple[int, ...] = ()
    """CPU cores to stay on; empty: wherever the system likes."""
    emulate: EmulatedDevice | None = None
    """A slower device whose times to keep to; None: as fast as it goes."""
    code: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    """Files of compiled code, one a layer, by `PassKind`; empty: the library runs them."""

    run_ahead: bool = True
    """Whether a sub-process that can go on without exit states does."""
    cuts: tuple[int, ...] = ()
    """The staged layout's borders, each the number of layers before it; empty: the paper's layout."""
    rows: int = 1
    """Of a pass of the staged layout, at the most."""
    guess_tokens: tuple[int, ...] = ()
    """Those that its boundary's head guesses among, ascending; empty: the whole vocabulary."""
    row_cost: float = 0.0
    """What a further one of them adds to a pass, as a share of the first one's time."""
    speculation: str = AUTO
    """As `RuntimeConfig` has it."""
    heavy_length: float = math.inf
    """About how many tokens' keys and values take as long to read as the weights."""
    way_seconds: tuple[float, ...] = ()
    """As `SpeculationPolicy` has it, from earlier runs."""
    repetitions: bool = True
    """Whether the staged layout has candidates from the text's own repetitions."""

    prefix_cache_tokens: int = 0
    """Of earlier prompts, whose entries a stage keeps."""
    cache_tokens: int | None = None
    """Of all requests at a time; None: not known."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the only sub-process reads exit states off its own stage."""
        return self.run_ahead and not self.cuts and can_run_ahead(self.info.num_layers, self.exit_layer, self.k)

    def new_policy(self) -> SpeculationPolicy:
        """How much the process that decides tokens has guessed."""
        if self.speculation in (ALWAYS, NEVER):
            return Always(Guessing.EXITS if self.speculation == ALWAYS else Guessing.NOTHING)
        between = [Guessing.REPETITIONS] if self.cuts and self.repetitions else []
        return QuickestGuessing([Guessing.NOTHING, *between, Guessing.EXITS], self.way_seconds, self.heavy_length)

    @property
    def num_stages(self) -> int:
        """Stages of the staged layout; 0 in the paper's layout."""
        return len(self.cuts) + 1 if self.cuts else 0

    @property
    def num_candidates(self) -> int:
        """Candidates that it runs as one pass: its share of k, and 1 for the main process."""
        return 1 if self.rank == MAIN or self.cuts else len(range(self.rank, self.k + 1, self.num_subs))

    @property
    def pass_kinds(self) -> frozenset[int]:
        """The kinds of passes that it runs: over one token, and over its candidates."""
        if self.cuts:
            return frozenset({PassKind.ONE, PassKind.SEVERAL})
        return frozenset({PassKind.ONE, self.num_candidates})

    @property
    def code_kinds(self) -> frozenset[int]:
        """What it runs compiled code for: those and its head."""
        return self.pass_kinds | {head_kind(len(self.guess_tokens))}

    @property
    def first_layer(self) -> int:
        """The first layer that it holds, from 0."""
        if not self.cuts:
            return 0
        return self.cuts[-1] if self.rank == MAIN else (0, *self.cuts)[self.rank - 1]

    @property
    def num_layers(self) -> int:
        """The layer up to which it holds them: all of them, those of a head start, or those up to its cut."""
        if self.cuts and self.rank != MAIN:
            return self.cuts[self.rank - 1]
        return self.info.num_layers if self.rank == MAIN else self.info.num_layers - self.exit_layer
