"""Names of methods, and words and numbers of their settings; imports little, for the command line's help."""

from dataclasses import dataclass
from importlib.util import find_spec

from ppd_runtime.settings.checks import check_share, check_whole

SELF_SPECULATIVE_NAMES = ("layerskip", "adaspeed", "kangaroo", "swift")
METHODS = ("autoregressive", "ppd", *SELF_SPECULATIVE_NAMES)
STOPPING_RULES = ("constant", "confidence", "product", "probe")
"""Constant length; Draft & Verify's; AdaSPEED's; AdaSPEED's with its probe's predictions for probabilities."""
ACCEPTANCE_RULES = ("shared-noise", "rejection")
SWIFT_WIDEST = 10
"""Candidates that a doubtful place has."""
SWIFT_WINDOW = 32
"""γ: generated tokens by which the search scores a set."""


@dataclass(frozen=True)
class SearchSettings:
    """How to search; the values are the paper's (appendix B.2).

    Raises:
        ValueError: for numbers out of range, and where Bayesian optimisation is wanted and not installed.
    """

    skip_ratio: float = 0.45
    """r: the share of the model's attentions and MLPs that are left out."""
    steps: int = 1000
    """S: suggestions that are tried at the most; with 0 the first set stays."""
    bayes_interval: int = 25
    """β: every β-th suggestion is Bayesian optimisation's, the others are random; with 0 all are random."""
    patience: int = 300
    """Suggestions without a better score that end the search."""
    enough: float = 0.95
    """A score above it ends the search too."""
    windows: int = 1
    """Windows of the text by which a set must have been scored for that. With 1, the paper's, a set is scored once, so
    that an easy window may end the search; with more, the best one is scored again by each window that has come."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("skip_ratio", self.skip_ratio, below_one=True)
        check_whole("search_steps", self.steps, 0)
        check_whole("bayes_interval", self.bayes_interval, 0)
        check_whole("search_seed", self.seed, 0)
        check_whole("search_windows", self.windows, 1)
        if self.steps and self.bayes_interval and find_spec("sklearn") is None:
            raise ValueError(
                f'bayes_interval={self.bayes_interval} needs scikit-learn: run pip install ".[swift]" in the '
                "project's folder, or choose bayes_interval=0 for random search alone"
            )
