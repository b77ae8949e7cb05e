"""Places of tokens → match rates with confidence intervals, in all and by position in the output, and their file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppd_runtime.config import FLOATS, SHARED
from ppd_runtime.tune.first_boundaries import FirstBoundaries, count_first_boundaries
from ppd_runtime.tune.match_rates import MatchRateSetting, TextPlaces

_NORMAL_QUANTILE = 1.959964  # two-sided 95 %
_RANGES = 8  # the columns of the paper's Tables 6 to 8: 16 tokens make pairs, 128 tokens make sixteens


@dataclass(frozen=True)
class Rates:
    """Match rates over a range of output positions for one way of ranking."""

    exit_layers: tuple[int, ...]
    ks: tuple[int, ...]
    hits: np.ndarray
    """`[exit_layers, ks]` tokens that were among the candidates."""
    comparisons: int
    """Tokens compared; the same ones for every exit layer and k."""

    def rate(self, exit_layer: int, k: int) -> float:
        """Share of the tokens that were among `k` candidates after `exit_layer`."""
        return self._hits(exit_layer, k) / self.comparisons

    def interval(self, exit_layer: int, k: int) -> tuple[float, float]:
        """Wilson's 95 % interval of the rate, as for independent tokens (those of one text are not quite)."""
        return wilson_interval(self._hits(exit_layer, k), self.comparisons)

    def as_dict(self) -> dict[str, object]:
        """Comparisons, rates and intervals, keyed by exit layer and k as texts."""
        return {
            "comparisons": self.comparisons,
            "match_rates": {str(d): {str(k): self.rate(d, k) for k in self.ks} for d in self.exit_layers},
            "intervals": {str(d): {str(k): list(self.interval(d, k)) for k in self.ks} for d in self.exit_layers},
        }

    def _hits(self, exit_layer: int, k: int) -> int:
        return int(self.hits[self.exit_layers.index(exit_layer), self.ks.index(k)])


@dataclass(frozen=True)
class MatchRateReport:
    """What a measurement on some prompts found."""

    model: str
    dtype: str
    setting: MatchRateSetting
    num_prompts: int
    skipped_prompts: int
    """Prompts that left too little room in the model's positions."""
    overall: dict[str, Rates]
    """By ranking, the runtime's first: `setting.rankings`."""
    by_position: dict[str, dict[tuple[int, int], Rates]]
    """By ranking and range of output positions, from 1, both ends included; ranges that no text reached are absent."""
    first_boundaries: dict[str, tuple[FirstBoundaries, ...]]
    """By ranking, one for each of the setting's cuts."""
    generation_s: float
    measuring_s: float
    exit_head: str = SHARED
    """What named the candidates: the model's own norm and head, or a trained head by kind and hash."""
    weights: str = FLOATS
    """The format of the model's weights, or floats."""

    @property
    def cost_ratio(self) -> float:
        """Time of generating and measuring over the time of plain generation of the same tokens."""
        return (self.generation_s + self.measuring_s) / self.generation_s

    @property
    def runtime_rates(self) -> Rates:
        """The rates of the runtime's own ranking."""
        return self.overall[self.setting.rankings[0]]

    @property
    def middle_k(self) -> int:
        """The k to show where there is room for one."""
        return self.setting.ks[len(self.setting.ks) // 2]

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values; "match_rates" at the top are the runtime's."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "weights": self.weights,
            "exit_head": self.exit_head,
            "num_layers": self.setting.num_layers,
            "sampling": self.setting.sampling.as_dict(),
            "num_prompts": self.num_prompts,
            "skipped_prompts": self.skipped_prompts,
            "ranking": self.setting.rankings[0],
            **self.runtime_rates.as_dict(),
            **self._boundaries(self.setting.rankings[0]),
            "rankings": {
                ranking: rates.as_dict() | {"by_position": self._ranges(ranking)} | self._boundaries(ranking)
                for ranking, rates in self.overall.items()
            },
            "cost": {
                "generation_s": self.generation_s,
                "measuring_s": self.measuring_s,
                "ratio_to_plain_generation": self.cost_ratio,
            },
        }

    def _ranges(self, ranking: str) -> list[dict[str, object]]:
        return [{"positions": list(ends), **rates.as_dict()} for ends, rates in self.by_position[ranking].items()]

    def _boundaries(self, ranking: str) -> dict[str, object]:
        """Empty if no cuts were asked for."""
        found = [row.as_dict() for row in self.first_boundaries[ranking]]
        return {"first_boundary": found} if found else {}


def summarise(
    model: str,
    dtype: str,
    setting: MatchRateSetting,
    texts: Sequence[TextPlaces],
    skipped_prompts: int = 0,
    exit_head: str = SHARED,
    weights: str = FLOATS,
) -> MatchRateReport:
    """Count the hits of all texts; raises ValueError if there is none."""
    if not texts:
        raise ValueError("no prompt was measured: there is nothing to report")
    tables = {ranking: _count(setting, texts, ranking) for ranking in setting.rankings}
    whole = (1, setting.sampling.max_new_tokens)
    ranges = position_ranges(setting.sampling.max_new_tokens)
    return MatchRateReport(
        model=model,
        dtype=dtype,
        setting=setting,
        num_prompts=len(texts),
        skipped_prompts=skipped_prompts,
        overall={ranking: _rates(setting, *table, whole) for ranking, table in tables.items()},
        by_position={
            ranking: {ends: _rates(setting, *table, ends) for ends in ranges if table[1][ends[0] - 1]}
            for ranking, table in tables.items()
        },
        first_boundaries={ranking: count_first_boundaries(setting, texts, ranking) for ranking in setting.rankings},
        generation_s=sum(text.generation_s for text in texts),
        measuring_s=sum(text.measuring_s for text in texts),
        exit_head=exit_head,
        weights=weights,
    )


def position_ranges(max_new_tokens: int) -> list[tuple[int, int]]:
    """At most eight equal ranges of output positions, from 1, both ends included; the last may be shorter."""
    width = math.ceil(max_new_tokens / _RANGES)
    return [(start, min(start + width - 1, max_new_tokens)) for start in range(1, max_new_tokens + 1, width)]


def wilson_interval(hits: int, comparisons: int) -> tuple[float, float]:
    """The 95 % interval for a share by Wilson's score (1927): it stays within 0 to 1 and holds for rates near both."""
    share, weight = hits / comparisons, _NORMAL_QUANTILE**2 / comparisons
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _count(setting: MatchRateSetting, texts: Sequence[TextPlaces], ranking: str) -> tuple[np.ndarray, np.ndarray]:
    """Hits `[exit_layers, ks, positions]` and comparisons `[positions]`."""
    positions = setting.sampling.max_new_tokens
    hits = np.zeros((len(setting.exit_layers), len(setting.ks), positions), dtype=np.int64)
    comparisons = np.zeros(positions, dtype=np.int64)
    for text in texts:
        places = np.array(text.places[ranking])
        length = places.shape[1]
        hits[..., :length] += places[:, None] < np.array(setting.ks)[:, None]
        comparisons[:length] += 1
    return hits, comparisons


def _rates(setting: MatchRateSetting, hits: np.ndarray, comparisons: np.ndarray, positions: tuple[int, int]) -> Rates:
    covered = slice(positions[0] - 1, positions[1])
    return Rates(setting.exit_layers, setting.ks, hits[..., covered].sum(-1), int(comparisons[covered].sum()))
