"""What SWIFT does beyond drafting and verifying: sub-layers left out, the search while decoding, files of its finds."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import printed, refused
from models_for_tests import SLIDING_WINDOW, load_stage

from ppd_runtime import OrdinaryDecoding, decode, open_method
from ppd_runtime.methods.stopping import Stopping
from ppd_runtime.methods.swift import Swift, sparse_subset
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSet, share_run
from ppd_runtime.models.trained.layer_sets import read_layer_set, write_layer_set

NUM_LAYERS = 5
LEFT_OUT = LayerSet((1, 2), (2, 3))
TEXT = list(range(40, 40 + 4 * SLIDING_WINDOW))
ModelFolder = Callable[..., Path]


def begun(stage: LayerRange, text: list[int] = TEXT) -> LayerRange:
    stage.begin(2 * len(text))
    stage.run(0, stage.num_layers, text, 0)
    return stage


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_a_sparse_pass_is_the_models_with_zeroed_projections(model_folder: ModelFolder, family: str) -> None:
    """Over the whole model's entries, where layers without attention have fewer entries than the others."""
    stage = begun(load_stage(model_folder(family, num_layers=NUM_LAYERS)))
    model = copy.deepcopy(stage.model)
    with torch.no_grad():
        for i in LEFT_OUT.attention:
            model.model.layers[i].self_attn.o_proj.weight.zero_()
        for i in LEFT_OUT.mlp:
            model.model.layers[i].mlp.down_proj.weight.zero_()
    zeroed = LayerRange(model)
    zeroed.begin(2 * len(TEXT))
    zeroed.import_entries(stage.export_entries(0, len(TEXT), NUM_LAYERS).unbind())
    piece = sparse_subset(stage, LEFT_OUT)
    for position, tokens in ((len(TEXT), [7]), (len(TEXT) + 1, [8]), (len(TEXT) + 2, [9, 10, 11])):
        got, expected = stage.run_subset(piece, tokens, position), zeroed.run(0, NUM_LAYERS, tokens, position)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        end = position + len(tokens)
        held = [end if i not in LEFT_OUT.attention else len(TEXT) for i in range(NUM_LAYERS)]
        assert [stage.length(i) for i in range(NUM_LAYERS)] == held


def test_its_cost_is_its_share_of_the_parameters(model_folder: ModelFolder) -> None:
    stage = load_stage(model_folder("llama", num_layers=NUM_LAYERS))
    layer = stage.model.model.layers[0]
    attention, mlp = (sum(p.numel() for p in part.parameters()) for part in (layer.self_attn, layer.mlp))
    assert share_run(stage.model, LayerSet()) == 1
    assert share_run(stage.model, LayerSet((1,), (2, 3))) == pytest.approx(
        1 - (attention + 2 * mlp) / (5 * (attention + mlp))
    )
    passes = begun(stage).layer_passes
    stage.run_subset(sparse_subset(stage, LEFT_OUT), [7], len(TEXT))
    assert stage.layer_passes == passes + 4, "layer 2 is not run at all"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_matchness_is_the_share_foretold_and_leaves_no_trace(model_folder: ModelFolder, family: str) -> None:
    stage, window = begun(load_stage(model_folder(family, num_layers=NUM_LAYERS, quiet_from=1)), TEXT[:-1]), 12
    text = list(TEXT)
    for _ in range(window):  # the model's own text
        text.append(int(stage.logits(stage.run(0, NUM_LAYERS, text[-1:], len(text) - 1)).argmax()))
    before = stage.export_entries(0, len(text) - 1, NUM_LAYERS)
    method = Swift(stage, LayerSet(), Stopping(), window)
    assert method.matchness(LayerSet(), text) == 1
    found = method.matchness(LEFT_OUT, text)
    assert torch.equal(stage.export_entries(0, len(text) - 1, NUM_LAYERS), before)
    assert [stage.length(i) for i in range(NUM_LAYERS)] == [len(text) - 1] * NUM_LAYERS
    piece, right = sparse_subset(stage, LEFT_OUT), 0
    stage.truncate(len(text) - 1 - window)
    for position in range(len(text) - 1 - window, len(text) - 1):
        hidden = stage.run_subset(piece, [text[position]], position)
        right += int(stage.logits(hidden).argmax()) == text[position + 1]
    assert 0 < found == right / window < 1


