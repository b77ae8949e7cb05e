"""Fewer sub-processes than candidates: siblings run as one pass are what separate passes are, up to rounding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pipeline_runs import GREEDY, PROMPTS, Bench, rehearsed

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.pipeline.messages import MISS, Candidate, HeadStart

ModelFolder = Callable[..., Path]


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


@pytest.mark.parametrize(("k", "workers", "temperature"), [(3, 1, 0.9), (4, 3, 0.0)])
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
