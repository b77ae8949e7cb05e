"""Whatever becomes of messages and workers, every token is ordinary decoding's, and nothing hangs."""

import logging
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from chaos import ChanceNetwork, Fate, chaos
from heads_for_tests import make_drafter
from seeds import SEED

import ppd_runtime.launch.startup
import ppd_runtime.workers.roles
from ppd_runtime import PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.drafter import Drafter
from ppd_runtime.models.trained.exit_heads import OracleHead

LEAST_REQUESTS, LEAST_STAGED, LEAST_DRAFTED = 4, 2, 6
FAULTS = int(os.environ.get("PPD_FAULTS", "1"))
"""Of each kind that a case has, at least."""
PROMPT = [5, 9, 200, 31]
MISHAPS = {
    "lost": {"lost": 0.03},
    "doubled": {"doubled": 0.2, "stale": 0.1},
    "out of order": {"late": 0.2},
    "cut": {"cut": 0.03},
    "sub-processes die": {"death": 0.004},
    "all sub-processes die": {"all_death": 0.001},
    "everybody dies": {"death": 0.002, "main_death": 0.002},
    "some stop": {"stopped": 0.003},
    "workers raise": {"raised": 0.003},
    "everything": {
        "lost": 0.01, "doubled": 0.05, "stale": 0.05, "late": 0.05, "cut": 0.01, "death": 0.001, "main_death": 0.001,
        "stopped": 0.001, "raised": 0.001,
    },
}  # fmt: skip


PAPER = [
    {"k": 1, "run_ahead": True},
    {"k": 1, "run_ahead": False},
    {"k": 3, "workers": 3, "run_ahead": False},
    {"k": 3, "workers": 1, "run_ahead": False},
]
STAGED = [
    {"stages": 2, "k": 1, "rows": 1},
    {"stages": 3, "k": 3, "rows": 4},
    {"stages": 3, "k": 2, "rows": 1},
    {"stages": 2, "k": 3, "rows": 4},
    {"stages": 4, "k": 3, "rows": 4},
    {"stages": 4, "k": 1, "rows": 1},
]

DRAFTED = [{"stages": 1, "rows": 4}, {"stages": 2, "k": 2, "rows": 4}, {"stages": 3, "k": 2, "rows": 4}]
OF_DRAFTERS = {
    "a drafter goes wrong": {"misdeed": 0.03},
    "a worker dies drafting": {"drafting_death": 0.02},
    "lost beside a drafter": {"lost": 0.03, "misdeed": 0.02},
    "doubled beside a drafter": {"doubled": 0.2, "stale": 0.1, "misdeed": 0.02},
    "late beside a drafter": {"late": 0.2, "misdeed": 0.02},
    "everything beside a drafter": {"drafting_death": 0.01, "misdeed": 0.05, **MISHAPS["everything"]},
}


def _rates(mishaps, layout):
    """Every stage is needed: with several of them, deaths as frequent as sub-processes' would leave no time to read."""
    rates, ends = (MISHAPS | OF_DRAFTERS)[mishaps], ("death", "main_death", "all_death", "raised")
    if layout.get("stages") == 1:
        rates = {kind: rate for kind, rate in rates.items() if kind != "death"}  # there are no sub-processes
    return {kind: rate / layout.get("stages", 1) ** (kind in ends) for kind, rate in rates.items()}


def _named(layout):
    return "-".join(f"{name}={value}" for name, value in layout.items())


@pytest.mark.parametrize(
    ("mishaps", "layout"),
    [
        pytest.param(mishaps, layout, id=f"{mishaps}-{_named(layout)}", marks=() if by_day else pytest.mark.nightly)
        for i, mishaps in enumerate(MISHAPS)
        for by_day, layout in [
            *((i % len(PAPER) == j, layout) for j, layout in enumerate(PAPER)),
            *((i % len(STAGED) == j, layout) for j, layout in enumerate(STAGED)),
        ]
    ],
)
def test_tokens_are_ordinary_decodings(folder, ordinary, hurried, monkeypatch, caplog, mishaps, layout):
    _decode_among(mishaps, layout, folder, ordinary, monkeypatch, caplog)


@pytest.mark.parametrize(
    ("mishaps", "layout"),
    [
        pytest.param(mishaps, layout, id=f"{mishaps}-{_named(layout)}", marks=() if by_day else pytest.mark.nightly)
        for i, mishaps in enumerate(OF_DRAFTERS)
        for by_day, layout in ((i % len(DRAFTED) == j, layout) for j, layout in enumerate(DRAFTED))
    ],
)
def test_so_they_are_with_drafters(folder, ordinary, hurried, monkeypatch, caplog, tmp_path, mishaps, layout):
    """That go wrong, or whose workers die, among mishaps of messages and workers; rows cost little."""
    make_drafter(tmp_path / "drafter", folder, range(300))
    layout = layout | {"drafter": str(tmp_path / "drafter"), "speculation": "always", "emulate": EmulatedDevice(1.0)}
    _decode_among(mishaps, layout, folder, ordinary, monkeypatch, caplog)


