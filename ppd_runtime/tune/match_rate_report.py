"""Places of tokens → match rates, in all and by position in the output, and first boundaries of stages."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ppd_runtime.settings.config import FLOATS, SHARED
from ppd_runtime.tune.match_rates import MatchRateMeter, MatchRateSetting, TextPlaces
from ppd_runtime.tune.subject import fitting_prompts

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
        return int(self.hits[self.exit_layers.index(exit_layer), self.ks.index(k)]) / self.comparisons

    def as_dict(self) -> dict[str, object]:
        """Comparisons and rates, keyed by exit layer and k as texts."""
        rates = {str(layer): {str(k): self.rate(layer, k) for k in self.ks} for layer in self.exit_layers}
        return {"comparisons": self.comparisons, "match_rates": rates}


@dataclass(frozen=True)
class FirstBoundaries:
    """How often each boundary is the first to name the right token, for stages that end after given layers."""

    cuts: tuple[int, ...]
    ks: tuple[int, ...]
    counts: np.ndarray
    """`[ks, stages]` tokens that are first among the k candidates of boundary 1, 2, …, and of none."""

    def shares(self, k: int) -> tuple[float, ...]:
        """The share of the tokens for boundary 1, 2, …, and for none; they sum to 1."""
        row = self.counts[self.ks.index(k)]
        return tuple((row / row.sum()).tolist())

    def as_dict(self) -> dict[str, object]:
        """Cuts, and shares keyed by k as a text."""
        return {"cuts": list(self.cuts), "shares": {str(k): list(self.shares(k)) for k in self.ks}}


@dataclass(frozen=True)
class MatchRateReport:
    """What a measurement on some prompts found."""

    model: str
    dtype: str
    setting: MatchRateSetting
    num_prompts: int
    overall: dict[str, Rates]
    """By ranking, the runtime's first: `setting.rankings`."""
    by_position: dict[str, dict[tuple[int, int], Rates]]
    """By ranking and range of output positions, from 1, both ends included; ranges that no text reached are absent."""
    first_boundaries: dict[str, tuple[FirstBoundaries, ...]]
    """By ranking, one for each of the setting's cuts."""
    skipped_prompts: int = 0
    """Prompts that left too little room in the model's positions."""
    exit_head: str = SHARED
    """What named the candidates: the model's own norm and head, or a trained head by kind and hash."""
    weights: str = FLOATS
    """The format of the model's weights, or floats."""

    @property
    def runtime_rates(self) -> Rates:
        """The rates of the runtime's own ranking."""
        return self.overall[self.setting.rankings[0]]

    @property
    def middle_k(self) -> int:
        """The k to show where there is room for one."""
        return self.setting.ks[len(self.setting.ks) // 2]

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values; "match_rates" and "first_boundary" at the top are the runtime's."""
        rankings = {ranking: self._ranking(ranking) for ranking in self.overall}
        runtimes = {name: value for name, value in rankings[self.setting.rankings[0]].items() if name != "by_position"}
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
            **runtimes,
            "rankings": rankings,
        }

    def _ranking(self, ranking: str) -> dict[str, object]:
        ranges = [{"positions": list(ends), **rates.as_dict()} for ends, rates in self.by_position[ranking].items()]
        boundaries = [row.as_dict() for row in self.first_boundaries[ranking]]
        asked = {"first_boundary": boundaries} if boundaries else {}
        return {**self.overall[ranking].as_dict(), "by_position": ranges, **asked}


def measured_report(
    meter: MatchRateMeter, prompts: Sequence[str], on_prompt: Callable[[int, int], None] = lambda done, of: None
) -> MatchRateReport:
    """Measure the prompts that leave room for the new tokens; `on_prompt` is told how many are done, and of how many.

    Raises:
        ValueError: if no prompt fits.
    """
    ordinary, sampling, texts = meter.ordinary, meter.setting.sampling, []
    fitting = fitting_prompts(ordinary, prompts, sampling.max_new_tokens)
    for place, token_ids in fitting.items():
        texts.append(meter.measure(token_ids, sampling.with_later_seed(place).seed))
        on_prompt(len(texts), len(fitting))
    known = {"exit_head": meter.exit_head, "weights": ordinary.info.weights_name}
    skipped = len(prompts) - len(fitting)
    return summarise(ordinary.info.name, ordinary.dtype, meter.setting, texts, skipped_prompts=skipped, **known)


def summarise(
    model: str, dtype: str, setting: MatchRateSetting, texts: Sequence[TextPlaces], **others: object
) -> MatchRateReport:
    """Count the hits of some texts, which have a token at least; `others` are fields of the report."""
    tables = {ranking: _count(setting, texts, ranking) for ranking in setting.rankings}
    whole = (1, setting.sampling.max_new_tokens)
    ranges = position_ranges(setting.sampling.max_new_tokens)
    return MatchRateReport(
        model=model,
        dtype=dtype,
        setting=setting,
        num_prompts=len(texts),
        overall={ranking: _rates(setting, *table, whole) for ranking, table in tables.items()},
        by_position={
            ranking: {ends: _rates(setting, *table, ends) for ends in ranges if table[1][ends[0] - 1]}
            for ranking, table in tables.items()
        },
        first_boundaries={ranking: _first_boundaries(setting, texts, ranking) for ranking in setting.rankings},
        **others,  # type: ignore[arg-type]
    )


def position_ranges(max_new_tokens: int) -> list[tuple[int, int]]:
    """At most eight equal ranges of output positions, from 1, both ends included; the last may be shorter."""
    width = math.ceil(max_new_tokens / _RANGES)
    return [(start, min(start + width - 1, max_new_tokens)) for start in range(1, max_new_tokens + 1, width)]


def _count(setting: MatchRateSetting, texts: Sequence[TextPlaces], ranking: str) -> tuple[np.ndarray, np.ndarray]:
    """Hits `[exit_layers, ks, positions]` and comparisons `[positions]`."""
    positions = setting.sampling.max_new_tokens
    hits = np.zeros((len(setting.exit_layers), len(setting.ks), positions), dtype=np.int64)
    comparisons = np.zeros(positions, dtype=np.int64)
    for text in texts:
        places = np.array(text[ranking])
        length = places.shape[1]
        hits[..., :length] += places[:, None] < np.array(setting.ks)[:, None]
        comparisons[:length] += 1
    return hits, comparisons


def _rates(setting: MatchRateSetting, hits: np.ndarray, comparisons: np.ndarray, positions: tuple[int, int]) -> Rates:
    covered = slice(positions[0] - 1, positions[1])
    return Rates(setting.exit_layers, setting.ks, hits[..., covered].sum(-1), int(comparisons[covered].sum()))


def _first_boundaries(
    setting: MatchRateSetting, texts: Sequence[TextPlaces], ranking: str
) -> tuple[FirstBoundaries, ...]:
    """One for each of the setting's cuts."""
    places = np.concatenate([np.array(text[ranking]) for text in texts], axis=1)
    found = []
    for cuts in setting.cuts:
        at_cuts, never = places[[setting.exit_layers.index(cut) for cut in cuts]], len(cuts)
        named = [at_cuts < k for k in setting.ks]  # `[boundaries, tokens]` each
        firsts = [np.where(one.any(0), one.argmax(0), never) for one in named]
        counts = np.stack([np.bincount(first, minlength=never + 1) for first in firsts])
        found.append(FirstBoundaries(cuts, setting.ks, counts))
    return tuple(found)
