"""Layers with two attentions, each with keys and values of its own, which the library counts as two layers."""

from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from ppd_runtime.models.stage.caches import PreallocatedLayer


def counting_layers(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration, whose `num_hidden_layers` are those of the decoder, also if the library counts attentions."""
    if getattr(config, "num_layers", None) and config.num_hidden_layers == 2 * config.num_layers:
        kind: Any = type(config)
        config.__class__ = _counting_layers(kind)
    return config


@lru_cache
def _counting_layers(kind: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """A kind of the same name, by which the library finds the model."""
    names = {"attribute_map": kind.attribute_map | {"num_hidden_layers": "num_layers"}, "attends_twice": True}
    return type(kind.__name__, (kind,), names)


def attends_twice(config: PretrainedConfig) -> bool:
    """Whether each layer has two attentions; the configuration is one of `counting_layers`."""
    return getattr(config, "attends_twice", False)


class PairedLayer(PreallocatedLayer):
    """Keys and values of both attentions: the second one's are further heads of the same rows."""

    attentions = 2

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Append the entries of a pass, `[1, heads, tokens, head_dim]`; gives those that this attention attends to.

        `args` has the attention's number: 0, and then 1 for the same tokens.
        """
        (attention,), (heads, tokens) = args, key_states.shape[1:3]
        own, before = slice(attention * heads, (attention + 1) * heads), self.length - attention * tokens
        if attention == 0:
            self.write(*(pad(states, (0, 0, 0, 0, 0, heads)) for states in (key_states, value_states)))
        else:
            new = self.order.rows(before, self.length)
            self.keys[:, own, new], self.values[:, own, new] = key_states, value_states
        rows = self.order.rows(self._visible_from(before), self.length)
        return self.keys[:, own, rows], self.values[:, own, rows]
