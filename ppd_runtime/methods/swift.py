"""SWIFT (Xia et al.): drafts by the model with some attentions and MLPs left out; verification widens doubtful places.

The draft reads the whole model's entries and writes its own behind them; verification drops those and runs the draft,
a tree, through all layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from ppd_runtime.methods.choices import SWIFT_WIDEST, SWIFT_WINDOW, SearchSettings
from ppd_runtime.methods.drafts import Draft
from ppd_runtime.methods.fused_drafting import GreedyChains
from ppd_runtime.methods.layer_search import LEAST_LAYERS, LayerSearch
from ppd_runtime.methods.speculation import Propose
from ppd_runtime.methods.stopping import Adaptation, StopDrafting, Stopping
from ppd_runtime.models.checkpoint.description import ModelInfo, check_leaving_out
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSet, LayerSubset, share_run, without
from ppd_runtime.models.trained.layer_sets import read_layer_set
from ppd_runtime.settings.checks import check_whole

_WIDTHS = ((0.5, SWIFT_WIDEST), (0.8, 5), (0.95, 3), (1.0, 1))
"""Greatest confidence of a place, and its candidates (section 4.2)."""


class Swift:
    """Drafts with sub-layers left out, and finds out which while it decodes.

    Args:
        stage: the whole model.
        layers: the sub-layers to leave out, or a search for them, which goes on over all requests until it is finished.
        stopping: the paper's stops after a confidence below a threshold, at 25 tokens at the latest.
        window: γ: the newest generated tokens, by which the search scores a set.
        widest: most candidates for a doubtful drafted place (dynamic verification).
    """

    def __init__(
        self,
        stage: LayerRange,
        layers: LayerSet | LayerSearch,
        stopping: Stopping,
        window: int = SWIFT_WINDOW,
        widest: int = SWIFT_WIDEST,
    ) -> None:
        self.stage, self._stopping, self.window, self._widest = stage, stopping, window, widest
        self.search = layers if isinstance(layers, LayerSearch) else None
        self.stop_drafting = StopDrafting(stopping)
        self._prompt_length = self._scored_to = 0
        self._leave_out(layers.best if isinstance(layers, LayerSearch) else layers)

    @property
    def draft_cost(self) -> float:
        """The parameters of the attentions and MLPs that a draft step runs, as a share of the model's."""
        return self._cost

    @property
    def steered_by(self) -> int:
        """The requests that the search has used."""
        return self.search.requests if self.search else 0

    def begin(self, capacity: int) -> None:
        """Forget the last sequence, not what the search found; a tree's side branches need rows of their own."""
        if self.search:
            self.search.begin_request()
        self.stage.begin(capacity + self._stopping.most * (self._widest - 1))
        self.stop_drafting = StopDrafting(self._stopping)

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """Run the whole model over a prompt."""
        self._prompt_length = self._scored_to = len(token_ids)
        return self.stage.run(0, self.stage.num_layers, list(token_ids), 0)

    def draft(self, history: Sequence[int], most: int, propose: Propose) -> Draft:
        """A step of the search, then a chain of likeliest tokens with others beside them."""
        if most and self.search and len(history) - self._prompt_length >= self.window:
            self._improve(self.search, history)
        draft, node = Draft(history[-1]), 0
        if self._chains and self._chains.possible and propose.takes_highest_logit:
            chain = self._chains.draft(history[-1], len(history) - 1, self.stop_drafting.rule(most))
            draft.add_chain(chain)
            return draft
        text = list(history)
        self.stop_drafting.begin_draft(most)
        while self.stop_drafting.wants_more():
            hidden = self.stage.run_subset(self._sparse, text[-1:], len(text) - 1)
            proposals = propose(self.stage.logits(hidden), text, self._widest)
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
        """Keep only the path's entries."""
        self.stage.keep_path(len(history) - 1 - len(path), path)
        self.stop_drafting.judged(draft.steps, len(path) - 1)
        if self.search:
            self.search.judged(draft.steps, len(path) - 1)

    def _improve(self, search: LayerSearch, history: Sequence[int]) -> None:
        if not search.finished:
            new_window = len(history) - self._scored_to >= self.window
            self._scored_to = len(history) if new_window else self._scored_to
            search.score(self.matchness(search.suggest(new_window), history))
        if search.best != self.left_out:
            self._leave_out(search.best)

    def matchness(self, left_out: LayerSet, history: Sequence[int]) -> float:
        """The share of the newest tokens that drafts without these sub-layers predict (equations 3 and 4).

        Runs one pass over the window, after the whole model's entries of earlier text. The window's own entries, which
        the pass overwrites, are restored.
        """
        stage, newest = self.stage, len(history) - 1
        first = newest - self.window
        entries = stage.export_entries(first, newest, stage.num_layers)
        stage.truncate(first)
        hidden = stage.run_subset(sparse_subset(stage, left_out), list(history[first:newest]), first)
        stage.truncate(first)
        stage.import_entries(entries.unbind())
        guesses = stage.token_logits(hidden).argmax(-1).tolist()
        return sum(map(eq, guesses, history[first + 1 :])) / self.window

    def _leave_out(self, left_out: LayerSet) -> None:
        self.left_out = left_out
        self._sparse = sparse_subset(self.stage, left_out)
        self._chains = GreedyChains(self.stage, self._sparse) if self._widest == 1 else None
        self._cost = share_run(self.stage.model, left_out)


