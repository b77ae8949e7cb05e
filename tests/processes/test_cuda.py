"""What only a GPU can show, and with two GPUs what only two can: `pytest -m cuda`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPT = [5, 9, 200, 31]
ModelFolder = Callable[..., Path]
SETTINGS = {"dtype": "bfloat16", "device": "cuda"}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 3}


def folder_of(model_folder: ModelFolder) -> str:
    return str(model_folder("llama", hidden_size=256, dtype="bfloat16"))


def compiled_stage(folder: str, device: str) -> LayerRange:
    info = describe(folder)
    return load_stage(info, 4, torch.bfloat16, device, compile_ahead(info, torch.bfloat16, device))


def states(stage: LayerRange, capacity: int) -> list[torch.Tensor]:
    stage.begin(capacity)
    stage.run(0, 4, [7] * 60, 0)
    return [stage.run(0, 4, [9], position) for position in range(60, 70)]


@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=two)])
def test_recordings_are_not_empty_and_give_what_launched_passes_give(model_folder: ModelFolder, device: str) -> None:
    """Past a step of the attended rows, and with another capacity, whose caches lie elsewhere."""
    stage = compiled_stage(folder_of(model_folder), device)
    passes = stage._compiled._passes
    recorded = [states(stage, capacity) for capacity in (80, 500, 80)]
    assert passes._recordings._works
    assert passes._recordings._recordings
    passes._recordings = None
    launched = states(stage, 80)
    assert all(torch.equal(ours, theirs) for found in recorded for ours, theirs in zip(found, launched, strict=True))


@pytest.mark.parametrize("asked", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        {"k": 1, "launcher": "processes"},
        {"k": 3, "launcher": "processes"},
        {"k": 1, "transport": "local"},
        {"stages": 2, "k": 2, "launcher": "processes"},
    ],
    ids=["k1", "k3", "threads", "stages"],
)
def test_tokens_are_ordinary_decodings(model_folder: ModelFolder, layout: dict, compiled: bool, asked: dict) -> None:
    """All workers on one GPU where there is no other."""
    folder, settings = folder_of(model_folder), SETTINGS | {"compile": compiled}
    params = {"max_new_tokens": 60, "ignore_eos": True, **asked}
    text = OrdinaryDecoding(folder, **settings).generate(PROMPT, **params).token_ids
    head = OracleHead(((*PROMPT, *text),), 0.7, 300)
    with PPDRuntime(folder, exit_head=head, **layout, **settings) as runtime:
        for _ in range(2):
            assert runtime.generate(PROMPT, **params).token_ids == text


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_gpu_chooses_the_cpus_tokens(filters: dict) -> None:
    sampler = Sampler(SamplingParams(seed=5, temperature=0.7, **filters))
    for position in range(1, 60):
        logits = 3 * torch.randn(128_256, generator=torch.Generator().manual_seed(position))
        history = [7] * position
        assert sampler.choose(logits.cuda(), history) == sampler.choose(logits, history)


def test_padded_passes_read_slots_and_are_recorded(model_folder: ModelFolder) -> None:
    """Rows of a tree have the bits of their own passes, recorded or launched; tokens are ordinary decoding's."""
    folder, settings = folder_of(model_folder), SETTINGS | {"compile": False, "rows_share_weights": True}
    stage, parents = RowsRange(load_stage(describe(folder), 4, torch.bfloat16, "cuda").model), [-1, 0, 0, 2, -1]
    assert stage.reads_slots
    found = []
    for recordings in (stage._recordings, None):
        stage._recordings = recordings
        stage.begin(600)
        stage.run(0, 4, [7] * 510, 0)
        found.append(stage.run_tree([5, 6, 7, 8, 9], parents, 510))
        stage.truncate(510)
        found.append(torch.cat([stage.run(0, 4, [token], 510 + i) for i, token in enumerate((5, 7, 8))], dim=1))
        assert torch.equal(found[-2][:, [0, 2, 3]], found[-1])
    assert torch.equal(found[0], found[2])
    text = OrdinaryDecoding(folder, **settings).generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids
    with PPDRuntime(folder, stages=2, k=2, launcher="processes", **settings) as runtime:
        assert runtime.generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids == text


@pytest.mark.parametrize("compiled", [False, True])
def test_requests_at_once_have_ordinary_decodings_tokens(model_folder: ModelFolder, compiled: bool) -> None:
    """Each with caches of its own, which later ones' lie in the place of."""
    folder, settings = folder_of(model_folder), SETTINGS | {"compile": compiled}
    params = {"max_new_tokens": 60, "ignore_eos": True}
    prompts = [[*PROMPT, number] for number in range(12)]
    ordinary = OrdinaryDecoding(folder, **settings)
    texts = [ordinary.generate(prompt, **params).token_ids for prompt in prompts]
    runtime = PPDRuntime(folder, launcher="processes", stages=2, k=2, max_requests=4, **settings)
    with runtime, ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: runtime.generate(prompt, **params).token_ids, prompts)) == texts


@pytest.mark.parametrize(("victim", "layout"), [("sub-1", {"k": 1}), ("stage-1", {"stages": 2, "k": 2})])
def test_a_lost_worker_costs_no_token(model_folder: ModelFolder, victim: str, layout: dict) -> None:
    folder, settings = folder_of(model_folder), SETTINGS | {"compile": True}
    params = {"max_new_tokens": 200, "ignore_eos": True}
    text = OrdinaryDecoding(folder, **settings).generate(PROMPT, **params).token_ids
    found = []
    with PPDRuntime(folder, launcher="processes", **layout, **settings) as runtime:
        for event in runtime.stream(PROMPT, **params):
            found.append(event.token_id)
            if len(found) == 20:
                worker_processes()[victim].kill()
    assert tuple(found) == text


@two
@pytest.mark.parametrize("transport", ["unix", "collective"])
def test_workers_of_ray_have_a_gpu_each(model_folder: ModelFolder, transport: str) -> None:
    """With unix each sees its own GPU alone, as cuda:0; with collective it sees both, and the second is cuda:1."""
    folder, settings = folder_of(model_folder), SETTINGS | {"compile": True}
    params = {"max_new_tokens": 60, "ignore_eos": True}
    text = OrdinaryDecoding(folder, **settings).generate(PROMPT, **params).token_ids
    with PPDRuntime(folder, k=1, launcher="ray", transport=transport, **settings) as runtime:
        assert runtime.generate(PROMPT, **params).token_ids == text