def _decode_among(mishaps, layout, folder, ordinary, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "ppd_runtime")
    fate, draw = Fate(SEED, **_rates(mishaps, layout)), random.Random(SEED)
    least = LEAST_DRAFTED if "drafter" in layout else LEAST_STAGED if "stages" in layout else LEAST_REQUESTS
    monkeypatch.setattr(ppd_runtime.launch.startup, "LocalWorkers", chaos(fate))
    hits = requests = slowest = 0
    expected = ordinary.generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids
    head = OracleHead(((*PROMPT, *expected),), 0.8, 300)
    text = [*PROMPT, *expected]
    monkeypatch.setattr(Drafter, "another", lambda drafter: ChanceNetwork(fate, text, drafter.tokens))
    runtime = PPDRuntime(folder, transport="local", dtype="float32", max_restarts=10_000, **layout)
    runtime._specs = [replace(spec, exit_head=replace(head, seed=spec.rank)) for spec in runtime._specs]
    with runtime:
        while requests < least or any(fate.happened[kind] < FAULTS for kind in _rates(mishaps, layout)):
            settings = {"max_new_tokens": draw.randint(1, 60), "ignore_eos": True}
            if draw.random() < 0.5:
                settings |= {"temperature": 0.8, "seed": draw.randrange(100)}
            prompt = PROMPT[: draw.randint(1, 4)] if draw.random() < 0.3 else PROMPT
            began = time.monotonic()
            result = runtime.generate(prompt, **settings)
            assert result.token_ids == ordinary.generate(prompt, **settings).token_ids
            assert time.monotonic() - began < 120
            foreseen = sum(result.stats.first_boundary[:-1])
            assert sum(result.stats.first_boundary) < max(len(result.token_ids), 1), "no token is counted twice"
            hits, requests, slowest = (
                hits + (result.stats.hits or foreseen),
                requests + 1,
                max(slowest, time.monotonic() - began),
            )
    happened = {kind: number for kind, number in fate.happened.items() if number}
    print(f"{happened} in {requests} requests, {hits} hits, slowest request {slowest:.1f} s")
    heard = Counter(message.rpartition(": MemoryError: ")[2] for message in caplog.messages if "is lost" in message)
    unheard = [words for words in fate.words if not heard[words]]
    assert all(heard[words] <= 1 for words in fate.words), "a worker's words are told once"
    assert len(unheard) <= 1 + runtime.config.num_subs or "everything" in mishaps, (
        "only the last may not have been asked for yet"
    )


@pytest.mark.parametrize(
    "mishaps", [name if name == "everything" else pytest.param(name, marks=pytest.mark.nightly) for name in MISHAPS]
)
def test_two_requests_at_once(folder, ordinary, hurried, monkeypatch, mishaps):
    layout = STAGED[1]
    fate, draw = Fate(SEED, **_rates(mishaps, layout)), random.Random(SEED)
    monkeypatch.setattr(ppd_runtime.launch.startup, "LocalWorkers", chaos(fate))
    jobs = [
        ([draw.randrange(300)] * draw.randint(1, 4), draw.randint(1, 40), draw.choice([0.0, 0.8])) for _ in range(8)
    ]

    def generate(generator, job):
        prompt, tokens, temperature = job
        return generator.generate(prompt, max_new_tokens=tokens, temperature=temperature, seed=3, ignore_eos=True)

    settings = {"transport": "local", "dtype": "float32", "max_restarts": 10_000, "max_requests": 2}
    with PPDRuntime(folder, **settings, **layout) as runtime, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: generate(runtime, job).token_ids, jobs))
    assert results == [generate(ordinary, job).token_ids for job in jobs]
    assert sum(fate.happened.values()) > 0


def _out_of_memory(*_):
    raise MemoryError("3 GiB more than there are")
    yield


def test_a_sub_process_that_raises_is_named_with_its_own_words(folder, ordinary, hurried, monkeypatch, caplog):
    monkeypatch.setattr(ppd_runtime.workers.roles.SubProcess, "serve", _out_of_memory)
    with PPDRuntime(folder, k=2, transport="local", dtype="float32", max_restarts=2) as runtime:
        expected = ordinary.generate(PROMPT, max_new_tokens=200, ignore_eos=True).token_ids
        for _ in range(4):
            assert runtime.generate(PROMPT, max_new_tokens=200, ignore_eos=True).token_ids == expected
    lost = [message for message in caplog.messages if "is lost" in message]
    for rank in (1, 2):
        own = [message for message in lost if f"sub-process {rank} " in message]
        assert [message.rpartition(": MemoryError: ")[2] for message in own] == ["3 GiB more than there are"] * 3
        assert "after 2 restarts, decoding goes on without it" in own[-1]


def test_a_main_process_that_raises_again_and_again_is_an_error(folder, hurried, monkeypatch, caplog):
    monkeypatch.setattr(ppd_runtime.workers.roles.MainProcess, "decode", _out_of_memory)
    with PPDRuntime(folder, k=1, transport="local", max_restarts=2) as runtime:
        words = "the main process failed, after 2 restarts: MemoryError: 3 GiB more than there are"
        with pytest.raises(RuntimeError, match=words):
            runtime.generate(PROMPT, max_new_tokens=5)
        with pytest.raises(RuntimeError, match="closed"):
            runtime.generate(PROMPT, max_new_tokens=5)
    assert len([message for message in caplog.messages if "MemoryError" in message]) == 2, "one for each restart"


def test_a_stage_that_raises_again_and_again_is_an_error(folder, hurried, monkeypatch):
    monkeypatch.setattr(ppd_runtime.workers.roles.MiddleStage, "serve", _out_of_memory)
    with PPDRuntime(folder, stages=3, k=1, transport="local", max_restarts=2) as runtime:
        words = "stage 2 failed, after 2 restarts: MemoryError: 3 GiB more than there are"
        with pytest.raises(RuntimeError, match=words):
            runtime.generate(PROMPT, max_new_tokens=5)
        with pytest.raises(RuntimeError, match="closed"):
            runtime.generate(PROMPT, max_new_tokens=5)
