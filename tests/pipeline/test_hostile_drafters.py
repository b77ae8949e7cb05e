"""Drafters that fail, take long or give nonsense cost time: tokens are ordinary decoding's, and a line is logged."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from grids import nightly
from hostile_drafters import FAILURES, NONSENSE, FailsToBegin, FailsToFollow, HostileNetwork, any_misdeed
from pipeline_runs import PROMPTS, Bench
from seeds import SEED
from staged_runs import StagedRun
from test_single_stage import SingleRun

from ppd_runtime.models.trained.exit_heads import ShortlistSampler
from ppd_runtime.pipeline.messages import Token
from ppd_runtime.pipeline.staged.drafters import OwnText
from ppd_runtime.pipeline.staged.earlier_texts import NOWHERE, EarlierTexts
from ppd_runtime.pipeline.staged.guarded_drafts import DrafterHealth, GuardedDrafts, usable
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler

GREEDY = SamplingParams(max_new_tokens=14, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_k=40, seed=7)
CUTS: list[tuple[int, ...]] = [(), (2,), (1, 2)]
PASS_S = 1.0


@pytest.fixture(scope="module")
def bench(model_folder) -> Bench:
    """A small model."""
    return Bench.of(model_folder("llama", num_layers=3))


class Drafted:
    """Requests with one drafter, in one stage or several."""

    def __init__(self, bench: Bench, cuts: tuple[int, ...], params: SamplingParams) -> None:
        self.bench, self.cuts, self.params = bench, cuts, params
        self.prompt = bench.prompt_ids(PROMPTS[3])
        self.expected = bench.ordinary(self.prompt, params).tokens
        self.health, self.pass_s = DrafterHealth(), PASS_S

    def network(self, kind: type[HostileNetwork], misdeed: Callable, after: int = 0) -> HostileNetwork:
        return kind([*self.prompt, *self.expected], range(self.bench.info.vocab_size), misdeed, after)

    def check(self, network: HostileNetwork, meddle: Callable = lambda run: None, seed: int | None = None) -> None:
        """A request's tokens."""
        vocab_size = self.bench.info.vocab_size
        ranking = ShortlistSampler(Sampler(self.params, len(self.prompt)), range(vocab_size), vocab_size)
        drafts = GuardedDrafts(self.health, network, ranking, 3, 14 + 64, lambda: self.pass_s)
        if self.cuts:
            run = StagedRun(self.bench, self.prompt, self.params, self.cuts, 2, 4, seed, lambda: drafts)
            meddle(run)
            assert run.run() == self.expected
        else:
            single = SingleRun(self.bench, self.prompt, self.params, rows=4, chains=False)
            single.machine._network = single.machine._chooser._network = drafts
            single.machine._chooser._drafters = []
            assert single.to_the_end() == self.expected


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("after", [0, 4])
def test_what_fails_is_asked_no_more_in_its_request_and_told_once(bench, caplog, cuts, after) -> None:
    for name, misdeed in FAILURES.items():
        drafted = Drafted(bench, cuts, SAMPLED if after else GREEDY)
        caplog.clear()
        for _ in range(2):
            network = drafted.network(HostileNetwork, misdeed, after)
            drafted.check(network)
            assert network.drafts == after + 1, name
        (line,) = caplog.messages
        assert line.startswith("the drafter fails, and is asked no more where it does: ")
        assert "\n" not in line


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("kind", [FailsToBegin, FailsToFollow])
def test_what_cannot_read_names_nothing(bench, caplog, cuts, kind) -> None:
    drafted = Drafted(bench, cuts, GREEDY)
    for _ in range(2):
        network = drafted.network(kind, torch.clone)
        drafted.check(network)
        assert network.drafts == 0
    (line,) = caplog.messages
    assert "no room for" in line


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nonsense_changes_no_token(bench, caplog, cuts, params) -> None:
    for name in NONSENSE.keys() - {"slow"}:
        drafted = Drafted(bench, cuts, params)
        network = drafted.network(HostileNetwork, NONSENSE[name])
        drafted.check(network)
        assert network.drafts > 1, name
    assert not caplog.messages