def test_with_nothing_left_out_every_draft_is_right(model_folder: ModelFolder) -> None:
    folder = str(model_folder("gemma2", num_layers=NUM_LAYERS))
    settings = {"skip_ratio": 0.0, "stopping": "constant", "num_speculations": 3, "widest": 1}
    result = decode(folder, TEXT, "swift", dtype="float32", max_new_tokens=21, ignore_eos=True, **settings)
    assert result.stats.acceptance_rate == 1
    assert result.stats.run_lengths == (1, 4, 4, 4, 4, 4)
    assert result.stats.speculation.draft_cost == 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_stay_whatever_is_left_out(model_folder: ModelFolder, family: str, tmp_path: Path) -> None:
    folder = str(model_folder(family, num_layers=NUM_LAYERS, quiet_from=2))
    info, asked = describe(folder), {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.7}
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    expected = ordinary.generate(TEXT, **asked).token_ids
    for number, left_out in enumerate([LayerSet((1,)), LayerSet((), (1, 2, 3)), LayerSet((1, 2, 3), (1, 2, 3))]):
        file = tmp_path / f"{number}.json"
        write_layer_set(file, left_out, info, {})
        method = open_method(folder, "swift", layer_set=file, stage=ordinary.stage, dtype="float32", threshold=0.05)
        assert method.method.left_out == left_out
        assert method.generate(TEXT, **asked).token_ids == expected


def test_the_search_is_a_step_a_draft_and_goes_on_over_requests(model_folder: ModelFolder) -> None:
    folder = str(model_folder("llama", num_layers=NUM_LAYERS, quiet_from=2))
    settings = {"context_window": 6, "search_steps": 30, "bayes_interval": 5, "dtype": "float32"}
    asked = {"max_new_tokens": 24, "ignore_eos": True}

    def sets_found(seed: int) -> Iterator[tuple[int, LayerSet, float]]:
        with open_method(folder, "swift", search_seed=seed, **settings) as generator:
            search = generator.method.search
            for prompt in (TEXT, TEXT[3:], TEXT[5:]):
                before, finished = search.steps, search.finished
                stats = generator.generate(prompt, **asked).stats
                tried = search.steps - before
                lengths = [sum(stats.run_lengths[:i]) for i in range(1, len(stats.run_lengths))]
                drafts = sum(6 <= length < 23 for length in lengths)
                assert tried == min(drafts, 30 - before) or search.finished
                assert tried or finished
                assert generator.method.left_out == search.best
                yield search.steps, search.best, search.matchness

    assert list(sets_found(1)) == list(sets_found(1))
    assert next(steps for steps, *_ in sets_found(1)) > 3


def test_the_best_set_is_scored_by_each_window(model_folder: ModelFolder) -> None:
    """Three windows with good scores end the search, not fewer."""
    folder = str(model_folder("llama", num_layers=NUM_LAYERS, quiet_from=1))
    settings = {"context_window": 6, "bayes_interval": 0, "skip_ratio": 0.1, "dtype": "float32", "widest": 1}
    with open_method(folder, "swift", search_windows=3, stopping="constant", num_speculations=1, **settings) as swift:
        search, ends = swift.method.search, []
        for length in range(8, 40):
            swift.generate(TEXT, max_new_tokens=length, ignore_eos=True)
            ends.append((search.windows, search.finished))
            if search.finished:
                break
    assert (2, False) in ends
    assert ends[-1] == (3, True)


def test_no_search_before_the_window_is_full(model_folder: ModelFolder) -> None:
    folder = str(model_folder("llama", num_layers=NUM_LAYERS, quiet_from=2))
    with open_method(folder, "swift", context_window=32, bayes_interval=0, dtype="float32") as generator:
        generator.generate(TEXT, max_new_tokens=32, ignore_eos=True)
        assert generator.method.search.steps == 0


