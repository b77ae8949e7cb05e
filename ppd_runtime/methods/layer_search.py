"""Finds, while decoding, which sub-layers to leave out (SWIFT, section 4.1): suggestions, scores, and the end.

It holds no model: its caller scores the suggestions, each by one draft pass over existing tokens.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ppd_runtime.methods.choices import SearchSettings
from ppd_runtime.models.stage.slicing import LayerSet

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

LEAST_LAYERS = 3
"""Fewest layers to leave one out."""
_LEAST_RATE, _VERIFICATIONS, _LESS = 0.7, 100, 0.1  # least rate, after so many verifications; how much less to skip
_CONSIDERED, _REMEMBERED = 500, 400  # sets among which Bayesian optimisation chooses, scores that it uses
_KAPPA, _NOISE = 2.576, 0.1  # deviations above the mean; variance of a score, as a share of the scores' own


@dataclass
class _Tally:
    """The scores of a set."""

    places: np.ndarray
    total: float = 0.0
    windows: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.windows


class LayerSearch:
    """A search at work, on one model and one stream of requests; the same seed and scores give the same suggestions.

    Sub-layers are places of a vector: the attentions of all layers but the first and the last, which stay whole, then
    their MLPs.

    Args:
        num_layers: the model's, at least `LEAST_LAYERS`.
        settings: what to leave out, and when to stop.
    """

    def __init__(self, num_layers: int, settings: SearchSettings) -> None:
        if num_layers < LEAST_LAYERS:
            raise ValueError(f"{num_layers} layers: the first and the last stay, give at least {LEAST_LAYERS}")
        self.settings, self._layers = settings, num_layers
        self.steps = 0
        """Suggestions scored."""
        self.requests = 0
        """Requests whose tokens it has used, or may have."""
        self._random = np.random.default_rng(settings.seed)
        wanted = settings.steps and settings.bayes_interval
        self._surrogate = Surrogate(2 * (num_layers - 2)) if wanted else None
        self._begin(settings.skip_ratio)

    def _begin(self, skip_ratio: float) -> None:
        """Start over with the uniform set."""
        self.skip_ratio = skip_ratio
        self._candidate = self._uniform()
        self._tallies: dict[bytes, _Tally] = {}
        self.best, self.matchness = self._layer_set(self._candidate), -1.0
        self.windows = 0
        """Windows of text by which the best set was scored; `matchness` is their mean."""
        self._since, self._verifications, self._drafted, self._accepted = 0, 0, 0, 0

    def begin_request(self) -> None:
        """Begin a request: unless the search is finished, its text influences what is left out."""
        self.requests += not self.finished

    @property
    def finished(self) -> bool:
        """Whether the best set stays."""
        settings, sizes = self.settings, 2 * (self._layers - 2)
        over = self.steps >= settings.steps or self._since >= settings.patience or self._is_good_enough
        return over or self._num_left_out in (0, sizes)

    @property
    def _is_good_enough(self) -> bool:
        return self.windows >= self.settings.windows and self.matchness > self.settings.enough

    def suggest(self, new_window: bool = False) -> LayerSet:
        """The next set to score (equation 2); the first is the uniform one.

        `new_window`: the text to score by is all newer than at the last `new_window`. Then the best set is scored
        again, if scores need several windows.
        """
        number = self.steps + 1
        if not self._tallies:
            return self.best
        if new_window and self.settings.windows > 1:
            self._candidate = self._leader.places
        elif self._surrogate and number % self.settings.bayes_interval == 0:
            self._candidate = self._surrogate.most_promising([self._any() for _ in range(_CONSIDERED)])
        else:
            self._candidate = self._any()
        return self._layer_set(self._candidate)

    def score(self, matchness: float) -> None:
        """Note the newest suggestion's share of predicted tokens (equation 4)."""
        self.steps += 1
        self._since += 1
        if self._surrogate:
            self._surrogate.add(self._candidate, matchness)
        tally = self._tallies.setdefault(self._candidate.tobytes(), _Tally(self._candidate))
        tally.total, tally.windows = tally.total + matchness, tally.windows + 1
        leader = self._leader
        if (best := self._layer_set(leader.places)) != self.best or self.matchness < 0:
            self.best, self._since = best, 0
        self.matchness, self.windows = leader.mean, leader.windows

    def judged(self, drafted: int, accepted: int) -> None:
        """Note that `accepted` of `drafted` steps stayed. Too few in the long run lower the skip ratio."""
        self._verifications += 1
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
        if self._verifications < _VERIFICATIONS or self.finished:
            return
        lower = round(self.skip_ratio - _LESS, 9)
        if self._accepted < _LEAST_RATE * self._drafted and self._number(lower) > 0:
            self._begin(lower)
        self._verifications, self._drafted, self._accepted = 0, 0, 0

    @property
    def _leader(self) -> _Tally:
        """The set with the best mean score, the first among equals."""
        return max(self._tallies.values(), key=lambda tally: tally.mean)

    @property
    def _num_left_out(self) -> int:
        return self._number(self.skip_ratio)

    def _number(self, skip_ratio: float) -> int:
        return min(int(2 * self._layers * skip_ratio), 2 * (self._layers - 2))

    def _any(self) -> np.ndarray:
        return np.sort(self._random.choice(2 * (self._layers - 2), self._num_left_out, replace=False))

    def _uniform(self) -> np.ndarray:
        """Layers to skip, evenly spread, as many as the ratio asks for: about every second with the paper's ratios."""
        number = self._num_left_out
        return ((np.arange(number) + 0.5) * (2 * (self._layers - 2) / max(number, 1))).astype(int)

    def _layer_set(self, places: np.ndarray) -> LayerSet:
        inner = self._layers - 2
        attention, mlp = places[places < inner] + 1, places[places >= inner] - inner + 1
        return LayerSet(tuple(attention.tolist()), tuple(mlp.tolist()))


class Surrogate:
    """Expected scores of sets of sub-layers: a Gaussian process over the newest scores.

    Its kernel is fixed, and its acquisition function is maximised among sets drawn at random. General optimisers fit
    the kernel and climb from many starts: that takes seconds a suggestion, and they end between the existing sets.

    Args:
        size: places of a set's vector, 1 if the sub-layer is left out.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._scored: deque[tuple[np.ndarray, float]] = deque(maxlen=_REMEMBERED)
        self._process = _gaussian_process(size)

    def add(self, places: np.ndarray, score: float) -> None:
        """Add a set's score."""
        self._scored.append((self._vector(places), score))

    def most_promising(self, sets: list[np.ndarray]) -> np.ndarray:
        """The set with the highest upper confidence bound."""
        points, scores = zip(*self._scored, strict=True)
        self._process.fit(np.stack(points), np.array(scores))
        means, deviations = self._process.predict(np.stack([self._vector(s) for s in sets]), return_std=True)
        return sets[int(np.argmax(means + _KAPPA * deviations))]

    def _vector(self, places: np.ndarray) -> np.ndarray:
        vector = np.zeros(self._size)
        vector[places] = 1
        return vector


def _gaussian_process(size: int) -> "GaussianProcessRegressor":
    """Two random sets are about a length scale apart; scores from few tokens are noisy."""
    from sklearn.gaussian_process import GaussianProcessRegressor  # an extra, and slow to import
    from sklearn.gaussian_process.kernels import Matern

    kernel = Matern(length_scale=(size / 2) ** 0.5, nu=2.5)
    return GaussianProcessRegressor(kernel, alpha=_NOISE, optimizer=None, normalize_y=True)
