"""The formulas of drafters at boundary 0 against plain simulations, all small trees, and the formulas without them."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.cost_model import drafting, staged, theory

DRAWS = 4000
chance = st.floats(0, 1)
cost = st.floats(0, 2)
depths = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=2), min_size=1, max_size=3)
"""Chances of two ranks at most by depth, in percent."""


def as_chances(percent: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[each / 100 for each in depth] for depth in percent]


@st.composite
def distributions(draw: st.DrawFn) -> tuple[float, ...]:
    """Shares of J = 0, 1, …, N for one stage and more."""
    weights = draw(st.lists(st.integers(0, 100), min_size=2, max_size=7).filter(any))
    return tuple(weight / sum(weights) for weight in weights)


@given(st.lists(chance, max_size=6))
def test_a_chain_adds_up_products(chances: list[float]) -> None:
    products = [math.prod(chances[:length]) for length in range(1, len(chances) + 1)]
    assert drafting.tokens_per_pass(drafting.chain(chances)) == pytest.approx(1 + sum(products))


@given(depths, st.integers(1, 5))
def test_no_tree_of_as_many_rows_gives_more_tokens(percent: list[list[int]], rows: int) -> None:
    chances = as_chances(percent)
    paths = {
        path: math.prod(depth[rank] for depth, rank in zip(chances, path, strict=False))
        for length in range(1, len(chances) + 1)
        for path in itertools.product(*(range(len(depth)) for depth in chances[:length]))
    }
    room = min(rows - 1, len(paths))
    trees = (
        tree
        for tree in itertools.combinations(paths, room)
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )
    best = drafting.best_tree(chances, rows)
    assert best == pytest.approx({path: paths[path] for path in best})
    assert [*best.values()] == sorted(best.values(), reverse=True)
    assert all(len(path) == 1 or path[:-1] in best for path in best)
    expected = max(1 + math.fsum(paths[path] for path in tree) for tree in trees)
    assert len(best) == room
    assert drafting.tokens_per_pass([*best.values()]) == pytest.approx(expected)


def test_a_pass_decides_as_many_tokens_as_in_a_simulation() -> None:
    chances, generator = [[0.5, 0.2, 0.1], [0.4, 0.3], [0.6]], random.Random(0)
    tree = drafting.best_tree(chances, 7)
    decided = []
    for _ in range(DRAWS):
        right: tuple[int, ...] = ()
        for depth in chances:
            rank = generator.choices(range(len(depth) + 1), [*depth, 1 - sum(depth)])[0]
            if (*right, rank) not in tree:
                break
            right = (*right, rank)
        decided.append(1 + len(right))
    error = statistics.stdev(decided) / DRAWS**0.5
    assert drafting.tokens_per_pass([*tree.values()]) == pytest.approx(statistics.fmean(decided), abs=4 * error)


@given(st.lists(chance, max_size=8), cost, cost)
def test_no_other_number_of_rows_is_faster(chances: list[float], row_cost: float, draft_cost: float) -> None:
    paths = drafting.chain(chances)
    speedups = [drafting.speedup(paths[:guesses], row_cost, draft_cost) for guesses in range(len(paths) + 1)]
    rows = drafting.paying_rows(paths, row_cost, draft_cost)
    assert speedups[rows - 1] == pytest.approx(max(speedups))
    assert rows <= 1 + sum(path > row_cost / (1 + draft_cost) for path in paths)


def test_a_row_that_is_likelier_than_its_cost_may_slow_down() -> None:
    paths = drafting.chain([0.9] * 10)
    assert drafting.paying_rows(paths, 0.3, 0.0) == 6
    likelier = [path for path in paths if path > 0.3]
    assert drafting.speedup(paths[:5], 0.3, 0.0) > 1.05 * drafting.speedup(likelier, 0.3, 0.0)


@given(st.lists(chance, max_size=6), st.integers(0, 6), st.floats(0, 1))
def test_rows_without_cost_are_drafting_and_verifying(chances: list[float], steps: int, step_cost: float) -> None:
    paths = drafting.chain(chances)
    ratio = theory.drafting_ratio(drafting.tokens_per_pass(paths), steps, step_cost)
    assert drafting.speedup(paths, 0.0, steps * step_cost) == pytest.approx(1 / ratio)


@given(distributions(), st.integers(1, 30))
def test_boundary_0_beside_its_count_with_boundary_1(shares: tuple[float, ...], rows: int) -> None:
    expected = drafting.expected_first_boundary(shares, rows)
    without_bound = math.fsum(j * share for j, share in enumerate(shares))
    assert without_bound <= expected <= without_bound + shares[0] + 1e-12
    assert drafting.speedup_bound(shares, rows) <= (len(shares) - 1) * rows * (1 + 1e-12)
    if len(shares) > 2:
        today = staged.expected_first_boundary((shares[0] + shares[1], *shares[2:]))
        assert drafting.expected_first_boundary(shares, 1) == pytest.approx(today)
        assert without_bound + shares[0] == pytest.approx(today)


@given(chance, st.integers(1, 10))
def test_one_stage_takes_a_pass_for_each_chain(first: float, rows: int) -> None:
    tokens = drafting.tokens_per_pass(drafting.chain([first] * (rows - 1)))
    assert drafting.speedup_bound((first, 1 - first), rows) == pytest.approx(tokens)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_boundary_0_that_is_always_right_fills_all_passes(stages: int) -> None:
    assert drafting.speedup_bound((1.0, *[0.0] * stages), 8) == 8 * stages


@pytest.mark.parametrize("shares", [(0.6, 0.4), (0.5, 0.2, 0.3), (0.8, 0.1, 0.04, 0.03, 0.03), (0.0, 0.5, 0.5)])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_tokens_enter_as_in_a_simulation(shares: tuple[float, ...], rows: int) -> None:
    generator, waits, together = random.Random(1), [], 1
    for boundary in generator.choices(range(len(shares)), shares, k=4 * DRAWS):
        enters_too = boundary == 0 and together < rows
        together = together + 1 if enters_too else 1
        waits.append(0 if enters_too else max(boundary, 1))
    assert drafting.expected_first_boundary(shares, rows) == pytest.approx(statistics.fmean(waits), rel=0.04)


def next_mistake(right: int, s: int, stages: int, draft: int, rows: int, waits_for: int) -> int:
    """When the token behind `right` right drafts is certain, pass by pass."""
    start, entered = waits_for * draft, waits_for
    while entered < right:
        start = max(start + s, (entered + 1) * draft)
        entered = min(start // draft, entered + rows)
    return start + stages * s


@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.floats(0, 0.85), st.integers(1, 12), st.integers(0, 6)
)
def test_a_draft_model_with_every_outcome_added_up(
    s: int, stages: int, draft: int, right: float, rows: int, waits_for: int
) -> None:
    draft, waits_for = min(draft, stages * s), min(waits_for, rows - 1)
    setting = (s, stages, draft, rows, waits_for)
    cycle = math.fsum((1 - right) * right**count * next_mistake(count, *setting) for count in range(200))
    tokens = 1 / (1 - right)
    found = drafting.draft_model_token_time(s, stages, draft, right, rows, waits_for)
    assert found == pytest.approx(cycle / tokens)


@pytest.mark.parametrize(
    ("setting", "right"),
    [((20, 4, 30, 8, 0), 0.75), ((400, 4, 16, 64, 0), 0.75), ((1600, 1, 16, 64, 9), 0.75), ((50, 2, 7, 3, 2), 0.9)],
)
def test_a_draft_model_beside_a_simulation(setting: tuple[int, int, int, int, int], right: float) -> None:
    generator, clock, tokens = random.Random(2), 0, 0
    for _ in range(DRAWS):
        count = 0
        while generator.random() < right:
            count += 1
        clock, tokens = clock + next_mistake(count, *setting), tokens + count + 1
    s, stages, draft, rows, waits_for = setting
    found = drafting.draft_model_token_time(s, stages, draft, right, rows, waits_for)
    assert found == pytest.approx(clock / tokens, rel=0.03)


@given(st.floats(0.1, 10), st.integers(1, 6), chance, st.data())
def test_a_draft_model_that_limits_takes_its_time_where_it_is_right(
    s: float, stages: int, right: float, data: st.DataObject
) -> None:
    draft = data.draw(st.floats(s, stages * s))
    expected = right * draft + (1 - right) * stages * s
    assert drafting.draft_model_token_time(s, stages, draft, right, 8) == pytest.approx(expected)


def test_stages_that_limit() -> None:
    assert drafting.draft_model_token_time(1600, 1, 0, 0.75, 10**6) == pytest.approx((1 - 0.75**2) * 1600)
    assert drafting.draft_model_token_time(400, 4, 4, 0.75, 8) == pytest.approx(
        0.25 * (1600 + 400 * 0.75 / (1 - 0.75**8))
    )
    assert drafting.draft_model_token_time(400, 4, 4, 1, 8) == 50
    assert drafting.draft_model_token_time(400, 4, 100, 0, 8) == 1600


def test_waiting_for_drafts_saves_time_while_the_rule_says_so() -> None:
    times = [drafting.draft_model_token_time(1600, 1, 16, 0.75, 64, waits_for) for waits_for in range(30)]
    saves = [after < before for before, after in itertools.pairwise(times)]
    total = 0.75 / (1 - 0.75**64)
    assert saves == [1600 * 0.75 ** (draft - 1) * 0.25 * total > 16 for draft in range(1, 30)]
    assert (saves.index(False), times[0] / min(times) > 1.5) == (11, True)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: drafting.chain([0.5, 1.5]), "chances=1.5: give a number from 0 to 1"),
        (lambda: drafting.best_tree([[0.5, -0.1]], 3), "chances=-0.1"),
        (lambda: drafting.best_tree([[0.5]], 0), "rows=0"),
        (lambda: drafting.tokens_per_pass([2.0]), "path_chances=2.0"),
        (lambda: drafting.speedup([0.5], -1, 0), "row_cost=-1"),
        (lambda: drafting.speedup([0.5], 0, math.inf), "draft_cost=inf"),
        (lambda: drafting.paying_rows([1.5], 0, 0), "path_chances=1.5"),
        (lambda: drafting.expected_first_boundary((1.0,), 4), "shares=(1.0,): give one for boundary 0"),
        (lambda: drafting.expected_first_boundary((0.5, 0.4), 4), "the shares sum to 0.9"),
        (lambda: drafting.expected_first_boundary((0.5, 0.5), 0), "rows=0"),
        (lambda: drafting.draft_model_token_time(-1, 1, 1, 0.5, 8), "stage_time=-1"),
        (lambda: drafting.draft_model_token_time(10, 0, 1, 0.5, 8), "stages=0"),
        (lambda: drafting.draft_model_token_time(10, 1, 1, 1.5, 8), "chance=1.5"),
        (lambda: drafting.draft_model_token_time(10, 1, 1, 0.5, 8, 8), "rows=8: give a whole number of at least 9"),
        (lambda: drafting.draft_model_token_time(10, 2, 21, 0.5, 8), "draft_time=21: give at most the stages' 20"),
    ],
)
def test_mistakes_are_named_in_one_line(call, named: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value)
    assert "\n" not in str(error.value)
