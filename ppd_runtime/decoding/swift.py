"""SWIFT (Xia et al.): drafts by the model with some attentions and MLPs left out; verification widens doubtful places.

The draft reads the whole model's entries and writes its own behind them; verification drops those and runs the draft,
a tree, through all layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ppd_runtime.decoding.drafts import Draft
from ppd_runtime.decoding.speculation import Propose
from ppd_runtime.decoding.stopping import StopDrafting, Stopping
from ppd_runtime.models.loading import ModelInfo
from ppd_runtime.models.skipping import LayerSet, share_run, sparse_piece
from ppd_runtime.models.stage import Stage

_WIDTHS = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))
"""Candidates for a place whose confidence is at most so much (section 4.2)."""
_WIDEST = _WIDTHS[0][1]


class Swift:
    """Drafts with sub-layers left out.

    Args:
        stage: the whole model.
        left_out: which sub-layers.
        stopping: the paper's stops behind a confidence below a threshold, at 25 tokens at the latest.
        widens: whether a drafted place has several candidates where it is doubtful (dynamic verification).
    """

    def __init__(self, stage: Stage, left_out: LayerSet, stopping: Stopping, widens: bool = True) -> None:
        self.stage, self._stopping, self._widens = stage, stopping, widens
        self.stop_drafting = StopDrafting(stopping)
        self._leave_out(left_out)

    @property
    def draft_cost(self) -> float:
        """The parameters of the attentions and MLPs that a draft step runs, as a share of the model's."""
        return self._cost

    def begin(self, capacity: int) -> None:
        """Forget the last sequence; a tree's side branches need rows of their own."""
        self.stage.begin(capacity + self._stopping.most * (_WIDEST - 1))
        self.stop_drafting = StopDrafting(self._stopping)

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """Run the whole model over a prompt."""
        return self.stage.run(0, self.stage.num_layers, list(token_ids), 0)

    def draft(self, history: Sequence[int], most: int, propose: Propose) -> Draft:
        """A chain of likeliest tokens with others beside them."""
        draft, text, node = Draft(history[-1]), list(history), 0
        self.stop_drafting.begin_draft(most)
        while self.stop_drafting.wants_more():
            hidden = self.stage.run_piece(self._sparse, text[-1:], len(text) - 1)
            proposals = propose(self.stage.logits(hidden), text, _WIDEST if self._widens else 1)
            nodes = [draft.add(proposal, node) for proposal in proposals[: _width(proposals[0].confidence)]]
            draft.steps += 1
            self.stop_drafting.drafted(proposals[0].confidence)
            text.append(proposals[0].token)
            node = nodes[0]
        return draft

    def verify(self, draft: Draft, position: int) -> Tensor:
        """Drop the draft's own entries and run all of it through all layers."""
        self.stage.truncate(position)
        return self.stage.run_tree(draft.tokens, draft.parents, position)

    def keep(self, draft: Draft, path: Sequence[int], history: Sequence[int]) -> None:
        """Keep the entries of the path alone."""
        self.stage.keep_path(len(history) - 1 - len(path), path)
        self.stop_drafting.judged(draft.steps, len(path) - 1)

    def _leave_out(self, left_out: LayerSet) -> None:
        self._sparse = sparse_piece(self.stage, left_out)
        self._cost = share_run(self.stage.model, left_out)


def _width(confidence: float) -> int:
    return next(width for most, width in _WIDTHS if confidence <= most or most == 1)


def uniform_set(num_layers: int, skip_ratio: float) -> LayerSet:
    """SWIFT's first set: every second layer, or as many as the ratio asks for, evenly spread (section 4.1.1)."""
    inner = num_layers - 2
    wanted = min(int(2 * num_layers * skip_ratio), 2 * inner)
    places = [int((i + 0.5) * 2 * inner / wanted) for i in range(wanted)]
    return LayerSet(
        tuple(place + 1 for place in places if place < inner),
        tuple(place - inner + 1 for place in places if place >= inner),
    )


@dataclass(frozen=True)
class SwiftSettings:
    """SWIFT with the paper's values (appendix B.2)."""

    skip_ratio: float = 0.45
    """r: the share of the model's attentions and MLPs that are left out; the first and the last layer stay whole."""
    num_speculations: int = 25
    """N_D: tokens in a draft at the most."""
    threshold: float = 0.8
    """ε: drafting ends behind the first token whose confidence is below it."""
    dynamic_verification: bool = True
    """Whether doubtful places have several candidates."""

    def prepare(self, info: ModelInfo) -> Callable[[Stage], Swift]:
        """As `MethodSettings.prepare`."""
        stopping = Stopping("confidence", self.num_speculations, self.threshold)
        left_out = uniform_set(info.num_layers, self.skip_ratio)
        return lambda stage: Swift(stage, left_out, stopping, self.dynamic_verification)
