"""Sampling is exact, repeatable, and the same where a token is predicted early and where it is decided."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ppd_runtime.methods.verification import SharedNoise, acceptance_rule
from ppd_runtime.pipeline.staged.chances import GuessRecord, in_millionths
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.highest import NO_TOKEN
from ppd_runtime.sampling.noise import gumbel_noise
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler

VOCAB = 12
DRAWS = 3000
HISTORY = [3, 1, 3, 7]

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 6},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.4, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.02},
]
BY_THE_TEXT = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.3},
    {"frequency_penalty": -0.2, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 0.8, "frequency_penalty": 0.5},
    {"temperature": 1.0, "presence_penalty": -2.0, "top_p": 0.9, "min_p": 0.1},
    {"logits_processors": (NoRepeatNGramLogitsProcessor(2),)},
    {"temperature": 0.7, "top_k": 9, "logits_processors": (NoRepeatNGramLogitsProcessor(2),)},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4,
     "logits_processors": (NoRepeatNGramLogitsProcessor(3), MinPLogitsWarper(0.01))},
]  # fmt: skip


def random_logits(size: int, seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Repeated:
    """Presence and frequency penalty, token by token, from OpenAI's formula."""

    def __init__(self, params: SamplingParams, prompt_size: int) -> None:
        self.params, self.prompt_size = params, prompt_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated, scores = input_ids[0, self.prompt_size :].tolist(), scores.clone()
        for token in set(generated):
            scores[0, token] -= torch.tensor(self.params.frequency_penalty) * generated.count(token)
            scores[0, token] -= torch.tensor(self.params.presence_penalty)
        return scores


def transformers_scores(params: SamplingParams, logits: Tensor, history: list[int], prompt_size: int = 0) -> Tensor:
    """Scores as `generate` processes them, in its order: penalties, a user's own, temperature, top-k, top-p, min-p."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty or 1.0)])
    processors.append(Repeated(params, prompt_size))
    processors += params.logits_processors
    if params.temperature:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history]), logits[None])[0]


def chi_squared_p_value(counts: Tensor, probabilities: Tensor) -> float:
    """How probable counts that far from `probabilities` are, over the outcomes expected at least five times."""
    expected = probabilities.double() * counts.sum()
    common = expected >= 5
    rest = torch.stack([counts[~common].sum().double(), expected[~common].sum()])
    observed, expected = counts[common].double(), expected[common]
    if rest[1] >= 5:
        observed, expected = torch.cat([observed, rest[:1]]), torch.cat([expected, rest[1:]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0).double(), statistic / 2))


def draw(params: SamplingParams, logits: Tensor) -> Tensor:
    """Counts of `DRAWS` tokens, one at each of as many positions; the penalty sees the same tokens at each."""
    sampler = Sampler(params)
    counts = torch.zeros(len(logits), dtype=torch.int64)
    history = list(HISTORY)
    for _ in range(DRAWS):
        counts[sampler.choose(logits, history)] += 1
        history.append(3)
    return counts


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-39, 1e-44, 5e-324])
def test_a_temperature_near_zero_is_all_but_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.greedy == (temperature < 1e-6), "dividing by less, logits are soon no longer finite"
    logits = random_logits(50, 0)
    assert Sampler(params).choose(logits, HISTORY) == int(logits.argmax())


@pytest.mark.parametrize("only_one", [{"top_k": 1}, {"min_p": 1}, {"top_p": 0}, {"temperature": 1e-7}], ids=str)
@pytest.mark.parametrize("penalty", [None, 1.2])
def test_where_one_token_is_asked_for_it_is_greedys(only_one: dict[str, float], penalty: float | None) -> None:
    """Whatever the seed, the first of several as likely, as bfloat16 often has them; guessed so, too."""
    for seed in range(30):
        params = SamplingParams(**{"temperature": 0.8, "seed": seed, "repetition_penalty": penalty, **only_one})
        sampler = Sampler(params)
        logits = random_logits(300, seed, scale=0.3).bfloat16().float()
        logits[[40, 41, 200, 250]] = logits.max() + 0.125
        assert sampler.choose(logits, HISTORY) == 40
        assert sampler.rank(logits, HISTORY, 3)[0] == 40
        assert sampler.guesses(logits[None], [HISTORY], 3)[0][0][0] == 40
        assert sampler.likeliest(sampler.noisy_scores(logits, HISTORY))[0] == 40
        assert sampler.plain == (penalty is None)
        assert isinstance(acceptance_rule("rejection", sampler), SharedNoise)


def test_biases_are_added_to_the_logits_before_all_else() -> None:
    """A penalty sees the biased logit: it multiplies what is below 0, and divides what is above."""
    logits = torch.tensor([3.0, 2.0, 1.0, -1.0])
    sampler = Sampler(SamplingParams(logit_bias={0: -4, 2: 0.5}, repetition_penalty=2.0))
    assert sampler.noisy_scores(logits, [0, 2]).tolist() == [-2.0, 2.0, 0.75, -1.0]
    for bias, chosen in (({}, 0), ({0: -100}, 1), ({3: 100}, 3), ({1: 1.5}, 1)):
        for temperature in (0.0, 1e-3):
            assert Sampler(SamplingParams(logit_bias=bias, temperature=temperature)).choose(logits, [0]) == chosen
    drawn = draw(SamplingParams(logit_bias={1: 1.0}, temperature=1.0, seed=4), logits)
    assert chi_squared_p_value(drawn, torch.tensor([3.0, 3.0, 1.0, -1.0]).softmax(-1)) > 1e-3


@pytest.mark.filterwarnings("error")
def test_a_length_penalty_that_overflows_ends_the_text() -> None:
    """Where Python's power raises an error."""
    params = SamplingParams(exponential_decay_length_penalty=(0, 1e9))
    sampler = Sampler(params, prompt_size=1, eos_token_ids=[7])
    assert sampler.choose(random_logits(50, 0), [1] * 500) == 7


