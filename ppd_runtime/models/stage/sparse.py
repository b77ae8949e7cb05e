"""A stage's layers with sub-layers left out, as SWIFT drafts with them."""

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSet, LayerSubset, without


def sparse_subset(stage: LayerRange, left_out: LayerSet) -> LayerSubset:
    """A stage's model without some sub-layers, over the stage's own caches; at least one attention must stay.

    A layer without attention and MLP is not run.
    """
    layers = {}
    for number, layer in enumerate(stage.model.model.layers):
        attention, mlp = number in left_out.attention, number in left_out.mlp
        if not (attention and mlp):
            layers[number] = without(layer, attention=attention, mlp=mlp) if attention or mlp else layer
    attending = tuple(number for number in layers if number not in left_out.attention)
    return stage.subset(layers, attending, tuple(number for number in layers if number in left_out.mlp))