@pytest.mark.parametrize("cuts", CUTS)
def test_a_slow_one_is_tried_twice_by_all_requests_together(bench, cuts) -> None:
    """The first time may be a cold start."""
    drafted = Drafted(bench, cuts, GREEDY)
    drafted.pass_s = 0.01
    networks = [drafted.network(HostileNetwork, NONSENSE["slow"]) for _ in range(3)]
    for network in networks:
        drafted.check(network)
    assert [network.drafts for network in networks] == [1, 1, 0]


@pytest.mark.parametrize("cuts", CUTS[1:])
@pytest.mark.parametrize(
    "state",
    [torch.full((1, 1, 32), float("nan")), torch.zeros(1, 1, 5), torch.zeros(0), torch.zeros(1, 1, 32).long()],
    ids=["NaN", "narrow", "empty", "whole"],
)
def test_states_that_a_last_stage_made_up_cost_time_only(bench, cuts, state) -> None:
    """Those of a wrong shape or type a worker refuses before; here they arrive."""

    def meddle(run: StagedRun) -> None:
        run.meddle(Token, 3, lambda token: [replace(token, hidden=state)])

    drafted = Drafted(bench, cuts, SAMPLED)
    drafted.check(drafted.network(HostileNetwork, torch.clone), meddle)


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
@pytest.mark.parametrize("cuts", CUTS)
def test_any_misdeeds_beside_restarts_and_mishaps(bench, cuts, seed) -> None:
    _seeded(bench, cuts, seed)


@nightly
@pytest.mark.parametrize("cuts", CUTS)
def test_hundreds_of_them(bench, cuts) -> None:
    for seed in range(SEED + 6, SEED + 206):
        _seeded(bench, cuts, seed)


def _seeded(bench: Bench, cuts: tuple[int, ...], seed: int) -> None:
    generator = random.Random(seed)
    drafted = Drafted(bench, cuts, generator.choice([GREEDY, SAMPLED]))
    drafted.pass_s = generator.choice([PASS_S, 0.1])

    def meddle(run: StagedRun) -> None:
        for step in generator.sample(range(5, 200), 4):
            rank, introduced = generator.randrange(len(cuts) + 1), generator.random() < 0.5
            run.network.plan[step] = lambda rank=rank, introduced=introduced: run.lose(rank, introduced)
        run.network.arriving = lambda address, message: [message] * generator.choices((0, 1, 2), (1, 40, 4))[0]

    network = drafted.network(HostileNetwork, any_misdeed(generator), generator.randrange(6))
    drafted.check(network, meddle, generator.choice([None, seed]))


def test_text_drafters_that_find_no_memory_are_left_aside(bench, caplog, monkeypatch) -> None:
    def no_room(self, token):
        raise MemoryError

    monkeypatch.setattr(OwnText, "follow", no_room)
    prompt = bench.prompt_ids(PROMPTS[3])
    run = SingleRun(bench, prompt, GREEDY)
    assert run.to_the_end() == bench.ordinary(prompt, GREEDY).tokens
    assert caplog.messages == ["OwnText guesses no more in this request: MemoryError: "]


def test_earlier_texts_for_which_there_is_no_memory_are_forgotten(monkeypatch) -> None:
    texts = EarlierTexts(1)
    texts.add([1, 2, 3, 4])
    monkeypatch.setattr(texts._young, "_added", lambda *numbers: (_ for _ in ()).throw(MemoryError))
    texts.add([5, 6, 7])
    texts.add([7, 8, 9])
    cursor = texts.advance(texts.advance(texts.advance(NOWHERE, 1), 2), 8)
    assert texts.guess(cursor) == (9, 1), "only what came later is known"


def test_what_cannot_be_loaded_or_names_foreign_tokens_is_left_aside(caplog) -> None:
    def load(tokens):
        if not tokens:
            raise OSError("gone")
        return HostileNetwork([], tokens, torch.clone)

    assert usable(load, range(300), vocab_size=300)
    assert [usable(load, tokens, vocab_size=300) for tokens in ((), (5, 300), (-1, 5))] == [None] * 3
    begins = "no drafter guesses, for it cannot be loaded: "
    assert caplog.messages == [
        begins + "OSError: gone",
        begins + "ValueError: token id 300 is not among the model's 300",
        begins + "ValueError: token id -1 is not among the model's 300",
    ]