def test_the_command_finds_a_set_that_generate_takes(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder, out, prompts = str(model_folder("llama", num_layers=NUM_LAYERS)), tmp_path / "s.json", tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "The quick brown fox"}\n{"prompt": "A model"}\n')
    command = f"search-layers --model {folder} --prompts {prompts} --out {out} --dtype float32 --search-steps 20"
    printed(*command.split(), "--max-new-tokens", 60)
    card = json.loads(out.read_text())
    assert card["search"]["steps"] == 20 or card["search"]["matchness"] > 0.95
    assert read_layer_set(out, describe(folder)) == LayerSet(tuple(card["attention"]), tuple(card["mlp"]))
    short = refused(*command.split(), "--max-new-tokens", 9)
    assert "no prompt's continuation has more than the 32 tokens to score sets by" in short
    expected = OrdinaryDecoding(folder, dtype="float32").generate("The", max_new_tokens=9).token_ids
    assert decode(folder, "The", "swift", layer_set=out, dtype="float32", max_new_tokens=9).token_ids == expected


def test_a_set_that_was_found_with_few_bits_is_for_these(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder, out = str(model_folder("llama", num_layers=NUM_LAYERS)), tmp_path / "s.json"
    command = f"search-layers --model {folder} --out {out} --search-steps 0 --weights int8"
    printed(*command.split())
    assert json.loads(out.read_text())["weights"] == "int8"
    found = read_layer_set(out, describe(folder, "int8"))
    quantise_model(folder, tmp_path / "int8", "int8")
    assert read_layer_set(out, describe(str(tmp_path / "int8"))) == found
    for weights in (None, "int4"):
        with pytest.raises(ValueError, match=f"with int8 weights, not with {weights or 'floats'}: find one with"):
            read_layer_set(out, describe(folder, weights))
    write_layer_set(out, LEFT_OUT, describe(folder), {})
    assert read_layer_set(out, describe(folder, "int4")) == LEFT_OUT


def test_without_a_step_the_uniform_set_is_written(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder, out = str(model_folder("llama", num_layers=NUM_LAYERS)), tmp_path / "s.json"
    shown = printed(*f"search-layers --model {folder} --out {out} --search-steps 0".split())
    assert "0 sets tried, so it is the uniform one" in shown
    assert json.loads(out.read_text())["search"]["matchness"] is None


def mistakes(found: Path, tmp_path: Path) -> Iterator[tuple[dict[str, object], str]]:
    card = json.loads(found.read_text())
    for number, (change, message) in enumerate(
        [
            ({"format": 2}, "format 2 is unknown to this version"),
            ({"attention": [0]}, "attention of layers [0] cannot be left out"),
            ({"mlp": [1, 99]}, "mlp of layers [1, 99] cannot be left out"),
            ({"mlp": ["a"]}, "mlp of layers ['a'] cannot be left out"),
            ({"mlp": 3}, "holds no layer set (TypeError"),
            ({"mlp": [[1]]}, "mlp of layers [[1]] cannot be left out"),
            ({"mlp": [1, 1]}, "mlp of layers [1, 1] cannot be left out"),
        ]
    ):
        broken = tmp_path / f"broken-{number}.json"
        broken.write_text(json.dumps(card | change))
        yield {"layer_set": broken}, message
    (tmp_path / "cut.json").write_text(found.read_text()[:50])
    yield {"layer_set": tmp_path / "cut.json"}, "holds no layer set (JSONDecodeError"
    yield {"layer_set": tmp_path}, "Is a directory; find one with `ppd search-layers`"
    yield {"layer_set": found, "skip_ratio": 0.3}, "skip_ratio=0.3: layer_set says what to leave out"
    yield {"skip_ratio": 1}, "skip_ratio=1: give a number from 0 to below 1"
    yield {"stopping": "probe"}, "stopping='probe': a probe judges exit states, swift has none"
    yield {"context_window": 0}, "context_window=0: give a whole number of at least 1"
    yield {"search_windows": 0}, "search_windows=0: give a whole number of at least 1"
    yield {"widest": 0}, "widest=0: give a whole number of at least 1"
    yield {"exit_layer": 2}, "swift has no setting 'exit_layer': it has"


def test_mistakes_are_one_line(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder, other = (str(model_folder("llama", num_layers=NUM_LAYERS, seed=seed)) for seed in (0, 1))
    found = tmp_path / "found.json"
    write_layer_set(found, LEFT_OUT, describe(folder), {})
    for settings, message in mistakes(found, tmp_path):
        with pytest.raises(ValueError) as caught:
            open_method(folder, "swift", **settings)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="was found for model .*, not for model .*: find one with"):
        open_method(other, "swift", layer_set=found)
