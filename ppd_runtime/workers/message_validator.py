"""Checks that messages fit the model, which the wire format alone cannot tell."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.pipeline.messages import (
    Begin,
    Candidate,
    CatchUp,
    Entries,
    ExitState,
    Guesses,
    HeadStart,
    Message,
    Missing,
    PromptStates,
    Rows,
    Token,
)
from ppd_runtime.settings.checks import foreign_token
from ppd_runtime.settings.layouts import CLIENT, DECIDER, PaperLayout
from ppd_runtime.workers.spec import WorkerSpec


class MessageValidator:
    """Checks the contents of messages to a worker with these layers."""

    def __init__(self, stage: LayerRange, spec: WorkerSpec) -> None:
        self._stage, self._dtype, self._hidden_size = stage, spec.dtype, int(stage.model.config.hidden_size)
        self._states_dtype = stage.states_dtype
        self._vocab_size, self._num_processes = spec.info.vocab_size, spec.layout.num_processes
        self._drafter = spec.layout.drafter
        self._head_start = spec.layout.head_start(spec.info.num_layers)
        told = spec.drafter.layers if spec.drafter else ()
        self._columns, self._told = 1 + sum(layer < spec.first_layer for layer in told), max(1, len(told))
        """How many states of a token come from the stage before, and to a drafter."""
        tokens, states, entries = self._of_tokens, self._of_states, self._of_entries
        with_token = states if isinstance(spec.layout, PaperLayout) else self._of_told
        self._faults: dict[type[Message], Callable[[Any], str]] = {
            Begin: self._of_request,
            Token: lambda m: tokens((m.token_id,)) or ("" if m.hidden is None else with_token(m.hidden, 1)),
            ExitState: lambda m: states(m.hidden, 1),
            Candidate: lambda m: tokens(m.token_ids),
            HeadStart: lambda m: tokens(m.token_ids) or states(m.hidden, len(m.token_ids)),
            PromptStates: self._of_prompt,
            Rows: lambda m: tokens(m.token_ids) or states(m.hidden, len(m.nodes), self._columns),
            Guesses: lambda m: tokens(m.token_ids) or _of_guesses(m),
            Entries: lambda m: entries(m.entries),
            CatchUp: lambda m: tokens(m.token_ids) or ("" if m.entries is None else entries(m.entries)),
        }

    def fault(self, message: Message) -> str:
        """Why a message does not fit the runtime (sender), the vocabulary (tokens) or the stage (tensors' shapes and
        dtype); empty if it does.
        """
        if not CLIENT <= message.sender < self._num_processes:
            return f"process {message.sender} is none of this runtime"
        if message.sender == self._drafter and not isinstance(message, Guesses | Missing):
            return "a drafter has no say in that"
        fault = self._faults.get(type(message))
        return fault(message) if fault else ""

    def _of_request(self, begin: Begin) -> str:
        named = [token for _, token in begin.params.named_tokens()]
        fault = next(filter(None, map(self._of_tokens, (begin.prompt_ids, begin.delivered, named))), "")
        return fault or ("" if begin.prompt_ids else "an empty prompt")

    def _of_tokens(self, token_ids: Sequence[int]) -> str:
        foreign = foreign_token(token_ids, self._vocab_size)
        return "" if foreign is None else f"token id {foreign} is not among the model's {self._vocab_size}"

    def _of_prompt(self, message: PromptStates) -> str:
        hidden = message.hidden
        if message.sender == DECIDER:
            return self._of_told(hidden, len(hidden) if hidden.dim() == 3 else 1)
        return self._of_states(hidden, hidden.shape[1] if hidden.dim() == 3 else 1, self._columns)

    def _of_told(self, hidden: Tensor, tokens: int) -> str:
        return self._of_shape(hidden, (tokens, self._told, self._hidden_size))

    def _of_states(self, hidden: Tensor, tokens: int, columns: int = 1) -> str:
        return self._of_shape(hidden, (1, tokens, (columns - 1) * self._hidden_size + self._stage.state_size))

    def _of_shape(self, hidden: Tensor, shape: tuple[int, ...]) -> str:
        if hidden.shape == shape and hidden.dtype == self._states_dtype:
            return ""
        return f"hidden states {_form(hidden)} and not {[*shape]} in {self._states_dtype}"

    def _of_entries(self, entries: Tensor) -> str:
        shape = (self._head_start, 2, *self._stage.cache.entry_shape(self._head_start))
        if entries.dim() == 5 and entries.shape[1 : 1 + len(shape)] == shape and entries.dtype == self._dtype:
            return ""
        return f"entries {_form(entries)} and not of each token {[*shape]} in {self._dtype}"


def _of_guesses(guesses: Guesses) -> str:
    named, said, nodes = len(guesses.token_ids), len(guesses.chances), len(guesses.nodes)
    if named == said and (named % nodes == 0 if nodes else named == 0):
        return ""
    return f"{named} tokens with {said} chances for {nodes} nodes"


def _form(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} in {tensor.dtype}"
