"""Match rates: how often an intermediate layer's top-k holds the token that full depth gives (the paper's Table 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def teacher_forced_match_rates(
    model: PreTrainedModel, chunks: Sequence[Tensor], ks: Sequence[int]
) -> dict[int, dict[int, float]]:
    """Match rate of every intermediate layer on given text: `rates[exit_layer][k]`, in [0, 1].

    Full depth's greedy choice at each position of each chunk (1-D token ids) is compared with the k most
    likely tokens of layers 1..d-1 under the shared head: the model's final norm, then its `lm_head`.
    """
    hits: dict[int, dict[int, int]] = {}
    total = sum(chunk.numel() for chunk in chunks)
    for chunk in chunks:
        hidden_states = model.model(chunk[None], output_hidden_states=True, use_cache=False).hidden_states
        chosen = model.lm_head(hidden_states[-1]).argmax(-1, keepdim=True)
        for layer, hidden in enumerate(hidden_states[1:-1], start=1):
            ranked = model.lm_head(model.model.norm(hidden)).topk(max(ks), dim=-1).indices
            for k in ks:
                row = hits.setdefault(layer, {})
                row[k] = row.get(k, 0) + int((ranked[..., :k] == chosen).sum())
    return {layer: {k: count / total for k, count in row.items()} for layer, row in hits.items()}
