"""What decides a request's tokens in the staged layout has in common: the text, the client, and the end."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import NOT_ASKED, Begin, Cancel, Message, Token
from ppd_runtime.pipeline.ports import Awaited, Machine, Send, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Always, Guessing, SpeculationPolicy
from ppd_runtime.pipeline.staged.tree import NodeTree
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.gpu_choice import UnreadLogits
from ppd_runtime.sampling.logprobs import TokenLogprobs, packed
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule


class StagedDecider(ABC):
    """Decodes one request with a stage's layers; how much is guessed follows the `policy`."""

    def __init__(self, stage: TreeRange, send: Send, begin: Begin, policy: SpeculationPolicy | None = None) -> None:
        self.stage, self.send, self.begin, self.policy = stage, send, begin, policy or Always(Guessing.EXITS)
        self.history = [*begin.prompt_ids, *begin.delivered]
        self.told: list[Token] = []
        """What the client has been sent, in case it asks for it again."""
        self.finish_reason = ""
        self.layer_passes = 0
        """The request's layer passes; a row counts as a token."""
        self.cached_tokens = 0
        """Prompt tokens whose entries were kept from an earlier prompt, at the first attempt."""
        self._tree = NodeTree(stage, self.history, len(begin.prompt_ids))
        self._delivered = len(begin.delivered)
        self._cancelled = False
        self._sampler = Sampler(SamplingParams())  # until it decodes
        self._logprobs: tuple[TokenLogprobs, ...] = ()  # the newest token's

    def decode(self, sampler: Sampler, stop: StopRule) -> Machine:
        """Decode to the end, telling each token to the client, and to other stages, as soon as it is certain."""
        self._sampler = sampler
        before = self.stage.layer_passes
        reasons = [stop.finish_reason(token) for token in self.begin.delivered]
        self.finish_reason = (reasons[-1] if reasons else "") or ""
        try:
            last = None if self.finish_reason else (yield from self._decode(stop))
        except RequestError:
            self._end(before)
            raise
        self._end(before)
        if last is not None:
            self._tell_client(Token(DECIDER, self.begin.request, len(self.history) - 1, last, NOT_ASKED))

    @abstractmethod
    def _decode(self, stop: StopRule) -> Generator[Awaited, Any, int | None]:
        """Decode to the end; returns the last token, which is not sent yet, or None after a cancel."""

    def _end(self, passes_before: int) -> None:
        """The request is over."""
        self.layer_passes = self.stage.layer_passes - passes_before

    def counts(self) -> dict[str, Any]:
        """Fields of `PathStats`."""
        return {"main_layer_passes": self.layer_passes, "cached_tokens": self.cached_tokens}

    def repeat(self, delivered: int) -> None:
        """Send the client again what follows the first `delivered` tokens after the prompt."""
        for message in self.told[max(delivered - self._delivered, 0) :]:
            self.send((CLIENT,), message)

    def _decisive(self) -> Tensor | None:
        """The newest token's state after all layers, `[1, 1, hidden_size]`, once it is there."""
        root = self._tree.root
        if root.hidden is None or not root.has_run or not self._tree.is_newest(root):
            return None
        return root.hidden.alone()

    @abstractmethod
    def _work(self) -> Work:
        """What it does next without a message."""

    def _take_all(self) -> Machine:
        while (message := (yield WaitFor(0, work=self._work))) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._cancelled = True
        elif isinstance(message, Begin):
            self.repeat(len(message.delivered))

    def _choose(self, logits: Tensor | UnreadLogits, stop: StopRule) -> int:
        """Add the next token to the text; `finish_reason` says whether it is the last."""
        token = self._sampler.choose(logits, self.history)
        self._logprobs = self._sampler.take_logprobs()
        self.history.append(token)
        self.finish_reason = stop.finish_reason(token) or ""
        return token

    def _tell_client(self, token: Token) -> None:
        if self._logprobs:
            logprobs, top_ids = packed(self._logprobs)
            token = replace(token, logprobs=logprobs, top_ids=top_ids)
        self.told.append(token)
        self.send((CLIENT,), token)
