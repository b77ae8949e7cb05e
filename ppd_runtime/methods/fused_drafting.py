"""Greedy draft chains through part of a stage, each made and verified in one call, if passes are compiled for it."""

from collections.abc import Sequence

from torch import Tensor

from ppd_runtime.models.native.drafts import TIMES, ChainDrafting, DraftedChain, DraftRule
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSubset
from ppd_runtime.models.trained.probe import Probe
from ppd_runtime.tracing.spans import Kind


class GreedyChains:
    """Drafts a chain of a stage's likeliest tokens, and verifies it by all layers if there is code for so many tokens.
    Notes times and passes as the stage does, but not the time of choosing in the verification.

    Args:
        stage: what drafts, and has read the text so far.
        layers: the number of first layers, which the last draft runs too; or a piece.
        behind: what drafts go through between the layers and its head, such as an adapter's stage.
        probe: predicts from the state after the layers whether a draft will stay, in place of the draft's softmax.
    """

    def __init__(
        self, stage: LayerRange, layers: int | LayerSubset, behind: LayerRange | None = None, probe: Probe | None = None
    ) -> None:
        self._stage, self._behind = stage, behind
        self._drafting: ChainDrafting | None = stage.chain_drafting(layers, behind)
        if self._drafting and probe:
            self._drafting.foretell(probe.direction, float(probe.bias))
        if isinstance(layers, int):
            self._run_layers, self._first, self._last, self._continues_at = layers, 0, layers, layers
        else:
            self._run_layers, self._first, self._last = layers.num_layers, layers.attending[0], stage.num_layers
            self._continues_at = 0

    @property
    def possible(self) -> bool:
        """Whether there is code for it."""
        return self._drafting is not None

    def draft(self, token: int, position: int, rule: DraftRule, unread: Tensor | None = None) -> DraftedChain:
        """Draft after `token` at `position`, and verify if there is code for it.

        `unread` are states, `[1, tokens, hidden_size]`, that `behind` reads before those of this chain.
        """
        assert self._drafting
        stage, behind = self._stage, self._behind
        stage.check_position(self._first, position)
        stage.check_position(self._continues_at, position)
        place, read = behind.length(0) if behind else 0, 0 if unread is None else unread.shape[1]
        chain = self._drafting.run(stage.cache.layers, token, rule, behind.cache.layers if behind else (), unread)
        if stage.recorder.traced:
            for i in range(chain.ran):
                times, drafted = chain.times[TIMES * i : TIMES * (i + 1)], chain.tokens[i : i + 1]
                self._note_token(times, position + i, place + i + (read if i else 0), drafted)
            self._note_verification(chain, position)
        elif chain.ran or chain.choices:
            self._note_sums(chain)
        stage.layer_passes += chain.ran * self._run_layers
        if chain.choices:
            stage.layer_passes += stage.num_layers - self._continues_at
        if behind:
            behind.layer_passes += len(chain.tokens) * behind.num_layers
        return chain

    def _note_sums(self, chain: DraftedChain) -> None:
        """Note one span of each kind: more would take long, since caches are cold between two passes."""
        note, (layers, part, heads, choices) = self._stage.recorder.note, chain.spent
        began = chain.times[0] if chain.ran else chain.verified[0]
        behind_layers = began + layers + part
        note(Kind.LAYERS, began, behind_layers)
        note(Kind.HEAD, behind_layers, behind_layers + heads)
        note(Kind.CHOOSE, behind_layers + heads, behind_layers + heads + choices)

    def _note_token(self, times: Sequence[float], position: int, place: int, drafted: Sequence[int]) -> None:
        """Note the spans of a token at `position`, `place` in the part behind; `drafted` is what it drafted, if any."""
        note, behind = self._stage.recorder.note, self._behind
        began, behind_layers, behind_part, behind_head, chosen = times
        note(Kind.LAYERS, began, behind_layers, position, -1, 0, self._last)
        if drafted:
            if behind:
                note(Kind.LAYERS, behind_layers, behind_part, place, -1, 0, behind.num_layers)
            note(Kind.HEAD, behind_part, behind_head)
            note(Kind.CHOOSE, behind_head, chosen, position + 1, drafted[0])

    def _note_verification(self, chain: DraftedChain, position: int) -> None:
        """Note its spans but the choice; `position` is the first token's."""
        if chain.choices:
            began, behind_layers, behind_head, _ = chain.verified
            last = self._stage.num_layers
            self._stage.recorder.note(Kind.LAYERS, began, behind_layers, position, -1, self._continues_at, last)
            self._stage.recorder.note(Kind.HEAD, behind_layers, behind_head)