def test_a_requests_own_processor_is_taken_in_the_place_of_one_of_its_kind() -> None:
    """As `generate` has it: a request's own settings win."""
    history, logits = [1, 2, 3, 1, 2], random_logits(50, 0)
    own = NoRepeatNGramLogitsProcessor(3)
    for settings in ({"no_repeat_ngram_size": 1}, {}):
        sampler = Sampler(SamplingParams(**settings, logits_processors=(own,)))
        assert torch.equal(sampler.noisy_scores(logits, history), own(torch.tensor([history]), logits[None])[0])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [7, 50, 2048])
def test_a_choice_is_that_of_transformers_processors(settings: dict[str, float], size: int) -> None:
    """With the shared noise on top; with equal logits among them, and some that are impossible."""
    params = SamplingParams(**settings, seed=5)
    sampler, soon = Sampler(params), 0
    for i in range(100):
        logits = random_logits(size, i, scale=0.3 + i % 7)
        if i % 3 == 1:
            logits = logits.round()
        if i % 5 == 2:
            logits[:: 2 + i % 4] = float("-inf")
        history = [3 % size] * (4 + i)
        noise = torch.from_numpy(gumbel_noise(5, len(history), size))
        expected = int((transformers_scores(params, logits, history) + noise).argmax())
        assert sampler.choose(logits, history) == expected
        soon += sampler._choice_without_doubt(logits.numpy(), len(history)) is not None
    assert {"top_k", "top_p"} <= set(settings) or soon > 33, "else the shorter way was hardly tested"


@pytest.mark.parametrize("settings", BY_THE_TEXT, ids="-".join)
@pytest.mark.parametrize("num_generated", [0, 3])
def test_a_choice_that_goes_by_the_text_is_that_of_plain_processors(
    settings: dict[str, float], num_generated: int
) -> None:
    """Over a text that grows by its own choices behind a prompt of eight tokens."""
    params = SamplingParams(**settings, num_generated=num_generated, seed=5)
    sampler, changed, size = Sampler(params, 8), 0, 50
    history = torch.randint(0, size, (8,), generator=torch.Generator().manual_seed(1)).tolist()
    for i in range(100):
        logits = random_logits(size, i % 7, scale=0.3 + i % 3)
        noise = torch.from_numpy(gumbel_noise(5, len(history), size)) if params.temperature else 0
        expected = transformers_scores(params, logits, history, 8 - num_generated)
        before = logits.clone()
        token = sampler.choose(logits, history)
        assert token == int((expected + noise).argmax())
        assert torch.equal(logits, before), "the model's logits are left alone"
        kept = expected.isfinite()
        assert sampler.rank(logits, history, 1)[0] == token or not kept.any()
        if params.temperature:
            assert torch.equal(sampler.distribution(logits, history), expected.softmax(-1, dtype=torch.float64))
        plain = SamplingParams(temperature=params.temperature, seed=5)
        changed += token != Sampler(plain).choose(logits, history)
        history.append(token)
    assert changed > 10, "else the settings were hardly tested"
    assert not sampler.plain
    assert sampler.choices(random_logits(size, 0)[None]) is None


