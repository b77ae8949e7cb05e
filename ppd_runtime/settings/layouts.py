"""The two layouts: how the processes of a runtime share a model's layers, and what they are called."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from ppd_runtime.settings.checks import can_run_ahead

DECIDER = 0
"""Rank of the process that decides: the main process, or the last stage."""
CLIENT = -1
"""Stands for the caller among ranks."""


class _Layout(ABC):
    """Processes with ranks from 0 to `num_processes` - 1, DECIDER among them; layers are half-open ranges from 0."""

    k: int
    """Candidates for each token; in stages, at each boundary."""

    @property
    @abstractmethod
    def num_processes(self) -> int:
        """The main process or the last stage, and all others."""

    @property
    @abstractmethod
    def needed(self) -> frozenset[int]:
        """Ranks without which no token is decided; the loss of any other costs time only."""

    @abstractmethod
    def layers(self, rank: int, num_layers: int) -> tuple[int, int]:
        """First and end of the layers that a process of a model of `num_layers` layers holds."""

    def head_start(self, num_layers: int) -> int:
        """Layers that a sub-process runs for a candidate, d − d̄ of d; 0 in the staged layout."""
        return 0

    @abstractmethod
    def name(self, rank: int) -> str:
        """A process' name in a list, such as "sub-process 1" or "stage 2"."""

    @abstractmethod
    def short_name(self, rank: int) -> str:
        """A worker's name as one word, for command lines and labels."""

    @abstractmethod
    def place(self, rank: int) -> int:
        """A process's row in a picture, from 0 at the top."""

    @abstractmethod
    def shape(self) -> dict[str, Any]:
        """The layout's settings as JSON values."""

    @abstractmethod
    def title(self, num_layers: int) -> str:
        """The layout of a model of `num_layers` layers, in a few words."""

    def named(self, rank: int) -> str:
        """A process' name in a sentence."""
        name = self.name(rank)
        return f"the {name}" if name in ("client", "main process", "drafter") else name


@dataclass(frozen=True)
class PaperLayout(_Layout):
    """The paper's: a main process runs all layers, sub-processes the first ones for candidates."""

    k: int
    exit_layer: int
    """The layer after which the next token is predicted, d̄."""
    workers: int
    """Sub-processes, at most k."""
    run_ahead: bool = True
    """Whether a sub-process runs without exit states if it can."""
    cuts: ClassVar[tuple[int, ...]] = ()
    """There are no borders between stages."""
    drafter: ClassVar[int | None] = None
    """There is no draft model's process."""
    tells_hits: ClassVar[bool] = True
    """Whether a token's message says which candidate was right; the first stage tells that later."""
    guesser: ClassVar[int] = 1
    """The first sub-process; others choose too."""
    repetitions: ClassVar[bool] = False
    """No candidates come from the text's own repetitions."""

    @property
    def num_processes(self) -> int:
        return 1 + self.workers

    @property
    def needed(self) -> frozenset[int]:
        return frozenset({DECIDER})

    def layers(self, rank: int, num_layers: int) -> tuple[int, int]:
        return 0, num_layers if rank == DECIDER else self.head_start(num_layers)

    def head_start(self, num_layers: int) -> int:
        return num_layers - self.exit_layer

    def candidates(self, rank: int) -> int:
        """Candidates that a process runs as one pass: its share of k, and 1 for the main process."""
        return 1 if rank == DECIDER else len(range(rank, self.k + 1, self.workers))

    def runs_ahead(self, num_layers: int) -> bool:
        """Whether the only sub-process reads exit states off its own layers, in a model of `num_layers` layers."""
        return self.run_ahead and can_run_ahead(num_layers, self.exit_layer, self.k)

    def name(self, rank: int) -> str:
        return "client" if rank == CLIENT else f"sub-process {rank}" if rank else "main process"

    def short_name(self, rank: int) -> str:
        return f"sub-{rank}" if rank else "main"

    def place(self, rank: int) -> int:
        return rank

    def shape(self) -> dict[str, Any]:
        return {"k": self.k, "exit_layer": self.exit_layer}

    def title(self, num_layers: int) -> str:
        subs = f"{self.workers} sub-process{'es' if self.workers > 1 else ''}"
        return f"exit after layer {self.exit_layer} of {num_layers}, {subs}"


@dataclass(frozen=True)
class StagedLayout(_Layout):
    """Stages in a row, each with its own layers; the last one, DECIDER, decides. A single stage has all layers.

    A draft model may have a process of its own, whose rank comes after the stages'; its layers are its model's.
    """

    cuts: tuple[int, ...]
    rows: int
    """Most rows of a pass."""
    k: int
    row_cost: float = 0.0
    """A further row's time as a share of the first one's; rows less likely than this do not run."""
    guess_vocab: int | None = None
    """Tokens that boundaries guess among; None: the whole vocabulary."""
    repetitions: bool = True
    """Whether candidates come from the text's own repetitions, too."""
    drafts: bool = False
    """Whether a draft model has a process of its own."""

    @property
    def num_stages(self) -> int:
        """The stages, each in a process."""
        return len(self.cuts) + 1

    @property
    def num_processes(self) -> int:
        return self.num_stages + self.drafts

    @property
    def drafter(self) -> int | None:
        """The rank of the draft model's process; None without one."""
        return self.num_stages if self.drafts else None

    @property
    def guesser(self) -> int:
        """The rank of the stage that chooses the guesses to run: the first one, or the only one."""
        return 1 if self.cuts else DECIDER

    @property
    def tells_hits(self) -> bool:
        """Whether a token's message says which candidate was right: a single stage knows it at once."""
        return not self.cuts

    @property
    def needed(self) -> frozenset[int]:
        return frozenset(range(self.num_stages))

    def layers(self, rank: int, num_layers: int) -> tuple[int, int]:
        if rank == self.drafter:
            return 0, num_layers
        borders = (0, *self.cuts, num_layers)
        place = self.place(rank)
        return borders[place], borders[place + 1]

    def name(self, rank: int) -> str:
        if rank == self.drafter:
            return "drafter"
        return "client" if rank == CLIENT else f"stage {self.place(rank) + 1}"

    def short_name(self, rank: int) -> str:
        return "drafter" if rank == self.drafter else f"stage-{self.place(rank) + 1}"

    def place(self, rank: int) -> int:
        return rank if rank == self.drafter else (rank - 1) % self.num_stages

    def shape(self) -> dict[str, Any]:
        return {"cuts": list(self.cuts), "rows": self.rows, "k": self.k}

    def title(self, num_layers: int) -> str:
        if not self.cuts:
            return f"one stage of {num_layers} layers"
        return f"{self.num_stages} stages cut after layers {', '.join(map(str, self.cuts))} of {num_layers}"


Layout = PaperLayout | StagedLayout
