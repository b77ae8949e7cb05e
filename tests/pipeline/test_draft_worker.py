"""A draft model's process: what it names, of which places, and that nonsense from it changes no token."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hostile_drafters import FAILURES, HostileNetwork
from torch import Tensor

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import ShortlistSampler
from ppd_runtime.pipeline.messages import Begin, CatchUp, End, Guesses, Message, Missing, Token
from ppd_runtime.pipeline.ports import WaitFor, next_wait
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.chances import Guess
from ppd_runtime.pipeline.staged.draft_worker import DraftWorker
from ppd_runtime.pipeline.staged.guarded_drafts import DrafterHealth, GuardedDrafts
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.tree import number_of
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.workers.message_validator import _of_guesses

RANK, FIRST = 2, 1


class Counting:
    """A network, and its ranking: behind a text that ends with n it names n + 1, less likely n + 2."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.capacities: list[int] = []

    def begin(self, capacity: int) -> None:
        self.capacities.append(capacity)

    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        self.text += tokens

    def draft(self, chains: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [[*self.text, *chain] for chain in chains]

    def guesses(self, logits: list[Sequence[int]], texts: Sequence[Sequence[int]], k: int) -> list[list[Guess]]:
        assert [list(text) for text in texts] == logits, "it has read what the text is"
        return [[(text[-1] + 1, 0.6), (text[-1] + 2, 0.3)][:k] for text in logits]


class Drafting:
    """A machine, and what it has sent."""

    def __init__(self, tokens: int = 20, **begin: Any) -> None:
        self.sent: list[Message] = []
        self.network = Counting()
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        self.begin = Begin(DECIDER, 1, [7, 8], params, live=True, **begin)
        self.start(NetworkDrafts(self.network, self.network, 2, 84, lambda: 0.0, True, False))  # type: ignore[arg-type]

    def start(self, drafts: NetworkDrafts) -> None:
        """Begin the request with this network."""
        self.sent.clear()
        machine = DraftWorker(drafts, RANK, FIRST, lambda addresses, message: self.sent.append(message), self.begin)
        self.machine = machine.serve()
        self.wait = next_wait(self.machine, None)

    def hear(self, message: Message | None) -> None:
        self.wait = next_wait(self.machine, message)

    def drafts(self, most: int) -> list[Guesses]:
        """Let it go on until it waits for a message; what it has named since."""
        before = len(self.sent)
        for _ in range(most):
            if self.wait.patience is None:
                break
            self.hear(None)
        return [message for message in self.sent[before:] if isinstance(message, Guesses)]


def token(position: int, token_id: int, guessing: int = Guessing.EXITS) -> Token:
    return Token(DECIDER, 1, position, token_id, 0, guessing=guessing)


def numbers(*tokens: int) -> list[int]:
    """Of the nodes of a path behind the prompt, the prompt's first."""
    return list(itertools.accumulate(tokens, number_of, initial=0))


def test_it_names_what_follows_the_likeliest_places_first() -> None:
    drafting = Drafting()
    first, second, third = drafting.drafts(3)
    assert [first.nodes, second.nodes, third.nodes] == [(number,) for number in numbers(9, 10)]
    assert (first.token_ids, first.chances) == ((9, 10), (600_000, 300_000))
    assert second.token_ids == (10, 11)
    named = [message.nodes[0] for message in drafting.drafts(200)]
    assert len(set(named)) == len(named) and drafting.wait.patience is None, "it ends where nothing is likely"
    assert numbers(10)[-1] in named


def test_what_comes_true_is_not_named_again_and_a_mistake_is_begun_anew() -> None:
    drafting = Drafting()
    before = {message.nodes for message in drafting.drafts(200)}
    drafting.hear(token(2, 9))
    after = [message.nodes for message in drafting.drafts(200)]
    assert after and not before & set(after)
    drafting.hear(token(3, 40))
    assert [message.nodes for message in drafting.drafts(2)] == [(number,) for number in numbers(9, 40, 41)[2:]]


def test_it_asks_for_tokens_that_it_has_missed() -> None:
    drafting = Drafting()
    drafting.drafts(200)
    drafting.hear(token(4, 11))
    assert drafting.sent[-1] == Missing(RANK, 1, 2, 0)
    drafting.hear(CatchUp(DECIDER, 1, 2, [9, 10, 11]))
    drafting.drafts(200)
    assert drafting.network.text == [7, 8, 9, 10, 11]


def test_it_names_nothing_while_nothing_is_to_be_guessed_nor_behind_the_end() -> None:
    drafting = Drafting(tokens=3, guessing=Guessing.NOTHING)
    assert isinstance(drafting.wait, WaitFor) and drafting.wait.patience is None
    drafting.hear(token(2, 9))
    assert {message.nodes[0] for message in drafting.drafts(200)} == {numbers(9)[-1], *(
        number_of(numbers(9)[-1], named) for named in (10, 11)
    )}  # fmt: skip
    with pytest.raises(StopIteration):
        next_wait(drafting.machine, End(DECIDER, 1))
    assert drafting.network.capacities[-1] == 0, "its memory is free"


@pytest.mark.parametrize("failure", FAILURES)
def test_a_network_that_fails_is_asked_no_more_in_its_request(failure: str) -> None:
    network = HostileNetwork([7, 8, 9, 10], range(40), FAILURES[failure], after=1)
    drafting, health = Drafting(), DrafterHealth()
    ranking = ShortlistSampler(Sampler(drafting.begin.params, 2), network.tokens, 40)
    drafting.start(GuardedDrafts(health, network, ranking, 2, 84, lambda: 0.0, True, False))
    assert [message.nodes for message in drafting.drafts(200)] == [(0,)]
    for certain in (token(2, 9), token(3, 30)):
        drafting.hear(certain)
        assert not drafting.drafts(200) and drafting.wait.patience is None
    assert network.drafts == 2


@pytest.mark.parametrize(
    ("nodes", "tokens", "said"),
    [((1,), (2, 3), (5,)), ((), (2,), (5,)), ((1, 2), (2, 3, 4), (5, 6, 7)), ((1, 2, 3), (4,), (5,))],
)
def test_lists_that_do_not_fit_are_refused(nodes: Any, tokens: Any, said: Any) -> None:
    assert "chances for" in _of_guesses(Guesses(RANK, 1, 0, 0, nodes, tokens, said))


@pytest.mark.parametrize("kind", ["any tokens", "no tokens of the model", "no numbers", "a failure", "an error"])
def test_nonsense_costs_no_token(
    folder: str, ordinary: OrdinaryDecoding, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also where its network fails, and where the process does: it is started again, and given up in the end."""
    drawn = random.Random(0)

    def nonsense(self: NetworkDrafts, paths: Any, texts: Any) -> list[list[Guess]]:
        if kind in ("a failure", "an error") and drawn.random() < 0.1:
            raise RuntimeError("no memory")
        most = 10**6 if kind == "no tokens of the model" else 299
        return [[(drawn.randrange(most), math.nan if kind == "no numbers" else drawn.random()) for _ in range(3)]]

    monkeypatch.setattr(GuardedDrafts if kind == "an error" else NetworkDrafts, "guesses", nonsense)
    given = {"stages": 2, "transport": "local", "speculation": "always", "emulate": EmulatedDevice(1.0)}
    with PPDRuntime(folder, drafter=folder, drafter_device="cpu", **given) as runtime:
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            asked = {"max_new_tokens": 40, "ignore_eos": True, **sampling}
            assert runtime.generate([5, 9, 200], **asked).token_ids == ordinary.generate([5, 9, 200], **asked).token_ids
