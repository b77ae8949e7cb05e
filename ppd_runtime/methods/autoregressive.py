"""Ordinary decoding: every token through all layers, one after the other. It is the oracle for every other method."""

from collections.abc import Iterator, Sequence

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.sampling import Sampler
from ppd_runtime.text import StopRule


def autoregressive(
    stage: LayerRange, prompt_ids: Sequence[int], capacity: int, sampler: Sampler, stop: StopRule
) -> Iterator[tuple[int, None, str | None]]:
    """Yield each new token, None for the draft that it has not, and with the last one why it is the last.

    `stage` holds the whole model; `capacity` is the most tokens that prompt and text can come to.
    """
    history = list(prompt_ids)
    stage.begin(capacity)
    inputs, position, reason = history, 0, None
    while reason is None:
        hidden = stage.run(0, stage.num_layers, inputs, position)
        if not position:
            sampler.note_prompt(stage.logits, hidden, history)
        position = len(history)
        token = sampler.choose(stage.logits(hidden), history)
        history.append(token)
        inputs, reason = [token], stop.finish_reason(token)
        yield token, None, reason
