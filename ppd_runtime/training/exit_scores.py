"""Scores of each layer's exit, full depth included, through the shared norm and head on given text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.stage.slicing import FinalHead, layer_range


@dataclass(frozen=True)
class ExitScore:
    """One exit, greedy and teacher-forced."""

    layer: int
    loss: float
    """Cross-entropy to the text's next token, nats a token."""
    agreement: float
    """Share of the tokens for which it names full depth's choice."""


@torch.no_grad()
def exit_scores(
    model: PreTrainedModel, rows: Tensor, on_row: Callable[[int], None] = lambda row: None
) -> list[ExitScore]:
    """The exits after layers 1 to d, on `rows` of token ids, `[rows, length + 1]`; `on_row` counts the rows."""
    num_layers, head = model.config.num_hidden_layers, FinalHead(model)
    pieces = [layer_range(model, layer, layer + 1) for layer in range(num_layers)]
    losses, hits = torch.zeros(num_layers), torch.zeros(num_layers, dtype=torch.int64)
    for number, row in enumerate(rows.to(model.device), start=1):
        states = _states(pieces, row[None, :-1])
        chosen = head(states[-1])[0].argmax(-1)
        for layer, each in enumerate(states):  # one exit's logits at a time: a large vocabulary's take much memory
            logits = head(each)[0]
            losses[layer] += F.cross_entropy(logits.float(), row[1:], reduction="sum").cpu()
            hits[layer] += (logits.argmax(-1) == chosen).sum().cpu()
        on_row(number)
    tokens = len(rows) * (rows.shape[1] - 1)
    means = zip((losses / tokens).tolist(), (hits / tokens).tolist(), strict=True)
    return [ExitScore(layer, loss, agreement) for layer, (loss, agreement) in enumerate(means, start=1)]


def _states(pieces: Sequence[torch.nn.Module], input_ids: Tensor) -> list[Tensor]:
    """The hidden states after each layer."""
    found, feed = [], {"input_ids": input_ids}
    for piece in pieces:
        found.append(piece(**feed, use_cache=False).last_hidden_state)
        feed = {"inputs_embeds": found[-1]}
    return found
