"""Layers that keep a recurrent state: a pass starts from its parent's state and leaves its own, whatever else runs."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.specimens import Specimen
from grids import nightly
from models_for_tests import build_tokenizer, load_stage
from pipeline_runs import GREEDY, Bench, same
from pipeline_runs import SAMPLED as SAMPLED_PARAMS
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppd_runtime import GenerationResult, OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.state_sizes import layer_state_bytes
from ppd_runtime.models.draft_model import DraftModel
from ppd_runtime.models.stage import chunks
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.state_range import StateRange
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.tune.match_rates import exit_states

FAMILIES = ("lfm2", "qwen3_next", "falcon_h1", "granitemoehybrid", "nemotron_h", "mamba2")
"""Convolutions alone, a delta rule, states beside keys and values or in layers of their own, layers without either, and
states alone."""
CHUNKED = (
    *("bailing_hybrid", "bamba", "kimi_linear", "lfm2_moe", "lfm3", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text"),
)
"""Further families whose prompts are cut into chunks."""
WHOLE = ("falcon_mamba", "jamba", "mamba")
"""Families whose prompts are not."""
EVERY = [*FAMILIES, *(pytest.param(family, marks=nightly) for family in (*CHUNKED, *WHOLE))]
CHUNK = 8
TEXT = [7 * i % 290 + 1 for i in range(40)]
SAMPLED = {"max_new_tokens": 6, "temperature": 0.9, "seed": 4, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ONE_PASS", CHUNK)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (CHUNK, CHUNK))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def saved(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        Specimen(family).build().save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        return folder

    return saved


def stage_of(folder: Path, dtype: str = "float32") -> StateRange:
    stage = load_stage(folder, dtype)
    assert isinstance(stage, StateRange)
    return stage


def along(stage: StateRange, tokens: list[int], prompt: int) -> Tensor:
    """States of tokens behind a prompt of so many, one by one, as in ordinary decoding."""
    stage.begin(len(TEXT))
    stage.run(0, stage.num_layers, tokens[:prompt], 0)
    each = [stage.run(0, stage.num_layers, [token], at) for at, token in enumerate(tokens[prompt:], prompt)]
    return torch.cat(each, dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_rows_of_a_tree_have_the_bits_that_they_have_alone(
    folder_of: Callable[[str], Path], family: str, dtype: str
) -> None:
    """In any order, some layers at a time, and after branches beside them have come and gone."""
    stage = stage_of(folder_of(family), dtype)
    prompt, paths = TEXT[:11], {1: [1], 2: [2], 3: [1, 3], 4: [2, 4], 5: [1, 3, 5], 6: [2, 6]}
    alone = {node: along(stage, [*prompt, *path], len(prompt))[:, -1] for node, path in paths.items()}
    tree = TreeRange(stage, most_nodes=8)
    tree.begin(len(TEXT))
    for chunk in tree.prompt_chunks(len(prompt)):
        tree.run_prompt(prompt[chunk.start : chunk.stop], chunk.start)
    found = {node: tree.run_rows([node], [paths[node]])[:, -1] for node in (2, 1, 4)}
    states = tree.run_rows([3, 6], [paths[3], paths[6]], range(2))
    tree.drop(4)
    states = tree.run_rows(states, [paths[3], paths[6]], range(2, 4))
    found |= {3: states[:, 0], 6: states[:, 1]}
    tree.keep(1)
    tree.drop(6)
    tree.drop(2)
    found[5] = tree.run_rows([5], [[3, 5]])[:, -1]
    assert all(torch.equal(found[node], alone[node]) for node in found if node in alone)
    assert len(found) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_dropped_branches_free_their_states_and_kept_ones_stay_where_they_are(
    folder_of: Callable[[str], Path], family: str
) -> None:
    stage = stage_of(folder_of(family))
    tree = TreeRange(stage, most_nodes=8)
    tree.begin(len(TEXT))
    for chunk in tree.prompt_chunks(20):
        tree.run_prompt(TEXT[chunk.start : chunk.stop], chunk.start)
    layer = next(layer for layer in stage.cache.layers if layer.kept.states)
    assert list(layer.states) == [19]
    for path in ([1], [2], [2, 3]):
        tree.run_rows([path[-1]], [path])
    assert len(layer.states) == 4
    tree.run_rows([4], [[2, 4]])
    left = {id(part) for state in layer.states.values() for part in state.values()}
    tree.keep(2)
    assert 20 in layer.states
    assert 19 not in layer.states  # nothing starts from there any more
    tree.drop(1)
    tree.drop(3)
    assert len(layer.states) == 2
    assert {id(part) for state in layer.states.values() for part in state.values()} < left


def test_a_draft_model_that_is_never_right_keeps_the_newest_state(folder_of: Callable[[str], Path]) -> None:
    stage = stage_of(folder_of("lfm2"))
    model = DraftModel(stage, range(300))
    model.begin(len(TEXT))
    model.follow(TEXT[:11])
    for token in TEXT[11:20]:
        model.draft([[token + 1]])
        model.follow([token])
    assert all(list(layer.states) == [19] for layer in stage.cache.layers if layer.kept.states)


@pytest.mark.parametrize("family", EVERY)
def test_bfloat16_gives_the_librarys_text(folder_of: Callable[[str], Path], family: str) -> None:
    """Where a prompt is one chunk, also in bfloat16: the passes are those of the library."""
    model = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype="bfloat16")
    ordinary = OrdinaryDecoding(str(folder_of(family)), dtype="bfloat16")
    for prompt in (TEXT[:1], TEXT[3 : 3 + CHUNK]):
        with torch.inference_mode():
            text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)
        got = ordinary.generate(prompt, max_new_tokens=16, ignore_eos=True)
        assert list(got.token_ids) == text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_what_a_token_leaves_travels(folder_of: Callable[[str], Path], family: str, dtype: str) -> None:
    """The first layers continue from another process' entries and states with the bits of their own."""
    stage, twin = stage_of(folder_of(family), dtype), stage_of(folder_of(family), dtype)
    for each in (stage, twin):
        each.begin(len(TEXT))
        each.run(0, 4, TEXT[:11], 0)
    shipped = []
    for position in (11, 12):
        stage.run(0, 4, [TEXT[position]], position)
        shipped.append(stage.export_entries(position, position + 1, 4)[0])
    assert shipped[0].shape == (4, 2, *twin.cache.entry_shape(4))
    twin.import_entries(shipped)
    assert torch.equal(stage.run(0, 4, [5], 13), twin.run(0, 4, [5], 13))
    assert stage.held_from(13, 4) == 14
    assert stage.held_from(2, 4) == 2
    with pytest.raises(RuntimeError, match="entries 2 to 3 of 4 layers are asked for"):
        stage.export_entries(2, 3, 4)


