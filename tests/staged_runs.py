"""The staged layout's machines over real stages, whose messages and restarts a test decides."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from machine_network import MachineNetwork
from pipeline_runs import Bench, begin_message

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.drafter import DraftNetwork
from ppd_runtime.models.trained.exit_heads import ModelHead, ShortlistSampler
from ppd_runtime.pipeline.messages import Begin, Message, Missing, Peers, PromptStates, Rows, Token
from ppd_runtime.pipeline.ports import Machine, WaitFor
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.tree import MOST_HELD
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER


class StagedRun:
    """One request; stages wait for its beginning as a worker does, and may be replaced while it runs."""

    def __init__(
        self,
        bench: Bench,
        prompt: Sequence[int],
        params: SamplingParams,
        cuts: Sequence[int],
        k: int,
        rows: int,
        seed: int | None = None,
        drafts: Callable[[], NetworkDrafts] | None = None,
        network: DraftNetwork | None = None,
        told_layers: Sequence[int] = (),
    ) -> None:
        self._makes_drafts = drafts
        self.draft_network, self.told_layers = network, told_layers
        self.bench, self.begin, self.k, self.rows = bench, begin_message(prompt, params), k, rows
        self.borders = list(pairwise([0, *cuts, bench.info.num_layers]))
        self.network, self.sampler = MachineNetwork(seed), bench.sampler(prompt, params)
        self.restarts = 0
        """Of the last stage, but the first."""
        for rank in self.others:
            self.network.add(rank, self._follower(rank))
        self.network.add(DECIDER, self._last(self.begin))

    @property
    def others(self) -> range:
        """All stages but the last."""
        return range(1, len(self.borders))

    @property
    def told(self) -> list[int]:
        """The tokens that the client has, each once; what it is told twice is the same."""
        tokens: list[int] = []
        for address, message in self.network.sent:
            if address == CLIENT and isinstance(message, Token):
                place = message.position - len(self.begin.prompt_ids)
                assert place <= len(tokens), "none is left out"
                tokens += [message.token_id] if place == len(tokens) else []
                assert tokens[place] == message.token_id
        return tokens

    def lose(self, rank: int, introduced: bool = True) -> None:
        """Restart a stage, which then knows nothing; perhaps the last stage is told."""
        if rank == DECIDER:
            self.restarts += 1
            self.network.replace(DECIDER, self._last(replace(self.begin, delivered=self.told, epoch=self.restarts)))
            return
        self.network.replace(rank, self._follower(rank))
        if introduced:
            self.network.send((DECIDER,), Peers(CLIENT, 0, [rank], [""]))

    def meddle(self, kind: type[Message], number: int, arriving: Callable[[Message], list[Message]]) -> None:
        """Have the message of this kind and number arrive as others."""
        seen = 0

        def arrives(address: int, message: Message) -> list[Message]:
            nonlocal seen
            seen += type(message) is kind
            return arriving(message) if type(message) is kind and seen == number else [message]

        self.network.arriving = arrives

    def run(self) -> list[int]:
        """The tokens that the client has been told at the end."""
        self.network.run(200_000, end=DECIDER)
        return self.told

    def drafts(self) -> NetworkDrafts | None:
        """What a first stage asks."""
        if self._makes_drafts is not None:
            return self._makes_drafts()
        if self.draft_network is None:
            return None
        ranking = ShortlistSampler(self.sampler, self.draft_network.tokens, self.bench.info.vocab_size)
        return NetworkDrafts(self.draft_network, ranking, self.k, 0, lambda: 0.0, reads_prompt=True)

    def _stage(self, place: int) -> TreeRange:
        first, last = self.borders[place]
        return TreeRange(self.bench.stage(last, first), MOST_HELD, told_layers=self.told_layers)

    def _last(self, begin: Begin) -> Machine:
        stage = self._stage(-1)
        told = self._makes_drafts is not None or self.draft_network is not None, self.draft_network is not None
        last = LastStage(stage, self.bench.info.num_layers, self.others, self.network.send, begin, None, *told)
        return last.decode(self.sampler, self.bench._stop(begin.params))

    def _follower(self, rank: int) -> Machine:
        early: list[Message] = []
        while not isinstance(message := (yield WaitFor(None)), Begin):
            if isinstance(message, Rows | PromptStates):
                early.append(message)
                self.network.send((DECIDER,), Missing(rank, message.request, 0))
        self.network.deliver(rank, early)
        stage, size, send = self._stage(rank - 1), len(self.borders), self.network.send
        head = ModelHead(stage._stage, self.sampler)
        if rank == 1:
            drafts = self.drafts()
            own = {"network": drafts, "constraint": self.sampler.constraint}
            yield from FirstStage(stage, head, size, self.k, self.rows, send, message, **own).serve()
        else:
            yield from MiddleStage(stage, head, rank, size, self.k, send, message).serve()
