"""What a worker does in each layout: the machines that it runs, and what they need of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from ppd_runtime.models.build import load_stage
from ppd_runtime.models.draft_model import DraftModel, DraftModelInfo
from ppd_runtime.models.named_drafter import LoadedDrafter, load_named
from ppd_runtime.models.stage.emulation import emulated
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.drafter import DraftNetwork
from ppd_runtime.models.trained.exit_heads import ModelHead, OracleHead, ShortlistSampler, TrainedHead
from ppd_runtime.pipeline.messages import Begin
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.speculation_policy import SpeculationPolicy
from ppd_runtime.pipeline.staged.chances import GuessRecord
from ppd_runtime.pipeline.staged.draft_worker import DraftWorker
from ppd_runtime.pipeline.staged.earlier_texts import EarlierTexts
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.guarded_drafts import DrafterHealth, GuardedDrafts, usable
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.pipeline.staged.tree import MOST_HELD, MOST_NODES
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import DECIDER, PaperLayout, StagedLayout
from ppd_runtime.workers.session import Decider, Helper, Session
from ppd_runtime.workers.spec import WorkerSpec

_FIRST = 1
AnyHead = OracleHead | ModelHead | TrainedHead


class Role(ABC):
    """One worker's part in a layout.

    Args:
        spec: the worker's.
        stage: its layers.
    """

    tree_range: TreeRange | None = None
    """The layers over rows of trees, if there are such passes."""
    rows = 1
    """Most rows of a request in one pass."""
    most_rows = 1
    """Most rows of all requests in a pass."""
    follows = False
    """Whether a request that ended here begins again if the deciding process was lost."""
    keeps_requests = True
    """Whether a running request takes a repeated `Begin` or news of peers."""
    resends_to_peers = False
    """Whether a restarted peer needs what only this process can send again."""

    def __init__(self, spec: WorkerSpec, stage: LayerRange) -> None:
        self.spec, self.stage = spec, stage
        self.others = [rank for rank in range(1, spec.layout.num_processes) if rank != spec.layout.drafter]

    @abstractmethod
    def decider(self, session: Session, sampler: Sampler, policy: SpeculationPolicy) -> Decider:
        """The machine of the process that decides."""

    @abstractmethod
    def helper(self, session: Session, head: AnyHead, sampler: Sampler) -> Helper:
        """The machine of any other process."""

    @abstractmethod
    def take_turn(self, session: Session, rows: int, is_alone: bool) -> None:
        """A request's machine goes on without a message, with at most `rows` of the next pass."""

    @abstractmethod
    def release(self, session: Session) -> None:
        """A request is over."""


class PaperRole(Role):
    """The main process, or a sub-process."""

    def __init__(self, spec: WorkerSpec, stage: LayerRange, layout: PaperLayout) -> None:
        super().__init__(spec, stage)
        self.layout = layout
        self.keeps_requests = spec.rank == DECIDER
        self._runs_ahead = layout.runs_ahead(spec.info.num_layers)

    def decider(self, session: Session, sampler: Sampler, policy: SpeculationPolicy) -> Decider:
        asked = not self._runs_ahead
        return MainProcess(self.stage, self.layout.exit_layer, self.others, session.send, session.begin, asked, policy)

    def helper(self, session: Session, head: AnyHead, sampler: Sampler) -> Helper:
        rank, begin = self.spec.rank, session.begin
        if self._runs_ahead:
            return RunAheadSubProcess(self.stage, head, rank, session.send, begin)
        return SubProcess(self.stage, head, rank, self.others, self.layout.k, session.send, begin, ranks_ahead=True)

    def take_turn(self, session: Session, rows: int, is_alone: bool) -> None:
        """A sub-process' machine knows what it runs."""

    def release(self, session: Session) -> None:
        """The next request takes the layers over."""


