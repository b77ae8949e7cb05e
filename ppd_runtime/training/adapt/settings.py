"""What an adaptation is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.settings.checks import check_bool, check_cuts, check_depth, check_number, even_cuts
from ppd_runtime.training.run import check_out

_USUAL_STAGES = (2, 4)


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """What to learn from, for which boundaries, for how long, and where the heads go.

    Raises:
        ValueError: naming the value and the way out.
    """

    minutes: float = 20.0
    """Time for all steps but loading the model and measuring layouts, which is done for 5 minutes or more."""
    prompts: str | None = None
    """A file of prompts, JSON Lines with a "prompt" and perhaps a "category" in each; default: the package's own."""
    texts: str | None = None
    """A file of texts that are only read, JSON Lines with a "text" in each, or a plain text."""
    stages: Sequence[int] | None = None
    """Numbers of even stages, whose boundaries get heads; default: 2 and 4."""
    layers: Sequence[int] | None = None
    """Layers that get heads, in place of even stages' boundaries."""
    drafter: bool = True
    """Whether to train a drafter too."""
    out: Path | None = None
    """The new folder; default: one in the cache folder, where stages find it."""
    replace: bool = False
    """Whether new parts take the place of all that are there, even where they foresee less of held-out texts."""
    disk_gb: float = 4.0
    """Most gigabytes of hidden states on disk meanwhile."""

    def __post_init__(self) -> None:
        check_number("minutes", self.minutes, 0.01)
        check_number("disk_gb", self.disk_gb, 1e-6)
        for first, second in (("prompts", "texts"), ("stages", "layers")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise ValueError(f"{first} and {second} are both given: give one of them")
        check_bool("replace", self.replace)
        if self.out is not None:
            if self.replace:
                raise ValueError(f"replace with out={str(self.out)!r}, a new folder, which replaces nothing: drop one")
            check_out(self.out)

    def layouts(self, info: ModelInfo) -> list[tuple[int, ...]]:
        """The cuts of each layout that the heads are for; ValueError where the model has no such boundaries."""
        check_depth(info.num_layers, "an early exit", info.name)
        if self.layers is not None:
            check_cuts(info.num_layers, tuple(self.layers), "layers")
            return [tuple(self.layers)]
        usual = [stages for stages in _USUAL_STAGES if stages <= info.num_layers]
        return [even_cuts(info.num_layers, stages) for stages in sorted({*(self.stages or usual)})]
