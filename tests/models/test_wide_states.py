"""Models whose layers read more of a token than a hidden state: their states have all of it, wherever they are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families.attack import prompts
from families.specimens import NUM_LAYERS, SPECIAL, SUPPORTED, Specimen
from models_for_tests import build_tokenizer
from pipeline_runs import SAMPLED, Bench, same

from ppd_runtime import OrdinaryDecoding, PPDRuntime, adapt, open_method
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers, weight_bytes
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.wide import is_wide, wide_parts

WIDE = [one for one in (*map(Specimen, SUPPORTED), *SPECIAL) if is_wide(one.config())]
(E2B,) = (one for one in WIDE if one.kind == "as E2B has them")
CUT = NUM_LAYERS // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place: Path = tmp_path_factory.mktemp("model")
    E2B.build().save_pretrained(place)
    build_tokenizer().save_pretrained(place)
    return str(place)


@pytest.mark.parametrize("specimen", WIDE, ids=lambda specimen: specimen.name)
def test_hidden_states_are_the_librarys(specimen: Specimen) -> None:
    """After each layer, for a prompt in one pass, to the last bit, from pieces of one layer.

    So are the logits that `generate` takes: Gemma 4 runs only the prompt's last token through its last layers for them.
    """
    model, (prompt,) = specimen.build(), prompts([17])
    parts = wide_parts(model.config)
    assert parts is not None
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt]), output_hidden_states=True)
        first = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, 0]
    stage = LayerRange(model)
    stage.begin(len(prompt))
    inputs: list[int] | torch.Tensor = prompt
    for layer in range(NUM_LAYERS):
        inputs = stage.run(layer, layer + 1, inputs, 0)
        if layer + 1 < NUM_LAYERS:  # the last one's are after the norm there
            assert torch.equal(parts.hidden(inputs)[..., :-1, :], theirs.hidden_states[layer + 1][..., :-1, :])
    if parts.streams > 1:  # its streams become one in a product over all of the tokens that are asked for
        assert torch.equal(stage.token_logits(inputs), theirs.logits[0])
    else:
        assert torch.equal(stage.logits(inputs), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("specimen", WIDE, ids=lambda specimen: specimen.name)
def test_layouts_have_ordinary_decodings_bits(specimen: Specimen, dtype: str, tmp_path: Path) -> None:
    """Cut before, in and behind the layers that share keys and values."""
    specimen.build().to(getattr(torch, dtype)).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    bench, (prompt,) = Bench.of(tmp_path, dtype), prompts([17])
    expected = bench.ordinary(prompt, SAMPLED)
    for cuts in ((1,), (CUT,), (CUT + 1,), (1, 2, 3)):
        same(bench.staged(prompt, SAMPLED, cuts, k=2, rows=2), expected)
    for exit_layer in (CUT, CUT + 1):
        same(bench.pipelined(prompt, SAMPLED, k=2, exit_layer=exit_layer), expected)
    same(bench.pipelined(prompt, SAMPLED, k=1, exit_layer=CUT, run_ahead=True), expected)


def test_a_stage_has_its_layers_and_no_tables_of_inputs(folder: str) -> None:
    """Only the first stage makes per-layer inputs."""
    info = describe(folder)
    whole = load_layers(info, NUM_LAYERS, torch.float32, "cpu")
    early, late = (
        load_layers(info, *ends) for ends in ((CUT, torch.float32, "cpu"), (NUM_LAYERS, torch.float32, "cpu", CUT))
    )
    assert [len(part.model.layers) for part in (whole, early, late)] == [NUM_LAYERS, CUT, NUM_LAYERS]
    tables = [part.model.embed_tokens_per_layer.weight for part in (whole, early, late)]
    assert torch.equal(tables[0], tables[1])
    assert tables[2].untyped_storage().nbytes() == tables[2].element_size()
    sizes = [weight_bytes(info, *ends, torch.float32) for ends in ((0, NUM_LAYERS), (0, CUT), (CUT, NUM_LAYERS))]
    made = sum(
        whole.model.get_submodule(name).weight.nbytes
        for name in ("embed_tokens_per_layer", "per_layer_model_projection")
    )
    ends = sum(tensor.nbytes for name, tensor in whole.named_parameters() if ".layers." not in name)
    shared = 0 if whole.config.tie_word_embeddings else whole.model.embed_tokens.weight.nbytes
    assert sizes[0] == sizes[1] + sizes[2] - (ends - made - shared)


def test_weights_of_few_bits(tmp_path: Path) -> None:
    """Their products take multiples of 32 numbers."""
    settings = E2B.settings | {"hidden_size_per_layer_input": 32}
    Specimen(E2B.family, settings=settings).build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    (prompt,), asked = prompts([17]), {"max_new_tokens": 12, "ignore_eos": True}
    of_model = {"model": str(tmp_path), "weights": "int8", "compile": False}
    expected = OrdinaryDecoding(**of_model).generate(prompt, **asked).token_ids
    for layout in ({"stages": 3}, {"k": 1, "exit_layer": CUT + 1}):
        with PPDRuntime(transport="local", **layout, **of_model) as runtime:
            assert runtime.generate(prompt, **asked).token_ids == expected


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda model: OrdinaryDecoding(model, compile=True), "compile: layers of .* read more of a token"),
        (lambda model: open_method(model, "kangaroo"), "kangaroo cannot run model .* read more of a token"),
        (adapt, "training cannot run model .* read more of a token"),
    ],
    ids=["compile", "kangaroo", "training"],
)
def test_what_reads_hidden_states_alone_is_refused(folder: str, use: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        use(folder)
    assert "\n" not in str(refused.value)
