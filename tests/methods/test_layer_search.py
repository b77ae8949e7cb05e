"""The search is a pure machine: suggestions out, scores in; it finds what scores well, and ends when it should."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd_runtime.methods.layer_search import LayerSearch, SearchSettings
from ppd_runtime.models.stage.slicing import LayerSet

LAYERS = 12
RANDOM = {"bayes_interval": 0}
HARM = np.random.default_rng(5).random(2 * (LAYERS - 2)) / (LAYERS - 2)


def matchness(left_out: LayerSet) -> float:
    """Each sub-layer is missed so much."""
    places = [*(i - 1 for i in left_out.attention), *(LAYERS - 3 + i for i in left_out.mlp)]
    return 1 - float(HARM[places].sum())


def run(search: LayerSearch, steps: int) -> list[LayerSet]:
    suggested = []
    for _ in range(steps):
        suggested.append(search.suggest())
        search.score(matchness(suggested[-1]))
    return suggested


def test_the_first_set_is_every_second_layer() -> None:
    search = LayerSearch(LAYERS, SearchSettings(0.42, **RANDOM))
    assert search.suggest() == search.best == LayerSet((2, 4, 6, 8, 10), (2, 4, 6, 8, 10))


@given(layers=st.integers(3, 20), ratio=st.floats(0, 0.999), seed=st.integers(0, 9), steps=st.integers(1, 6))
@settings(deadline=None)
def test_as_much_is_left_out_as_asked_for_and_both_ends_stay(layers: int, ratio: float, seed: int, steps: int) -> None:
    search = LayerSearch(layers, SearchSettings(ratio, seed=seed, **RANDOM))
    wanted = min(int(2 * layers * ratio), 2 * (layers - 2))
    for _ in range(steps):
        suggested = search.suggest()
        search.score(0.5)
        for numbers in (suggested.attention, suggested.mlp):
            assert list(numbers) == sorted(set(numbers))
            assert set(numbers) <= set(range(1, layers - 1))
        assert len(suggested.attention) + len(suggested.mlp) == wanted
    assert not search.settings.skip_ratio or search.finished == (wanted in (0, 2 * (layers - 2)))


@pytest.mark.parametrize("interval", [0, 25])
def test_the_best_scored_set_is_kept(interval: int) -> None:
    search = LayerSearch(LAYERS, SearchSettings(bayes_interval=interval))
    suggested = run(search, 60)
    assert search.steps == 60
    assert search.best == max(suggested, key=matchness)
    assert search.matchness == matchness(search.best)


def test_bayesian_optimisation_finds_better_sets_than_chance() -> None:
    by_interval = [LayerSearch(LAYERS, SearchSettings(bayes_interval=interval)) for interval in (0, 25)]
    scores = [[matchness(s) for s in run(search, 200)] for search in by_interval]
    chosen = scores[1][24::25]
    assert np.mean(chosen[2:]) > np.quantile(scores[0], 0.95)
    assert by_interval[1].matchness >= by_interval[0].matchness


def test_ends() -> None:
    def steps_until_the_end(scores: list[float], **settings: int) -> int:
        search = LayerSearch(LAYERS, SearchSettings(**RANDOM | settings))
        while not search.finished:
            search.suggest()
            search.score(scores[min(search.steps, len(scores) - 1)])
        return search.steps

    assert steps_until_the_end([0.5], steps=7) == 7
    assert steps_until_the_end([0.5]) == 301
    assert steps_until_the_end([0.5] * 100 + [0.6]) == 401
    assert steps_until_the_end([0.5] * 100 + [0.95, 0.96]) == 102
    assert steps_until_the_end([x / 2000 for x in range(2000)]) == 1000
    assert steps_until_the_end([0.5], steps=0) == 0
    assert steps_until_the_end([0.5], skip_ratio=0) == 0


def test_an_easy_window_ends_no_search_by_several() -> None:
    search = LayerSearch(LAYERS, SearchSettings(windows=3, **RANDOM))
    search.suggest(new_window=True)
    search.score(0.7)
    lucky = search.suggest()
    search.score(1.0)
    assert (search.best, search.matchness, search.windows, search.finished) == (lucky, 1.0, 1, False)
    assert search.suggest(new_window=True) == lucky
    search.score(0.5)
    assert (search.best, search.matchness, search.windows) == (lucky, 0.75, 2)
    assert search.suggest() != lucky
    search.score(0.98)
    good = search.best
    assert good != lucky
    for _ in range(2):
        assert not search.finished
        assert search.suggest(new_window=True) == good
        search.score(0.97)
    assert (search.best, search.windows, search.finished) == (good, 3, True)
    assert search.matchness == pytest.approx((0.98 + 2 * 0.97) / 3)


def test_few_accepted_tokens_lower_the_ratio() -> None:
    search = LayerSearch(LAYERS, SearchSettings(**RANDOM))
    run(search, 5)
    for _ in range(100):
        search.judged(10, 7)
    assert search.skip_ratio == 0.45
    best = search.best
    for i in range(100):
        assert search.best == best, i
        search.judged(10, 6)
    assert search.skip_ratio == 0.35
    assert search.suggest() == search.best != best
    assert len(search.best.attention) + len(search.best.mlp) == 8
    for _ in range(2000):
        search.judged(10, 0)
    assert search.skip_ratio == pytest.approx(0.05), "something is always left out"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"skip_ratio": 1.0}, "skip_ratio=1.0: give a number from 0 to below 1"),
        ({"skip_ratio": -0.1}, "skip_ratio=-0.1: give"),
        ({"skip_ratio": True}, "skip_ratio=True: give"),
        ({"steps": -1}, "search_steps=-1: give a whole number of at least 0"),
        ({"bayes_interval": 2.5}, "bayes_interval=2.5: give a whole number"),
        ({"seed": -3}, "search_seed=-3: give a whole number"),
    ],
)
def test_settings_out_of_range(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SearchSettings(**wrong)
    assert message in str(caught.value)


def test_too_few_layers() -> None:
    with pytest.raises(ValueError, match="2 layers: the first and the last stay, give at least 3"):
        LayerSearch(2, SearchSettings(**RANDOM))


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # what Python itself does to forbid an import
    with pytest.raises(ValueError, match=r"bayes_interval=25 needs scikit-learn: run pip install .*\[swift\].*, or"):
        SearchSettings()
    run(LayerSearch(LAYERS, SearchSettings(**RANDOM)), 30)
    SearchSettings(steps=0)