@pytest.mark.parametrize("family", [*FAMILIES, *CHUNKED, *WHOLE])
def test_a_prompt_in_chunks_gives_the_librarys_text(folder_of: Callable[[str], Path], family: str) -> None:
    """A chunk starts from the state before it. Where the library begins without it, a prompt is one chunk."""
    folder, model = folder_of(family), Specimen(family).build()
    with torch.inference_mode():
        expected = model.generate(torch.tensor([TEXT[:37]]), do_sample=False, max_new_tokens=8)[0, 37:].tolist()
    got = OrdinaryDecoding(str(folder), dtype="float32").generate(TEXT[:37], max_new_tokens=8, ignore_eos=True)
    assert list(got.token_ids) == expected
    assert describe(str(folder)).longest_in_chunks == (0 if family in WHOLE else None)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "falcon_h1", "granitemoehybrid", "mamba2"])
def test_exit_states_are_measured_from_any_token_on(folder_of: Callable[[str], Path], family: str) -> None:
    """States of earlier tokens may be gone by then."""
    stage = stage_of(folder_of(family))
    expected = along(stage, TEXT[:20], 11)[0, 1:]
    (found,) = exit_states(stage, TEXT[:20], 12, (4,))
    assert torch.allclose(found, expected, atol=1e-3)  # of up to 32, in another order of sums


def test_a_pass_never_starts_from_a_state_that_is_gone(folder_of: Callable[[str], Path]) -> None:
    stage = stage_of(folder_of("lfm2"))
    along(stage, TEXT[:20], 11)
    stage.truncate(14)
    with pytest.raises(RuntimeError, match="the state after token 13 is not held"):
        stage.run(0, 4, [5], 14)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_of_one_position_have_the_bits_that_they_have_alone(
    folder_of: Callable[[str], Path], family: str
) -> None:
    stage = stage_of(folder_of(family))
    alone = [along(stage, [*TEXT[:11], token, 9], 11) for token in (4, 5, 6)]
    for kept in range(3):
        stage.begin(len(TEXT))
        stage.run(0, 4, TEXT[:11], 0)
        assert torch.equal(stage.run_candidates([4, 5, 6], 11)[0], torch.stack([one[0, 0] for one in alone]))
        stage.keep_candidate(11, kept)
        assert torch.equal(stage.run(0, 4, [9], 12)[:, 0], alone[kept][:, 1])