def sparse_subset(stage: LayerRange, left_out: LayerSet) -> LayerSubset:
    """A stage's model without some sub-layers, over the stage's own caches; at least one attention must stay.

    A layer without attention and MLP is not run.
    """
    layers = {}
    for number, layer in enumerate(stage.model.model.layers):
        attention, mlp = number in left_out.attention, number in left_out.mlp
        if not (attention and mlp):
            layers[number] = without(layer, attention=attention, mlp=mlp) if attention or mlp else layer
    attending = tuple(number for number in layers if number not in left_out.attention)
    return stage.subset(layers, attending, tuple(number for number in layers if number in left_out.mlp))


def _width(confidence: float) -> int:
    return next(width for most, width in _WIDTHS if confidence <= most or most == 1)


@dataclass(frozen=True)
class SwiftSettings:
    """SWIFT with the paper's values (appendix B.2)."""

    pass_kinds: ClassVar = (PassKind.ONE, PassKind.SEVERAL, PassKind.WITHOUT_ATTENTION, PassKind.WITHOUT_MLP)
    layer_set: str | Path | None = None
    """A file of `ppd search-layers`: nothing is searched then."""
    skip_ratio: float | None = None
    """r: the share of the model's attentions and MLPs that are left out; None is 0.45, or the file's."""
    stopping: str = "confidence"
    """Early-stopped drafting; constant, or product, instead."""
    num_speculations: int = 25
    """N_D: tokens in a draft at the most."""
    threshold: float = 0.6
    """ε: drafting ends behind the first token whose confidence is below it; the paper names no value."""
    adaptive: bool = False
    """Whether the threshold follows the acceptance rate, as AdaSPEED's."""
    adaptation: Adaptation = field(default_factory=Adaptation)
    """How the threshold follows the acceptance rate."""
    widest: int = SWIFT_WIDEST
    """Candidates that a doubtful place has at the most; the paper's 10, 5, 3, 1 go by confidence, 1 drafts chains."""
    context_window: int = SWIFT_WINDOW
    """γ: generated tokens by which the search scores a set."""
    search_steps: int = SearchSettings.steps
    """S: sets that are tried at the most; with 0 the uniform set stays."""
    bayes_interval: int = SearchSettings.bayes_interval
    """β: every β-th set is Bayesian optimisation's, which needs the extra `swift`; with 0 all are random."""
    search_windows: int = SearchSettings.windows
    """Windows of text by which a set must have been scored before its score ends the search; 1 is the paper's."""
    search_seed: int = SearchSettings.seed
    """The same seed and requests give the same search."""

    def prepare(self, info: ModelInfo) -> Callable[[LayerRange], Swift]:
        """Implements `MethodSettings.prepare`."""
        adaptation = self.adaptation if self.adaptive else None
        stopping = Stopping(self.stopping, self.num_speculations, self.threshold, adaptation)
        if self.stopping == "probe":
            raise ValueError("stopping='probe': a probe judges exit states, swift has none; choose another rule")
        window, widest = self.context_window, self.widest
        check_whole("context_window", window, 1)
        check_whole("widest", widest, 1)
        check_leaving_out(info, "swift", LEAST_LAYERS)
        if self.layer_set is not None:
            if self.skip_ratio is not None:
                raise ValueError(f"skip_ratio={self.skip_ratio}: layer_set says what to leave out; give one of them")
            found = read_layer_set(self.layer_set, info)
            return lambda stage: Swift(stage, found, stopping, window, widest)
        search = self._search(info.num_layers)
        return lambda stage: Swift(stage, search, stopping, window, widest)

    def _search(self, num_layers: int) -> LayerSearch:
        ratio = SearchSettings.skip_ratio if self.skip_ratio is None else self.skip_ratio
        seed, windows = self.search_seed, self.search_windows
        settings = SearchSettings(ratio, self.search_steps, self.bayes_interval, seed=seed, windows=windows)
        return LayerSearch(num_layers, settings)
