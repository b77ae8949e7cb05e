"""Weights that are numbers times scales, as floats and in a format of few bits that holds just the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ppd_runtime.models.native.formats import GROUP, NUMBER_FORMATS, Numbers

_FORMS = [NUMBER_FORMATS[name] for name in ("Q4_0", "Q5_0", "Q8_0")]
"""Whole numbers times a scale in float16, the fewest bits first."""


@dataclass(frozen=True)
class ScaledNumbers:
    """A matrix `[outputs, inputs]`: a weight is its number times the scale of its row and its input's group."""

    numbers: Tensor
    scales: Tensor
    """`[outputs, groups]`."""
    groups: Tensor
    """Each input's group, int64 `[inputs]`."""

    def in_floats(self) -> Tensor:
        """The weights in float32."""
        return (self.scales.float()[:, self.groups] * self.numbers.float()).contiguous()

    def packed(self) -> Numbers | None:
        """The same weights in the smallest format that holds each of them exactly; None if none does.

        A format has whole numbers in a range of its own, and a scale in float16 for each 32 neighbouring inputs.
        """
        outputs, inputs = self.numbers.shape
        if inputs % GROUP:
            return None
        runs = self.groups.view(-1, GROUP)
        scales = self.scales[:, runs[:, 0]]
        halves = scales.to(torch.float16)
        if not torch.equal(runs, runs[:, :1].expand_as(runs)) or not torch.equal(halves.float(), scales.float()):
            return None
        least, most = (int(bound) for bound in self.numbers.aminmax())
        form = next((one for one in _FORMS if one.values[0] <= least and most <= one.values[-1]), None)
        if form is None:
            return None
        codes = (self.numbers.int() - form.values[0]).to(torch.uint8).view(outputs, -1, GROUP)
        return Numbers(form, codes.numpy(), halves.numpy())