@pytest.mark.parametrize(("family", "dtype"), [*((family, "float32") for family in FAMILIES), ("mamba2", "bfloat16")])
def test_kept_prefixes_and_requests_at_once(folder_of: Callable[[str], Path], family: str, dtype: str) -> None:
    """A kept chunk has the state at its end."""
    folder = folder_of(family)
    ordinary = OrdinaryDecoding(str(folder), dtype=dtype)
    prompts = [TEXT[:37], TEXT[:37], [*TEXT[:18], 3, 4], TEXT[:24], [5, *TEXT[1:20]], TEXT[:8], TEXT[:7]]
    expected = [_of(ordinary.generate(prompt, **SAMPLED)) for prompt in prompts]
    with PPDRuntime(str(folder), stages=3, transport="local", dtype=dtype, max_requests=3) as runtime:
        got = [runtime.generate(prompt, **SAMPLED) for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            at_once = list(pool.map(lambda prompt: _of(runtime.generate(prompt, **SAMPLED)), prompts))
    assert [_of(result) for result in got] == expected == at_once
    assert [result.stats.cached_tokens for result in got] == [0, 32, 16, 24, 0, 8, 0]


def _of(result: GenerationResult) -> object:
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=nightly) for seed in range(2, 20))])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", *(pytest.param(f, marks=nightly) for f in FAMILIES[2:])])
def test_messages_in_any_order(folder_of: Callable[[str], Path], family: str, seed: int) -> None:
    """In both layouts: with processes that wait for nothing or never answer, the states are those of the text."""
    bench, prompt = Bench.of(folder_of(family)), TEXT[: 9 + seed % 5]
    params = replace((GREEDY, SAMPLED_PARAMS)[seed % 2], max_new_tokens=8)
    expected, impatience = bench.ordinary(prompt, params), 0.15 * (seed % 3)  # at half, no stage ever gets its token
    same(bench.staged(prompt, params, (1, 3), k=2, rows=3, seed=seed, impatience=impatience), expected)
    for layout in ({"k": 3, "lost": (2,)}, {"k": 3, "workers": 2}, {"k": 1, "run_ahead": True}):
        same(bench.pipelined(prompt, params, exit_layer=2, seed=seed, impatience=impatience, **layout), expected)


@pytest.mark.parametrize(("family", "dtype"), [*((family, "float32") for family in FAMILIES), ("mamba2", "bfloat16")])
def test_one_stage_the_papers_layout_and_a_draft_model_of_this_kind(
    folder_of: Callable[[str], Path], family: str, dtype: str
) -> None:
    """With states between layers in another dtype than the weights, too."""
    folder = str(folder_of(family))
    ordinary = OrdinaryDecoding(folder, dtype=dtype)
    of_stages = {"stages": 1, "rows": 4}, {"stages": 2, "rows": 3, "drafter": folder}
    for settings in (*of_stages, {"k": 2, "exit_layer": 2, "speculation": "always"}):
        with PPDRuntime(folder, transport="local", dtype=dtype, **settings) as runtime:
            for prompt in (TEXT[:19], [3, 4, 3, 4, 3]):
                got = runtime.generate(prompt, **SAMPLED | {"max_new_tokens": 16})
                assert _of(got) == _of(ordinary.generate(prompt, **SAMPLED | {"max_new_tokens": 16}))


def test_what_does_not_go_is_refused_in_a_line(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(
        ValueError, match=r"^weights='int8': .* \(mamba2\) reads its head's weights .* leave weights out$"
    ):
        describe(str(folder_of("mamba2")), "int8")
    folder = str(folder_of("qwen3_next"))
    for method in ("swift", "kangaroo"):
        with pytest.raises(
            ValueError, match=rf"^{method} cannot run model .*keep a recurrent state.*another method or model$"
        ):
            open_method(folder, method)
    with pytest.raises(ValueError, match=r"^compile: layers of .* keep a recurrent state .*leave compile out$"):
        OrdinaryDecoding(folder, dtype="float32", compile=True)
    with pytest.raises(ValueError, match="some of its layers are of kind"):
        LayerRange(load_stage(Path(folder)).model)


@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_states_are_as_large_as_the_librarys(family: str) -> None:
    model = Specimen(family).build()
    output = model(torch.tensor([[5, 6, 7]]), use_cache=True)
    layers = output["cache_params" if "cache_params" in output else "past_key_values"].layers
    kinds = [getattr(layer, name, {}) for layer in layers for name in ("conv_states", "recurrent_states")]
    found = sum(part.nbytes for kind in kinds for part in kind.values() if part is not None)
    assert layer_state_bytes(model.config, torch.float32) == found / len(layers)


@pytest.mark.parametrize(
    "specimen", [Specimen("lfm2"), Specimen("jamba", settings={"num_experts": 1, "num_local_experts": 1})], ids=str
)
def test_few_bits(specimen: Specimen, tmp_path: Path) -> None:
    """A layer's products have int8 weights; convolutions and states stay as they are, and weights that code reads."""
    folder = str(tmp_path)
    specimen.build().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    assert describe(folder, "int8").weights == "int8"
    ordinary = OrdinaryDecoding(folder, weights="int8")
    with PPDRuntime(folder, stages=2, transport="local", weights="int8") as runtime:
        assert _of(runtime.generate(TEXT[:19], **SAMPLED)) == _of(ordinary.generate(TEXT[:19], **SAMPLED))