def test_a_processor_that_gives_no_scores_is_named() -> None:
    for wrong in (lambda ids, scores: None, lambda ids, scores: scores[0], lambda ids, scores: scores[:, :3]):
        with pytest.raises(RequestError, match="logits_processors: .* gave"):
            Sampler(SamplingParams(logits_processors=(wrong,))).choose(random_logits(50, 0), HISTORY)


def test_a_processor_may_write_into_its_arguments() -> None:
    def without_the_best(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.tolist() == [HISTORY]
        scores[0, int(scores.argmax())] = -torch.inf
        return scores

    logits = random_logits(50, 0)
    sampler = Sampler(SamplingParams(logits_processors=(without_the_best,)))
    second = logits.topk(2).indices.tolist()[1]
    assert [sampler.choose(logits, HISTORY) for _ in range(3)] == [second] * 3


@pytest.mark.parametrize("smallest", [1e-45, 1e-38, 1e-20, 1e-3, 0.5, 1.0])
def test_a_choice_at_min_ps_border_is_transformers(smallest: float) -> None:
    params = SamplingParams(temperature=1.0, min_p=smallest)
    sampler = Sampler(params)
    for i in range(200):
        near = math.log(smallest) + (i - 100) * 1e-6
        logits = torch.tensor([0.0, near, near, near, near, -40.0, near + 1e-3, -150.0])
        history = [0] * (i + 1)
        noise = torch.from_numpy(gumbel_noise(0, len(history), len(logits)))
        expected = int((transformers_scores(params, logits, history) + noise).argmax())
        assert sampler.choose(logits, history) == expected


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_a_choice_at_the_filters_border_is_theirs(share: float) -> None:
    """Where probabilities sum up to top-p, or all but: what the shorter way doubts it leaves to the longer one."""
    params = SamplingParams(temperature=1.0, top_p=share)
    sampler, left = Sampler(params), 0
    for i in range(200):
        within = share + (i - 100) * 1e-5
        logits = torch.tensor([within / 4] * 4 + [(1 - within) / 10] * 10).log()
        history = [0] * (i + 1)
        noise = torch.from_numpy(gumbel_noise(0, len(history), len(logits)))
        expected = int((transformers_scores(params, logits, history) + noise).argmax())
        assert sampler.choose(logits, history) == expected
        left += sampler._choice_without_doubt(logits.numpy(), len(history)) is None
    assert left


@pytest.mark.parametrize("settings", SETTINGS)
def test_scores_of_one_position_are_those_of_many(settings: dict[str, float]) -> None:
    """Where no probability is near the border; the way for one is shorter."""
    params = SamplingParams(**settings | {"repetition_penalty": 1.0}, seed=8)
    sampler = Sampler(params)
    for i in range(50):
        logits = random_logits(300, i)
        one = sampler.noisy_scores(logits, [0] * (i + 1))
        many = sampler.scores(logits[None], sampler.noise(i + 1, 1, 300))[0]
        assert torch.equal(one, many)


def test_greedy_uses_neither_seed_nor_filters() -> None:
    logits = random_logits(50, 0)
    chosen = {
        Sampler(SamplingParams(seed=seed, top_k=top_k, top_p=top_p)).choose(logits, [0] * seed)
        for seed, top_k, top_p in itertools.product(range(5), (0, 1, 3), (1.0, 0.1))
    }
    assert chosen == {int(logits.argmax())}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_noise_samples_the_processed_distribution_exactly(settings: dict[str, float]) -> None:
    params = SamplingParams(**settings, seed=11)
    logits = random_logits(VOCAB, 5, scale=1.5)
    probabilities = transformers_scores(params, logits, HISTORY).softmax(-1)
    counts = draw(params, logits)
    assert counts[probabilities == 0].sum() == 0, "a token that the filters drop was chosen"
    assert chi_squared_p_value(counts, probabilities) > 1e-3
    other = transformers_scores(SamplingParams(temperature=0.75 * params.temperature), logits, HISTORY).softmax(-1)
    assert chi_squared_p_value(counts, other) < 1e-3, "the test would notice another temperature"


def test_a_text_can_be_repeated_and_another_seed_gives_another() -> None:
    logits = [random_logits(300, i) for i in range(40)]

    def text(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        tokens = [0]
        for row in logits:
            tokens.append(sampler.choose(row, tokens))
        return tokens

    assert text(7) == text(7)
    assert len({tuple(text(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5}, *SETTINGS], ids=str)
@pytest.mark.parametrize("size", [VOCAB, 5000])
def test_the_first_rank_is_the_choice(settings: dict[str, float], size: int) -> None:
    sampler = Sampler(SamplingParams(**settings, seed=3))
    for i in range(25):
        logits, history = random_logits(size, i), [j % size for j in range(i + 1)]
        ranked = sampler.rank(logits, history, 5)
        assert ranked[0] == sampler.choose(logits, history)
        assert len(set(ranked)) == 5
        assert sampler.rank(logits, history, 2) == ranked[:2]


@pytest.mark.parametrize("k", [1, 3, VOCAB])
@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.3}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_ranks_are_different_tokens_where_the_filters_keep_fewer(settings: dict[str, float], k: int) -> None:
    params = SamplingParams(temperature=1.0, **settings)
    for i in range(50):
        logits = random_logits(VOCAB, i)
        ranked = Sampler(params).rank(logits, HISTORY, k)
        assert len(set(ranked)) == k
        kept = transformers_scores(params, logits, HISTORY).isfinite()
        num_kept = min(int(kept.sum()), k)
        assert kept[ranked].tolist() == [True] * num_kept + [False] * (k - num_kept)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_chances_are_those_of_an_early_guess(temperature: float) -> None:
    """Where full depth's logits depart by independent Gumbel numbers, `chances` says how often it chooses the guess."""
    sampler, departure = Sampler(SamplingParams(temperature=temperature, seed=1)), Sampler(SamplingParams(seed=2))
    foretold, happened = [], []
    for i in range(1000):
        early, history = random_logits(50, i), [0] * (i + 1)
        chances = sampler.chances(sampler.noisy_scores(early, history))
        guess = int(chances.argmax())
        assert guess == sampler.rank(early, history, 1)[0]
        foretold.append(chances)
        happened.append(guess == sampler.choose(early + departure.noise(len(history), 1, 50)[0], history))
    best = torch.stack(foretold).max(-1).values.double()
    accepted = torch.tensor(happened)
    for these in (best < best.median(), best >= best.median()):
        deviation = float((best * (1 - best))[these].sum().sqrt())
        assert abs(float(accepted[these].sum() - best[these].sum())) < 3.5 * deviation


@pytest.mark.parametrize("k", [1, 3, 300])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 2}, {"repetition_penalty": 1.5}],
    ids=str,
)
def test_guesses_of_several_texts_are_those_of_each_alone(settings: dict[str, float], k: int) -> None:
    """Texts of different lengths, such as a tree's; the first two have equal best logits."""
    sampler, texts = Sampler(SamplingParams(seed=2, **settings)), [[5], [5, 7], [5, 7, 7], [9] * 30]
    logits = torch.stack([random_logits(300, i) for i in range(len(texts))])
    logits[:2, [20, 200, 250]] = logits[:2].max()
    for row, (text, guesses) in enumerate(zip(texts, sampler.guesses(logits, texts, k), strict=True)):
        assert [token for token, _ in guesses] == sampler.rank(logits[row], text, k)
        chances = sampler.chances(sampler.noisy_scores(logits[row], text))
        assert [chance for _, chance in guesses] == pytest.approx(chances[[token for token, _ in guesses]].tolist())


