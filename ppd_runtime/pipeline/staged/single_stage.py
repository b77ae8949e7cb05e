"""One stage with all layers: each pass verifies the newest token's likeliest successors beside it."""

from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import MISS, Begin, Foreseen, Token
from ppd_runtime.pipeline.ports import Awaited, Call, Machine, Send, Work
from ppd_runtime.pipeline.speculation_policy import SpeculationPolicy
from ppd_runtime.pipeline.staged.chances import GuessRecord
from ppd_runtime.pipeline.staged.decider import StagedDecider
from ppd_runtime.pipeline.staged.earlier_texts import EarlierTexts
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.node_passes import run_nodes
from ppd_runtime.pipeline.staged.ports import Logits
from ppd_runtime.pipeline.staged.row_chooser import RowChooser
from ppd_runtime.pipeline.staged.tree import RowState
from ppd_runtime.sampling.constraint import Constraint
from ppd_runtime.sampling.gpu_choice import UnreadLogits
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

_NAMED, _UNNAMED = 0, 1
"""Boundaries of `Foreseen`."""
_HIT = 1
"""`Token.winner` of a token that was a row of the pass before."""


class SingleStage(StagedDecider):
    """Decodes one request in one process; see `RowChooser` for the other arguments.

    A pass has a row for the newest certain token and further rows for a tree behind it. Its states decide the next
    token, and the one after that if the next token was a row, and so on: a token that was a row costs no pass.

    Args:
        rows: most rows of a pass.
    """

    def __init__(
        self,
        stage: TreeRange,
        rows: int,
        send: Send,
        begin: Begin,
        policy: SpeculationPolicy | None = None,
        calibration: GuessRecord | None = None,
        repetitions: bool = True,
        row_cost: float = 0.0,
        earlier: EarlierTexts | None = None,
        network: NetworkDrafts | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(stage, send, begin, policy)
        self.rows = rows
        self.asked = self.foreseen = 0
        self._network = network
        self._of_pass: tuple[Tensor, Sequence[Tensor]] | None = None  # a pass' states, and their logits
        last_position = len(begin.prompt_ids) + begin.params.max_new_tokens - 2
        record = calibration or GuessRecord()
        self._chooser = RowChooser(
            self._tree, last_position, record, repetitions, stage.only_chains, row_cost, earlier, network, constraint
        )

    def take_turn(self, rows: int) -> None:
        """Go on with at most `rows` of a pass."""
        self.rows = rows

    def counts(self) -> dict[str, Any]:
        """Fields of `PathStats`."""
        return super().counts() | {"asked": self.asked, "foreseen": self.foreseen}

    def _end(self, passes_before: int) -> None:
        super()._end(passes_before)
        self._of_pass = None
        if self._network is not None:
            self._network.release()

    def _decode(self, stop: StopRule) -> Generator[Awaited, Any, int | None]:
        self.policy.begin()
        self.stage.begin(len(self.begin.prompt_ids) + self.begin.params.max_new_tokens, self.begin.prompt_ids)
        self._chooser.guessing = self.policy.guessing
        yield from self._run_prompt()
        while True:
            yield from self._take_all()
            if self._cancelled:
                self.finish_reason = "cancelled"
                return None
            if (hidden := self._decisive()) is None:
                yield from self._run_pass()
                continue
            if self._network is not None:
                self._chooser.note_states(len(self.history) - 1, self.stage.told(hidden))
            token = self._choose((yield from self._logits(hidden)), stop)
            if self.finish_reason:
                return token
            self._settle(token)

    def _logits(self, hidden: Tensor) -> Generator[Awaited, Any, Tensor | UnreadLogits]:
        """The newest token's logits; those of all rows of its pass are computed together if that keeps their bits."""
        state = None if self._tree.root is self._tree.prompt else self._tree.root.hidden
        if state is None or state.rows.shape[1] == 1 or not self.stage.joins_heads:
            return (yield Logits(self.stage, hidden))
        rows = state.rows
        if self._of_pass is None or self._of_pass[0] is not rows:
            states = [(self.stage, rows[:, row : row + 1]) for row in range(rows.shape[1])]
            self._of_pass = rows, (yield Call(self.stage.logits_together, states))
        return self._of_pass[1][state.row]

    def _settle(self, token: int) -> None:
        """A token is certain: tell the client, and keep its row if it was one."""
        self.policy.note(len(self.history))
        guesses, named = self._chooser.learn(token)
        position = len(self.history) - 1
        if guesses:
            self.asked += 1
            self.foreseen += named is not None
        self._tree.settle()
        was_row = self._tree.root.position == position
        self._tell_client(Token(DECIDER, self.begin.request, position, token, _HIT if was_row else MISS))
        if self.begin.foreseen:
            boundary = _UNNAMED if named is None else _NAMED
            self.send((CLIENT,), Foreseen(DECIDER, self.begin.request, position, boundary))
        self._chooser.guessing = self.policy.guessing
        self._chooser.follow_text()
        self._chooser.forget_dropped()

    def _run_prompt(self) -> Machine:
        """Run the prompt's chunks, unless the request is cancelled."""
        prompt = self.begin.prompt_ids
        for chunk in self.stage.prompt_chunks(len(prompt)):
            yield from self._take_all()
            if self._cancelled:
                return
            states = yield Call(self.stage.run_prompt, prompt[chunk.start : chunk.stop], chunk.start)
            if not self.begin.delivered:
                yield Call(self._sampler.note_prompt, self.stage.logits, states, self.history, chunk.start)
            if self._network is not None and self._network.reads_prompt:
                self._chooser.note_states(chunk.start, self.stage.told(states))
        self.cached_tokens = self.stage.cached_tokens
        self._tree.prompt.hidden = RowState(states, states.shape[1] - 1)
        self._chooser.follow_text()
        self._chooser.name_drafts(self._tree.prompt, asks_network=False)  # the first token waits for no network

    def _run_pass(self) -> Machine:
        nodes = self._chooser.choose(self.rows)
        nodes, hidden = yield from run_nodes(self.stage, self._tree, nodes, [node.token for node in nodes], None)
        for row, node in enumerate(nodes):
            node.hidden = RowState(hidden, row)
            if self._network is not None and node.position < len(self.history) - 1 and node.is_certain:
                self._chooser.note_states(node.position, self.stage.told(node.hidden.alone()))

    def _work(self) -> Work:
        return Work.LITTLE if self._cancelled or self._decisive() is not None else Work.NEEDED
