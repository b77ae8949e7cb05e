"""The options of the methods that draft in one process, and the words that they may be given."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ppd_runtime.cli.options import group
from ppd_runtime.methods.choices import ACCEPTANCE_RULES, STOPPING_RULES, SWIFT_WIDEST, SWIFT_WINDOW, SearchSettings

StoppingName = Enum("StoppingName", {name: name for name in STOPPING_RULES}, type=str)  # type: ignore[misc]
Acceptance = Enum("Acceptance", {name: name for name in ACCEPTANCE_RULES}, type=str)  # type: ignore[misc]


@dataclass(frozen=True)
class DraftingOptions:
    """What several methods have; None is the method's own default."""

    num_speculations: int | None = None
    """Tokens in a draft (at the most)."""
    stopping: StoppingName | None = None
    """When to stop drafting; default: the method's own."""
    threshold: float | None = None
    """Stop drafting below this confidence."""
    adaptive: bool | None = None
    """Let the threshold follow the acceptance rate; default: the method's own."""
    probe: Path | None = None
    """A folder of `ppd train probe`, for --stopping probe."""
    adapter: Path | None = None
    """A folder of `ppd train adapter`, for kangaroo."""
    acceptance: Acceptance | None = None
    """rejection: speculative sampling, as the papers."""


@dataclass(frozen=True)
class SwiftOptions:
    """What SWIFT has besides."""

    layer_set: Path | None = None
    """A file of `ppd search-layers`; default: search while decoding."""
    skip_ratio: float = SearchSettings.skip_ratio
    """Share of attentions and MLPs."""
    search_steps: int = SearchSettings.steps
    """Sets to try at the most."""
    bayes_interval: int = SearchSettings.bayes_interval
    """Choose every so many sets by Bayesian optimisation."""
    context_window: int = SWIFT_WINDOW
    """Generated tokens by which sets are scored."""
    search_seed: int = SearchSettings.seed
    """The seed of the random sets."""
    widest: int = SWIFT_WIDEST
    """Candidates for a doubtful place; 1: chains."""


DRAFTING = group(DraftingOptions, panel="Drafting (layerskip, adaspeed, kangaroo, swift)")
SWIFT = group(SwiftOptions, panel="Swift", given_only=True)