def test_greedy_chances_are_the_softmax() -> None:
    logits = random_logits(50, 0)
    sampler = Sampler(SamplingParams())
    assert torch.equal(sampler.chances(sampler.noisy_scores(logits, HISTORY)), logits.softmax(-1))
    cold = Sampler(SamplingParams(temperature=1e-3))
    assert torch.allclose(cold.chances(cold.noisy_scores(logits, HISTORY)), logits.softmax(-1), atol=0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}], ids=str)
def test_the_likeliest_is_the_best_of_the_chances(temperature: float, settings: dict[str, int]) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1, **settings))
    for i in range(50):
        scores = sampler.noisy_scores(random_logits(50, i), HISTORY)
        token, chance = sampler.likeliest(scores)
        chances = sampler.chances(scores)
        assert token == int(chances.argmax())
        assert chance == pytest.approx(float(chances[token]), rel=1e-5)


@pytest.mark.parametrize("scores", [[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0], [-torch.inf, 1.0, 1.0]])
def test_among_equals_the_first_is_chosen_as_pytorch_does(scores: list[float]) -> None:
    logits, sampler = torch.tensor(scores), Sampler(SamplingParams())
    expected = int(logits.argmax())
    assert sampler.choose(logits, HISTORY) == expected == sampler.rank(logits, HISTORY, 1)[0]
    assert sampler.choices(torch.stack([logits, logits.flip(0)])) == [expected, int(logits.flip(0).argmax())]