class StagedRole(Role):
    """A stage."""

    def __init__(self, spec: WorkerSpec, stage: LayerRange, layout: StagedLayout) -> None:
        super().__init__(spec, stage)
        self.layout, self.rows = layout, layout.rows
        self.follows, self.resends_to_peers = spec.rank != DECIDER, spec.rank == DECIDER
        told = spec.drafter.layers if spec.drafter else ()
        self._rows = self.tree_range = TreeRange(stage, MOST_HELD, spec.prefix_cache_tokens, spec.cache_tokens, told)
        self._calibration = GuessRecord()
        self._whole: LayerRange | None = None
        self._earlier = EarlierTexts(spec.draft_memory_mb) if spec.draft_memory_mb else None
        self._drafter: LoadedDrafter | None = None
        if spec.drafter and spec.rank == layout.guesser and layout.drafter is None:
            self._drafter = usable(
                load_named, spec.drafter, stage.model, spec.info, spec.emulate, vocab_size=spec.info.vocab_size
            )
        self._health = DrafterHealth()
        if self._rows.joins_requests:
            self.most_rows = max(layout.rows, self._rows.most_together)

    def decider(self, session: Session, sampler: Sampler, policy: SpeculationPolicy) -> Decider:
        layout, drafter = self.layout, self.spec.drafter
        if not layout.cuts:
            return SingleStage(
                self._rows.another(),
                layout.rows,
                session.send,
                session.begin,
                policy,
                self._calibration,
                layout.repetitions,
                layout.row_cost,
                self._earlier,
                self._network(session.begin, sampler),
                sampler.constraint,
            )
        if self._fits_one_process(session.begin):
            begin = session.begin
            length = len(begin.prompt_ids) + begin.params.max_new_tokens / 2
            if (of_one := policy.one_process(length)) is not None:
                whole = self._whole_model()
                whole.recorder = session.recorder
                return MainProcess(whole, whole.num_layers, (), session.send, begin, False, of_one)
        return LastStage(
            self._rows.another(),
            self.spec.info.num_layers,
            self.others,
            session.send,
            session.begin,
            policy,
            tells_states=drafter is not None and drafter.reads_states,
            tells_prompt=drafter is not None and drafter.reads_states and drafter.reads_prompt,
            listeners=() if layout.drafter is None else (layout.drafter,),
        )

    def _network(self, begin: Begin, sampler: Sampler) -> NetworkDrafts | None:
        """The drafter for a request."""
        if self._drafter is None:
            return None
        try:
            network = self._drafter.another()
        except (RuntimeError, MemoryError) as error:
            self._health.note_failure(error)
            return None
        return _drafts(self.spec, self._health, network, begin, sampler, self._pass_seconds)

    def _pass_seconds(self) -> float:
        """The time of one token's pass through the stage; 0 while unknown."""
        return self.stage.layer_seconds * (self.stage.num_layers - self.stage.first_layer)

    def _fits_one_process(self, begin: Begin) -> bool:
        """Whether this process could decode a request alone: not one that stages know already, nor one with a long
        prompt, whose chunks they run side by side.
        """
        is_new = not (begin.epoch or begin.delivered)
        return self.spec.has_whole_model and is_new and len(self.stage.prompt_chunks(len(begin.prompt_ids))) == 1

    def _whole_model(self) -> LayerRange:
        """All layers, over weights in memory that the stages share."""
        if self._whole is None:
            spec = self.spec
            info = spec.info
            whole = load_stage(info, info.num_layers, spec.dtype, spec.device, spec.code, 0, (), spec.rows_on)
            self._whole = emulated(whole, spec.emulate)
        return self._whole

    def helper(self, session: Session, head: AnyHead, sampler: Sampler) -> Helper:
        layout, rank, stages, stage = self.layout, self.spec.rank, self.layout.num_stages, self._rows.another()
        if rank != _FIRST:
            return MiddleStage(stage, head, rank, stages, layout.k, session.send, session.begin)
        return FirstStage(
            stage,
            head,
            stages,
            layout.k,
            layout.rows,
            session.send,
            session.begin,
            self._calibration,
            layout.repetitions,
            only_chains=stage.only_chains,
            row_cost=layout.row_cost,
            earlier=self._earlier,
            network=self._network(session.begin, sampler),
            drafter=layout.drafter,
            constraint=sampler.constraint,
        )

    def take_turn(self, session: Session, rows: int, is_alone: bool) -> None:
        if isinstance(session.machine, FirstStage | MiddleStage):
            session.machine.take_turn(rows, is_alone)
        elif isinstance(session.machine, SingleStage):
            session.machine.take_turn(rows)

    def release(self, session: Session) -> None:
        if isinstance(session.machine, FirstStage | MiddleStage | LastStage | SingleStage):
            session.begin = session.machine.begin
            session.machine.stage.begin(0)  # frees its memory
            if self._earlier is not None and isinstance(session.machine, FirstStage | SingleStage):
                self._earlier.add(session.machine.history)
        elif isinstance(session.machine, MainProcess):
            session.machine.stage.begin(0)


class DraftRole(Role):
    """A draft model in a process of its own, whose layers are the draft model's."""

    follows = True

    def __init__(self, spec: WorkerSpec, stage: LayerRange) -> None:
        super().__init__(spec, stage)
        assert isinstance(spec.drafter, DraftModelInfo)
        self._model, self._health = DraftModel(stage, spec.drafter.tokens, spec.info.max_positions), DrafterHealth()

    def decider(self, session: Session, sampler: Sampler, policy: SpeculationPolicy) -> Decider:
        raise NotImplementedError("a drafter decides nothing")

    def helper(self, session: Session, head: AnyHead, sampler: Sampler) -> Helper:
        drafts = _drafts(self.spec, self._health, self._model.another(), session.begin, sampler, lambda: 0.0)
        return DraftWorker(drafts, self.spec.rank, _FIRST, session.send, session.begin)

    def take_turn(self, session: Session, rows: int, is_alone: bool) -> None:
        """A drafter has no rows."""

    def release(self, session: Session) -> None:
        if isinstance(session.machine, DraftWorker):
            session.machine.release()


def _drafts(
    spec: WorkerSpec,
    health: DrafterHealth,
    network: DraftNetwork,
    begin: Begin,
    sampler: Sampler,
    pass_seconds: Callable[[], float],
) -> GuardedDrafts:
    """What a worker asks for drafts in a request."""
    assert spec.drafter is not None
    reads_prompt, reads_states = spec.drafter.reads_prompt, spec.drafter.reads_states
    capacity = begin.params.max_new_tokens + MOST_NODES + len(begin.prompt_ids) * reads_prompt
    ranking = ShortlistSampler(sampler, network.tokens, spec.info.vocab_size)
    return GuardedDrafts(health, network, ranking, spec.layout.k, capacity, pass_seconds, reads_prompt, reads_states)


def role_of(spec: WorkerSpec, stage: LayerRange) -> Role:
    """The role of a worker with these layers."""
    if isinstance(spec.layout, StagedLayout) and spec.rank == spec.layout.drafter:
        return DraftRole(spec, stage)
    if isinstance(spec.layout, StagedLayout):
        return StagedRole(spec, stage, spec.layout)
    return PaperRole(spec, stage, spec.layout)
