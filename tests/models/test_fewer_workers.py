"""Fewer sub-processes than candidates: siblings run as one pass are what separate passes are, up to rounding."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models_for_tests import FAMILIES, SLIDING_WINDOW, build_model, load_stage
from pipeline_runs import GREEDY, PROMPTS, Bench, rehearsed
from torch import Tensor

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice, emulated
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.pipeline.messages import MISS, Candidate, HeadStart

TOKENS = (5, 9, 200)
ModelFolder = Callable[..., Path]


def begun(stage: LayerRange, length: int) -> LayerRange:
    """With a prompt of `length` tokens behind it, and room for the siblings and one token more."""
    stage.begin(length + len(TOKENS))
    stage.run(0, stage.num_layers, list(range(40, 40 + length)), 0)
    return stage


def one_by_one(stage: LayerRange, position: int) -> Tensor:
    states = []
    for token in TOKENS:
        states.append(stage.run(0, stage.num_layers, [token], position))
        stage.truncate(position)
    return torch.cat(states, dim=1)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("length", [1, SLIDING_WINDOW - 1, SLIDING_WINDOW, 3 * SLIDING_WINDOW])
@pytest.mark.parametrize("family", FAMILIES)
def test_siblings_see_the_prefix_and_themselves(model_folder: ModelFolder, family: str, length: int) -> None:
    stage = begun(load_stage(model_folder(family)), length)
    expected = one_by_one(stage, length)
    got = stage.run_candidates(TOKENS, length)
    assert got.shape == (1, 3, 32)
    assert close(got, expected)
    assert not close(got, expected[:, [1, 2, 0]]), "the tokens' states differ enough to tell them apart"


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_the_one_that_is_kept_is_what_is_seen_later(model_folder: ModelFolder, family: str, index: int) -> None:
    length = 2 * SLIDING_WINDOW
    alone, among = (begun(load_stage(model_folder(family)), length) for _ in range(2))
    alone.run(0, 4, [TOKENS[index]], length)
    among.run_candidates(TOKENS, length)
    among.keep_candidate(length, index)
    assert [among.length(layer) for layer in range(4)] == [length + 1] * 4
    assert close(among.export_entries(length, length + 1, 4), alone.export_entries(length, length + 1, 4))
    assert close(among.run(0, 4, [77], length + 1), alone.run(0, 4, [77], length + 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_sibling_is_an_ordinary_pass_to_the_last_bit(model_folder: ModelFolder, dtype: str) -> None:
    ordinary, sibling = (begun(load_stage(model_folder("llama"), dtype), 5) for _ in range(2))
    assert torch.equal(sibling.run_candidates((9,), 5), ordinary.run(0, 4, [9], 5))
    sibling.keep_candidate(5, 0)
    assert torch.equal(sibling.run(0, 4, [7], 6), ordinary.run(0, 4, [7], 6))


def test_dropped_siblings_leave_nothing(model_folder: ModelFolder) -> None:
    ordinary, stage = (begun(load_stage(model_folder("mistral")), 9) for _ in range(2))
    stage.run_candidates(TOKENS, 9)
    stage.truncate(9)
    assert torch.equal(stage.run(0, 4, [7], 9), ordinary.run(0, 4, [7], 9))


def test_siblings_need_their_place_and_room(model_folder: ModelFolder) -> None:
    stage = begun(load_stage(model_folder("llama")), 5)
    with pytest.raises(RuntimeError, match="layer 0 holds 5 tokens, the pass starts at position 4"):
        stage.run_candidates(TOKENS, 4)
    with pytest.raises(IndexError, match="8 tokens cannot hold 9"):
        stage.run_candidates((*TOKENS, 11), 5)
    stage.run_candidates(TOKENS, 5)


def test_each_sibling_counts_as_a_pass(model_folder: ModelFolder) -> None:
    stage = begun(load_stage(model_folder("llama")), 5)
    stage.run_candidates(TOKENS, 5)
    assert stage.layer_passes == 4 + 3 * 4


def test_an_emulated_device_takes_one_tokens_time_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = list[float]()
    monkeypatch.setattr("ppd_runtime.models.stage.emulation._wait_until", ends.append)
    model = build_model("llama", num_layers=4)
    stage = begun(emulated(LayerRange(model), EmulatedDevice(layer_ms=100_000.0)), 5)
    began = time.perf_counter()
    stage.run_candidates(TOKENS, 5)
    assert 400 <= max(ends) - began < 800


@pytest.fixture(scope="module")
def bench(model_folder: ModelFolder) -> Bench:
    return Bench.of(model_folder("llama", num_layers=5))


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_compute_is_the_theorems_on_any_number_of_workers(bench: Bench, rate: float) -> None:
    """On one worker too: its passes over three candidates count three times."""
    prompt = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(prompt, GREEDY)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size)
    got = bench.pipelined(prompt, GREEDY, 3, 3, head, workers=1)
    (sub,) = got.subs
    compared = len(got.tokens) - 1
    assert sub.layer_passes == 3 * 2 * compared
    assert got.hits == bench.pipelined(prompt, GREEDY, 3, 3, head).hits
    assert sub.coherence_layer_passes // 2 - 1 in (compared - got.hits - 1, compared - got.hits)
    assert set(got.winners[:-1]) <= {MISS, 1}


def test_candidates_are_dealt_out_by_rank(bench: Bench) -> None:
    """Each of two workers has one of the two likeliest, and all five are somebody's."""
    prompt = bench.prompt_ids(PROMPTS[2])
    head = rehearsed(prompt, bench.ordinary(prompt, GREEDY).tokens, 1.0, bench.info.vocab_size)
    sent = bench.pipelined(prompt, GREEDY, 5, 3, head, workers=2).network.sent
    named = {m.sender: m.token_ids for _, m in sent if isinstance(m, Candidate) and m.position == len(prompt)}
    ranked = head.candidates(torch.empty(0), prompt, 5)
    assert named == {1: tuple(ranked[0::2]), 2: tuple(ranked[1::2])}
    assert all(m.hidden.shape == (1, len(m.token_ids), 32) for _, m in sent if isinstance(m, HeadStart))


@pytest.mark.parametrize(("k", "workers"), [(3, 1), (4, 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_runtime_on_threads(model_folder: ModelFolder, k: int, workers: int, temperature: float) -> None:
    folder = str(model_folder("llama", num_layers=5))
    prompts = ([5, 9, 200], [40, 7, 291, 65, 133])
    ask = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "ignore_eos": True}
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    expected = [ordinary.generate(prompt, **ask) for prompt in prompts]
    texts = tuple((*result.prompt_ids, *result.token_ids) for result in expected)
    head = OracleHead(texts, 0.8, ordinary.info.vocab_size)
    layout = {"k": k, "workers": workers, "transport": "local", "exit_head": head, "speculation": "always"}
    with PPDRuntime(
        folder, dtype="float32", emulate=EmulatedDevice(2.0), **layout
    ) as runtime:  # slow: no start is late
        got = [runtime.generate(prompt, **ask) for prompt in prompts]
    assert [result.token_ids for result in got] == [result.token_ids for result in expected]
    assert all(result.stats.hits and len(result.stats.sub_layer_passes) == workers for result in got)
