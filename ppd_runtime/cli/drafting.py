"""The options of the methods that draft in one process, and the words that they may be given."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ppd_runtime.cli.options import group


class StoppingName(str, Enum):
    """When AdaSPEED stops drafting."""

    constant = "constant"
    confidence = "confidence"
    product = "product"
    probe = "probe"


class Acceptance(str, Enum):
    """How drafts are judged."""

    shared_noise = "shared-noise"
    rejection = "rejection"


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
    """What SWIFT has besides; None is its own default."""

    layer_set: Path | None = None
    """A file of `ppd search-layers`; default: search while decoding."""
    skip_ratio: float | None = None
    """Share of attentions and MLPs; default: 0.45."""
    search_steps: int | None = None
    """Sets to try at the most; default: 1000."""
    bayes_interval: int | None = None
    """Choose every so many sets by Bayesian optimisation; default: 25."""
    context_window: int | None = None
    """Generated tokens by which sets are scored; default: 32."""
    search_seed: int | None = None
    """Which random sets; default: 0."""
    widest: int | None = None
    """Candidates for a doubtful place; default: 10; 1: chains."""


DRAFTING = group(DraftingOptions, panel="Drafting (layerskip, adaspeed, kangaroo, swift)")
SWIFT = group(SwiftOptions, panel="Swift")
