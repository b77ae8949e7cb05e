"""Several requests at once in the staged layout: each text is the one that it has alone."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from seeds import SEED

from ppd_runtime import OrdinaryDecoding, PPDRuntime

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> str:
    return str(model_folder("llama", num_layers=4))


@pytest.fixture(scope="module")
def ordinary(folder: str) -> OrdinaryDecoding:
    return OrdinaryDecoding(folder, dtype="float32")


def test_twenty_requests_of_all_kinds(folder: str, ordinary: OrdinaryDecoding) -> None:
    """Greedy and sampled, long and short, some with prompts of several chunks, some cancelled in the middle."""
    draw = random.Random(SEED)
    with PPDRuntime(folder, stages=3, rows=4, transport="local", dtype="float32", max_requests=6) as runtime:

        def run(number: int) -> None:
            rng = random.Random(f"{SEED}-{number}")
            prompt = [rng.randrange(300) for _ in range(rng.choice([1, 4, 20, 300 if number < 4 else 7]))]
            settings = {"max_new_tokens": rng.randint(1, 40), "ignore_eos": True}
            if number % 2:
                settings |= {"temperature": 0.9, "seed": number}
            stream, tokens, most = runtime.stream(prompt, **settings), [], rng.choice([3, 100])
            for event in stream:
                tokens.append(event.token_id)
                if len(tokens) == most:
                    stream.close()
                    break
            jobs.append((prompt, settings, tokens, len(tokens) == most))

        jobs: list[tuple[list[int], dict, list[int], bool]] = []
        order = list(range(20))
        draw.shuffle(order)
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(run, order))
    assert len(jobs) == 20
    for prompt, settings, tokens, is_cut in jobs:
        expected = ordinary.generate(prompt, **settings).token_ids
        assert tuple(tokens) == expected[: len(tokens)]
        assert is_cut or len(tokens) == len(expected)
