"""Computes for the machines of several requests, batched where possible."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import ModelHead
from ppd_runtime.pipeline.ports import Computation
from ppd_runtime.pipeline.staged.ports import Logits, Naming, RowsPass
from ppd_runtime.tracing.recorder import JointRecorder
from ppd_runtime.workers.session import Session

_Kind = TypeVar("_Kind", bound=Computation)


class JointPasses:
    """Gathers the computations of several requests, and gives each result with its request's session."""

    def __init__(self, stage: LayerRange, rows: TreeRange | None) -> None:
        self._stage, self._rows = stage, rows
        self._asked: list[tuple[Session, Computation]] = []

    def add(self, session: Session, computation: Computation) -> None:
        """Add a computation that a request's machine waits for."""
        self._asked.append((session, computation))

    @property
    def num_rows(self) -> int:
        """The number of rows in all passes that wait to be computed."""
        return sum(len(asked.paths) for _, asked in self._asked if isinstance(asked, RowsPass))

    def __bool__(self) -> bool:
        return bool(self._asked)

    def results(self) -> Iterator[tuple[Session, Any]]:
        """Compute all that has been added, passes first, so that their states are sent before heads are computed."""
        asked, self._asked = self._asked, []
        yield from self._computed(_of_kind(asked, RowsPass), self._run_passes)
        yield from self._computed(_of_kind(asked, Logits), self._find_logits)
        yield from self._computed(_of_kind(asked, Naming), self._name)

    def _computed(self, asked: "list[tuple[Session, _Kind]]", compute: Any) -> Iterator[tuple[Session, Any]]:
        if not asked:
            return
        sessions = [session for session, _ in asked]
        if len(sessions) > 1:
            began = time.perf_counter()
            for session in sessions:
                session.note_wait(began)
        self._stage.recorder = JointRecorder([session.recorder for session in sessions])
        yield from zip(sessions, compute([computation for _, computation in asked]), strict=True)

    def _run_passes(self, asked: Sequence[RowsPass]) -> Sequence[Any]:
        layers = asked[0].layers
        if any(one.layers != layers for one in asked):
            return [one.alone() for one in asked]
        return asked[0].stage.run_together([(one.stage, one.inputs, one.paths) for one in asked], layers)

    def _find_logits(self, asked: Sequence[Logits]) -> Sequence[Any]:
        assert self._rows is not None, "only stages ask for logits"
        if len(asked) == 1:
            return [asked[0].alone()]
        return self._rows.logits_together([(one.stage, one.hidden) for one in asked])

    def _name(self, asked: Sequence[Naming]) -> Iterator[Any]:
        heads = [one.head for one in asked if isinstance(one.head, ModelHead)]
        if len(heads) < len(asked) or len(asked) == 1:
            yield from (one.alone() for one in asked)
            return
        sizes = [len(one.texts) for one in asked]
        logits = self._stage.token_logits(torch.cat([one.hidden for one in asked], dim=1)).split(sizes)
        for one, head, of_one in zip(asked, heads, logits, strict=True):
            yield head.ranked(of_one, one.texts, one.k)


def _of_kind(asked: Sequence[tuple[Session, Computation]], kind: type[_Kind]) -> list[tuple[Session, _Kind]]:
    return [(session, computation) for session, computation in asked if isinstance(computation, kind)]
