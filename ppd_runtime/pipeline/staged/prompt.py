"""A prompt on its way through the stages, chunk by chunk."""

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import PromptStates
from ppd_runtime.pipeline.ports import Call


class ArrivingPrompt:
    """The chunks of a prompt of `tokens` tokens, which come from the stage before and run here in order."""

    def __init__(self, stage: TreeRange, tokens: int) -> None:
        self._stage = stage
        self._chunks = stage.prompt_chunks(tokens)[::-1]  # chunks still to run, the next one last
        self._waiting: dict[int, Tensor] = {}  # by position

    def take(self, message: PromptStates) -> None:
        """Add a chunk that has not run; ignore one with other borders."""
        size = message.hidden.shape[1]
        if range(message.position, message.position + size) in self._chunks:
            self._waiting.setdefault(message.position, message.hidden)

    @property
    def has_run(self) -> bool:
        """Whether all chunks have run."""
        return not self._chunks

    @property
    def has_come(self) -> bool:
        """Whether all chunks have come."""
        return len(self._waiting) == len(self._chunks)

    @property
    def has_begun(self) -> bool:
        """Whether its first chunk has come."""
        return self.lacking(1) > 0

    def lacking(self, behind: int) -> int:
        """The position of the first chunk that has not come; `behind` if all have."""
        lacking = (chunk.start for chunk in reversed(self._chunks) if chunk.start not in self._waiting)
        return next(lacking, behind)

    @property
    def next_position(self) -> int | None:
        """Position of the chunk that can run now; None if it has not come, or all have run."""
        return self._chunks[-1].start if self._chunks and self._chunks[-1].start in self._waiting else None

    def next_chunk(self) -> Call:
        """The pass over the next, arrived chunk. It gives the states after this stage, `[1, tokens, hidden_size]`."""
        position = self._chunks.pop().start
        return Call(self._stage.run_prompt, self._waiting.pop(position), position)
