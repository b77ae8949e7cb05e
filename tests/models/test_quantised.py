"""Models with weights of 8 and 4 bits: every layout and method gives ordinary decoding's text with the same weights."""

from dataclasses import replace

import pytest
import torch
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.quantisable import quantised_linears
from ppd_runtime.models.checkpoint.quantised import packed_file, packed_tensors
from ppd_runtime.models.native.linear import QuantisedLinear, with_floats
from ppd_runtime.models.native.packing import as_floats
from ppd_runtime.models.native.quantising import FORMAT_OF, quantise
from ppd_runtime.models.stage.bit_probe import output_hashes
from ppd_runtime.models.stage.layer_range import LayerRange


@pytest.mark.parametrize(("family", "weights"), [("llama", "int8"), ("qwen2", "int4"), ("gemma2", "int8")])
def test_layouts_and_a_method_give_ordinary_decodings_text(model_folder, family, weights):
    folder = model_folder(family, num_layers=4)
    expected = texts(OrdinaryDecoding(folder, weights=weights))
    assert weights == "int8" or expected != texts(OrdinaryDecoding(folder, dtype="float32"))
    for layout in ({"k": 2}, {"stages": 3}):
        with PPDRuntime(folder, weights=weights, transport="local", **layout) as runtime:
            assert texts(runtime) == expected, layout
            assert runtime.dtype == "float32"
    assert texts(open_method(folder, "layerskip", weights=weights)) == expected


@pytest.mark.parametrize("weights", FORMAT_OF)
def test_a_model_holds_its_matrices_in_the_format(model_folder, weights):
    info = describe(str(model_folder("llama")), weights)
    whole = load_layers(describe(str(info.folder)), 4, torch.float32, "cpu")
    model = load_layers(info, 4, torch.float32, "cpu", first=1)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear) and "layers.0." not in name
    }
    assert len(linears) == 3 * 7 + 1, "the first layer has no memory"
    names = {form: name for name, form in FORMAT_OF.items()}
    assert {names[linear.form] for name, linear in linears.items() if name != "lm_head"} == {weights}
    assert names[linears["lm_head"].form] == "int8"
    for name, linear in linears.items():
        expected = quantise(whole.get_submodule(name).weight, names[linear.form]).in_floats()
        assert torch.equal(as_floats(linear.weight), torch.from_numpy(expected)), name
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    head = linears["lm_head"]
    assert torch.allclose(head(states), with_floats(head)(states), atol=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_processes_share_what_was_quantised_once(model_folder, tied):
    info = describe(str(model_folder("llama", tied=tied)), "int4")
    file = packed_file(info)
    written = file.stat().st_mtime_ns
    names = list(quantised_linears(skeleton_of(model_config(info.folder), info.num_layers)))
    assert sorted(packed_tensors(info, 4)) == sorted(names)
    assert set(packed_tensors(info, 2)) == {
        name for name in names if name == "lm_head.weight" or ".0." in name or ".1." in name
    }
    assert packed_file(info) == file
    assert file.stat().st_mtime_ns == written
    assert packed_file(replace(info, weights="int8")) != file


def test_a_shortlist_has_rows_of_the_packed_head(model_folder):
    info = describe(str(model_folder("llama")), "int8")
    whole = load_layers(info, 4, torch.float32, "cpu")
    short = load_layers(info, 4, torch.float32, "cpu", head_tokens=[7, 3, 250])
    states = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(short.lm_head(states), whole.lm_head(states)[..., [7, 3, 250]])


def test_workers_with_other_weights_have_other_bits(model_folder):
    folder = str(model_folder("llama"))
    hashes = {
        weights: output_hashes(LayerRange(load_layers(describe(folder, weights), 4, torch.float32, "cpu")))
        for weights in (None, "int8", "int4")
    }
    layer = [found["a layer over 3 tokens"] for found in hashes.values()]
    assert len(set(layer)) == 3
    last_two = load_stage(describe(folder, "int4"), 4, torch.float32, "cpu", first=2)
    assert output_hashes(last_two) == hashes["int4"]


def test_what_cannot_be_is_refused(model_folder):
    folder = model_folder("llama")
    with pytest.raises(ValueError, match="weights='int5': choose"):
        PPDRuntime(folder, weights="int5")
    with pytest.raises(ValueError, match="dtype='bfloat16' with weights='int8': its states are in float32, drop one"):
        OrdinaryDecoding(folder, weights="int8", dtype="bfloat16")
    narrow = model_folder("llama", hidden_size=48)
    with pytest.raises(
        ValueError, match=r"weights='int4': model .* has 48 inputs, no multiple of 32; leave weights out"
    ):
        PPDRuntime(narrow, weights="int4")
