"""Products of a few tokens' states with a weight matrix, in the order in which CPUs make them fastest."""

import torch
from torch import Tensor
from torch.nn.functional import linear

TWICE = 2**20
"""Numbers in a weight matrix up to which one token's product is faster done twice at once."""


def few_rows_gain(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `few_rows_linear` is the faster one: seen for float32 on CPUs."""
    return device.type == "cpu" and dtype == torch.float32


def few_rows_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, up to rounding: the weights times the states, not the states times the weights.

    On CPUs two to five tokens take half the time then, and less than one token takes, since a matrix times a vector
    reads memory more slowly than a matrix times a matrix does; so one token stands there twice, and of three the first
    does, where the weights are small enough for it to gain (`TWICE`).
    """
    flat = states.reshape(-1, states.shape[-1])
    tokens = flat.shape[0]
    if isinstance(tokens, int) and tokens == 1 and weight.numel() > TWICE:
        return linear(states, weight, bias)
    if isinstance(tokens, int) and tokens in (1, 3) and weight.numel() <= TWICE:
        rows = torch.mm(weight, torch.cat([flat, flat[:1]]).t())[:, :tokens].t()
    else:
        rows = torch.mm(weight, flat.t()).t()
    rows = rows.reshape(*states.shape[:-1], -1)
    return rows if bias is None else rows + bias
