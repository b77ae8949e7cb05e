"""Chains of greedy drafts through part of a stage, each in one call, where passes are compiled so that they can be."""

import itertools
from collections.abc import Sequence

from torch import Tensor

from ppd_runtime.models.native.drafts import TIMES, DraftRule
from ppd_runtime.models.stage import Piece, Stage
from ppd_runtime.spans import Kind


class GreedyChains:
    """Drafts a stage's likeliest tokens one behind the other; notes times and passes as the stage does.

    Args:
        stage: what drafts, and has read the text so far.
        layers: the first so many layers, which the last draft runs through too; or a piece.
        behind: what drafts go through between the layers and its head, such as an adapter's stage.
    """

    def __init__(self, stage: Stage, layers: int | Piece, behind: Stage | None = None) -> None:
        self._stage, self._behind = stage, behind
        self._drafting = stage.chain_drafting(layers, behind)
        if isinstance(layers, int):
            self._run_layers, self._first, self._last = layers, 0, layers
        else:
            self._run_layers, self._first, self._last = layers.num_layers, layers.attending[0], stage.num_layers

    @property
    def possible(self) -> bool:
        """Whether there is code for it."""
        return self._drafting is not None

    def draft(
        self, token: int, position: int, rule: DraftRule, unread: Tensor | None = None
    ) -> tuple[list[int], Tensor]:
        """The drafts behind `token`, which stands at `position`, and `[1, ran, hidden_size]` states behind the layers.

        `unread` are states, `[1, tokens, hidden_size]`, that `behind` reads before those of this chain.
        """
        assert self._drafting
        stage, behind = self._stage, self._behind
        stage.check_position(self._first, position)
        place, unread_tokens = behind.length(0) if behind else 0, 0 if unread is None else unread.shape[1]
        chain = self._drafting.run(stage.cache.layers, token, rule, behind.cache.layers if behind else (), unread)
        if stage.recorder.traced:
            for i in range(chain.ran):
                times, drafted = chain.times[TIMES * i : TIMES * (i + 1)], chain.tokens[i : i + 1]
                self._note(times, position + i, place + i + (unread_tokens if i else 0), drafted)
        elif chain.ran:  # in caches as cold as those between two passes, one span of each kind is soon noted
            times = list(itertools.accumulate(chain.spent, initial=chain.times[0]))
            self._note(times, position, place, chain.tokens[:1])
        stage.layer_passes += chain.ran * self._run_layers
        if behind:
            behind.layer_passes += len(chain.tokens) * behind.num_layers
        return chain.tokens, chain.states

    def _note(self, times: Sequence[float], position: int, place: int, drafted: Sequence[int]) -> None:
        """The spans of a token at `position`, at `place` for the part behind; `drafted` is what was drafted, if any."""
        note, behind = self._stage.recorder.note, self._behind
        began, behind_layers, behind_part, behind_head, chosen = times
        note(Kind.LAYERS, began, behind_layers, position, -1, 0, self._last)
        if drafted:
            if behind:
                note(Kind.LAYERS, behind_layers, behind_part, place, -1, 0, behind.num_layers)
            note(Kind.HEAD, behind_part, behind_head)
            note(Kind.CHOOSE, behind_head, chosen, position + 1, drafted[0])
