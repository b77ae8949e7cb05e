"""A setting and what is predicted for it; what the planner ranks."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class TokenTime:
    """What a token takes, in milliseconds, by what it is spent on; expected values over hits and misses."""

    layers: float
    """Layers on the token's path, with no other process at work."""
    head: float
    contention: float
    """What the layers take longer because sub-processes work at the same time."""
    passes: float
    """Starting to run a range of layers."""
    messages: float
    """Sending messages and taking them in."""
    entries: float
    """Importing key/value entries after hits."""
    waiting: float
    """For early starts that are on their way; where the sub-process runs ahead, for entries too."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Plan:
    """One setting and what is predicted for it."""

    exit_layer: int
    k: int
    workers: int
    """Sub-processes; with fewer than k, the first has ⌈k / workers⌉ of the candidates."""
    runs_ahead: bool
    """Whether the only sub-process goes on without exit states."""
    devices: int
    match_rate: float
    time: TokenTime
    ms_per_token: float
    speedup: float
    """Ordinary decoding's time per token over this one's."""
    compute_per_token: float
    """Full passes of all layers, by all processes; ordinary decoding's is 1. Unlike Theorem 4.1's it holds the
    passes by which sub-processes follow a miss; where next to nothing hits they pause, and it is less."""
    ideal_speedup: float
    """With nothing but layers taking time: Theorem 4.1's, for long texts."""
    memory_gb: float | None = None
    """What its fullest device holds; where devices share one memory, what all hold together. None: not known."""


@dataclass(frozen=True)
class StagedPlan:
    """A setting of the staged layout and what is predicted for it."""

    devices: int
    """Stages: each has a device."""
    cuts: tuple[int, ...]
    """The layers behind which stages end, the last stage's excluded."""
    k: int
    """Candidates that each boundary names."""
    rows: int
    """Of a pass, at the most."""
    first_boundary: tuple[float, ...]
    """How often boundary 1, 2, … is the first to name the right token, and how often none does."""
    ms_per_token: float
    speedup: float
    """Ordinary decoding's time per token over this one's."""
    compute_per_token: float
    """Full passes of all layers, by all stages; ordinary decoding's is 1."""
    ideal_speedup: float
    """With nothing but layers taking time, for long texts."""
    memory_gb: float | None = None
    """What its fullest device holds; where devices share one memory, what all hold together. None: not known."""


@dataclass(frozen=True)
class Alternative:
    """A way of decoding without pipelining."""

    name: str
    devices: int
    ms_per_token: float
    speedup: float
    compute_per_token: float
    source: str
    """Where its speed is from: measured or given."""
    memory_gb: float | None = None
    """What its fullest device holds; where devices share one memory, what all hold together. None: not known."""
    fits: bool = True
    """Whether a device has as much memory."""


@dataclass(frozen=True)
class Ranking:
    """What the planner found; the fastest plan of the paper's layout comes first in `plans`."""

    num_layers: int
    max_devices: int
    run_ahead: bool
    """Whether a lone sub-process that can run ahead is taken to do so."""
    plans: tuple[Plan, ...]
    ordinary: Alternative
    parallel: tuple[Alternative, ...]
    """Tensor parallelism on the numbers of devices for which it was measured here; where an efficiency is given, on as
    many devices as the plans have, and on all of them."""
    gains: bool
    """Whether a plan of either layout is at least 5 % faster than ordinary decoding."""
    verdict: str
    """What to do, and every caution."""
    cautions: tuple[str, ...] = ()
    """What makes the figures less certain than they look, a sentence each."""
    footnotes: tuple[str, ...] = ()
    """What is published about ways that are not ranked, a sentence each."""
    staged: tuple[StagedPlan, ...] = ()
    """The staged layout's plans, the fastest first; none where no first boundaries are known."""
