"""Twenty requests at once over real processes, stages killed meanwhile: each text is the one it has alone."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compilers import needs_compiler
from grids import nightly
from seeds import SEED
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.models.stage.emulation import EmulatedDevice

pytestmark = pytest.mark.processes
KILLS = 5


@dataclass
class Request:
    """What is asked for, and when it goes away: behind so many tokens."""

    prompt: list[int]
    settings: dict[str, Any]
    leaves_behind: int | None

    def of(self, generator: TextGenerator) -> object:
        """Its tokens, and how likely they are where that is asked for."""
        if self.leaves_behind is None:
            result = generator.generate(self.prompt, **self.settings)
            return result.token_ids, result.logprobs
        stream, tokens = generator.stream(self.prompt, **self.settings), []
        for event in stream:
            tokens.append(event.token_id)
            if len(tokens) == self.leaves_behind:
                stream.close()
                break
        return tokens


def some_request(draw: random.Random) -> Request:
    settings = {"max_new_tokens": draw.randint(1, 60), "ignore_eos": True, "seed": draw.randrange(2**32)}
    settings |= draw.choice([{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}])
    settings |= draw.choice([{}, {}, {"logprobs": 2}])
    prompt = [draw.randrange(300) for _ in range(draw.choice([1, 4, 20, 300]))]
    return Request(prompt, settings, draw.choice([None, None, 3]))


@nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_twenty_requests_while_stages_are_killed(model_folder: Callable[..., Path], compiled: bool) -> None:
    folder, draw = str(model_folder("llama", num_layers=4)), random.Random(SEED)
    requests = [some_request(draw) for _ in range(20)]
    place = {"dtype": "float32", "compile": compiled}
    ordinary = OrdinaryDecoding(folder, **place)
    expected = [request.of(ordinary) for request in requests]
    over = threading.Event()

    def kill() -> None:
        """One stage after the other, each time when all of them run."""
        for _ in range(KILLS):
            while len(stages := [process for name, process in worker_processes().items() if "stage" in name]) < 3:
                if over.wait(0.1):
                    return
            draw.choice(stages).kill()
            if over.wait(1):
                return

    layout = {"stages": 3, "rows": 4, "max_requests": 6, "max_restarts": 100, "emulate": EmulatedDevice(layer_ms=3.0)}
    with PPDRuntime(folder, launcher="processes", **layout, **place) as runtime:
        killer = threading.Thread(target=kill)
        killer.start()
        with ThreadPoolExecutor(len(requests)) as pool:
            found = list(pool.map(lambda request: request.of(runtime), requests))
        over.set()
        killer.join()
        assert runtime.restarts > 1
    assert found == expected
