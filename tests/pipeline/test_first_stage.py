"""What the first stage lets into the pipeline, and in which order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipeline_runs import Bench, begin_message

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import MISS, Message, Rows, Token
from ppd_runtime.pipeline.ports import next_wait
from ppd_runtime.pipeline.staged.chances import GuessRecord
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import DECIDER

PROMPT = [1, 2, 3]
ROWS = 4
Named = list[tuple[int, float]]


@pytest.fixture(scope="module")
def bench(model_folder: Callable[..., Path]) -> Bench:
    """A small model."""
    return Bench.of(model_folder("llama"))


class Driven:
    """A first stage of its own request, whose head always names the same; it notes the rows that it sends."""

    def __init__(
        self, bench: Bench, named: Named, prompt: Sequence[int] = PROMPT, repetitions: bool = False, **settings: object
    ) -> None:
        self.passes: list[Rows] = []
        begin = begin_message(prompt, SamplingParams(max_new_tokens=30))
        head = SimpleNamespace(guesses=lambda hidden, texts, k: [named for _ in texts])
        stage, rows = TreeRange(bench.stage(2), 128), ROWS
        settings = {"repetitions": repetitions, **settings}
        self.first = FirstStage(stage, head, 2, len(named), rows, self._note, begin, **settings)
        self._machine = self.first.serve()
        self._go_on(None)

    def _note(self, addresses: Sequence[int], message: Message) -> None:
        if isinstance(message, Rows):
            self.passes.append(message)

    def _go_on(self, message: Message | None) -> None:
        """Until it has nothing to do but wait."""
        wanted = next_wait(self._machine, message)
        while wanted.patience is not None:
            wanted = next_wait(self._machine, None)

    def decide(self, token: int) -> None:
        """The last stage's word on the next token."""
        self._go_on(Token(DECIDER, self.first.begin.request, len(self.first.history), token, MISS))

    def entered_behind(self, place: int) -> list[int]:
        """Tokens behind the first `place` certain ones, in the order in which they entered the pipeline."""
        number = 0
        for token in self.first.history[len(PROMPT) : place]:
            number = next(n for t, n, parent in self._entered() if (t, parent) == (token, number))
        return [token for token, _, parent in self._entered() if parent == number]

    def _entered(self) -> list[tuple[int, int, int]]:
        """Each token with its node's number and its parent's."""
        return [row for rows in self.passes for row in zip(rows.token_ids, rows.nodes, rows.parents, strict=True)]


def test_what_is_wrong_again_and_again_enters_behind_what_is_right(bench: Bench) -> None:
    """The head says 60 % of one token, and 30 % of another one, which comes true each time."""
    driven = Driven(bench, [(5, 0.6), (6, 0.3)])
    assert driven.entered_behind(len(PROMPT)) == [5, 6]
    for _ in range(12):
        driven.decide(6)
    assert driven.entered_behind(len(driven.first.history))[0] == 6
    misses = next(place for place in range(12) if driven.entered_behind(len(PROMPT) + place)[0] == 6)
    assert misses > 1, "the head's own word counts for something"


def test_what_requests_learn_they_share(bench: Bench) -> None:
    shared = GuessRecord()
    before = Driven(bench, [(5, 0.6), (6, 0.3)], calibration=shared)
    for _ in range(12):
        before.decide(6)
    later, another = (Driven(bench, [(5, 0.6), (6, 0.3)], calibration=own) for own in (shared, GuessRecord()))
    assert later.entered_behind(len(PROMPT))[0] == 6
    assert another.entered_behind(len(PROMPT))[0] == 5


def test_what_enters_is_what_has_the_likeliest_paths(bench: Bench) -> None:
    """Not what the head finds likeliest behind a node: that may be unlikely itself."""
    said = {5: 0.5, 6: 0.2, 7: 0.1}
    first, second = Driven(bench, [*said.items()]).passes[:2]
    assert first.token_ids == (5, 6, 7)
    behind = {node: said[token] for node, token in zip(first.nodes, first.token_ids, strict=True)}
    chances = [behind[parent] * said[token] for parent, token in zip(second.parents, second.token_ids, strict=True)]
    assert chances == pytest.approx([0.25, 0.1, 0.1, 0.05])


def test_a_text_that_repeats_itself_enters_as_a_chain_at_once(bench: Bench) -> None:
    """Boundary 0 needs no pass between two of its tokens; a head names what is behind a row that has run."""
    text = [5, 9, 7, 8, 5, 9, 7, 8, 5, 9]
    chain, by_the_head = (Driven(bench, [(7, 0.9)], text, repetitions).passes[0] for repetitions in (True, False))
    assert chain.token_ids == (7, 8, 5, 9)
    assert chain.parents == (0, *chain.nodes[:-1])
    assert by_the_head.token_ids == (7,)