@pytest.mark.parametrize("settings", [{}, {"logprobs": 1}, *SETTINGS, *BY_THE_TEXT[:5]], ids=str)
@pytest.mark.parametrize("spoilt", [{5: torch.nan, 7: torch.nan}, {5: torch.inf, 6: -torch.inf}, None], ids=str)
def test_what_is_no_number_chooses_nothing(spoilt: dict[int, float] | None, settings: dict[str, object]) -> None:
    logits, sampler = random_logits(VOCAB, 0), Sampler(SamplingParams(**settings))
    for token, number in (spoilt or dict.fromkeys(range(VOCAB), -torch.inf)).items():
        logits[token] = number
    with pytest.raises(RequestError, match=f"logits for position {len(HISTORY)} are NaN or infinite"):
        sampler.choose(logits, HISTORY)
    assert sorted(sampler.rank(logits, HISTORY, VOCAB)) == [*range(VOCAB)], "a guess like any other"
    assert sampler.choices(torch.stack([logits, random_logits(VOCAB, 1)])) in (
        None,
        [NO_TOKEN, int(random_logits(VOCAB, 1).argmax())],
    )


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.4}], ids=str)
def test_what_the_filters_drop_has_no_chance(settings: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.6, **settings)
    sampler, logits = Sampler(params), random_logits(VOCAB, 3)
    kept = transformers_scores(params, logits, HISTORY).isfinite()
    chances = sampler.chances(sampler.noisy_scores(logits, HISTORY))
    assert bool((chances[~kept] == 0).all())
    assert float(chances[kept].sum()) == pytest.approx(1)


def test_noise_stays_the_same_between_versions() -> None:
    """A seed gives the same text after an update; the values are those of numpy's Philox generator."""
    assert gumbel_noise(0, 0, 3) == pytest.approx([-1.4954516, -0.3511371, -0.7859068], abs=1e-6)
    assert gumbel_noise(2**64 - 1, 12345, 3) == pytest.approx([1.6974521, -0.4048619, 1.082957], abs=1e-6)


def test_noise_is_independent_across_positions_and_seeds() -> None:
    keys = [(seed, position) for seed in (0, 1, 2, 2**32, 2**64 - 1) for position in range(30)]
    rows = np.stack([gumbel_noise(seed, position, 2000) for seed, position in keys])
    correlation = np.corrcoef(rows) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5.5 / math.sqrt(2000)
    assert not np.array_equal(gumbel_noise(3, 4, 10), gumbel_noise(4, 3, 10))


def test_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(1, position, 1000) for position in range(100)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    uniform = np.exp(-np.exp(-noise))
    counts = torch.from_numpy(np.histogram(uniform, bins=50, range=(0, 1))[0])
    assert chi_squared_p_value(counts, torch.full((50,), 1 / 50)) > 1e-3


def test_scores_that_are_no_numbers_give_guesses_without_a_chance() -> None:
    """A stage goes on with them: a broken model's tokens are ordinary decoding's, too."""
    logits = torch.full((2, 40), math.nan)
    for row in Sampler(SamplingParams()).guesses(logits, [[1], [2]], 3):
        assert len({token for token, _ in row}) == 3
        assert {chance for _, chance in row} == {0.0}
        assert in_millionths(row) == (0, 0, 0)
        assert GuessRecord().chance(1, 0, row[0][1]) == 0
