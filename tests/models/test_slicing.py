"""A sub-layer that is left out adds nothing to the residual stream, whatever the architecture."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppd_runtime.models.stage.slicing import without

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left_out", ["attention", "mlp", "both"])
@torch.no_grad()
def test_what_is_left_out_adds_nothing(model_folder, family, left_out):
    """As if its last projection were zero."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(family))
    zeroed, sparse = copy.deepcopy(model), copy.deepcopy(model)
    sparse.model.layers[1] = without(sparse.model.layers[1], attention=left_out != "mlp", mlp=left_out != "attention")
    if left_out != "mlp":
        zeroed.model.layers[1].self_attn.o_proj.weight.zero_()
    if left_out != "attention":
        zeroed.model.layers[1].mlp.down_proj.weight.zero_()
    prompt = torch.tensor([[5, 3, 8, 1]])
    whole, expected, got = (m(input_ids=prompt, use_cache=False).logits for m in (model, zeroed, sparse))
    assert torch.equal(got, expected)
    assert not torch.allclose(got, whole)


def test_the_layer_itself_stays_whole(model_folder):
    layer = AutoModelForCausalLM.from_pretrained(model_folder("llama")).model.layers[0]
    names = [name for name, _ in layer.named_modules()]
    without(layer, attention=True, mlp=True)
    assert [name for name, _ in layer.named_modules()] == names
