"""A draft model's gain beside the cost model's formula, on EMULATED devices.

    python -m benchmarks.draft_models --layer-ms 20 --draft-ms 1 --chance 0.75 --stages 1,2,4

The model computes its real tokens and sleeps until its layers' times have passed, in ordinary decoding too. The draft
model is told the text: it names the right token with the given chance, whatever came before, and sleeps for its time.
One stage asks it in its own process, several have it on a device of its own. Nothing else guesses: heads are never
right, and repetitions are not looked for. Workers are threads.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.emulated import cores_awake, woken_at_once
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, new_parser, positive, run, share, table_of, whole_numbers
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.cost_model import drafting
from ppd_runtime.models import named_drafter
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.results import GenerationResult
from ppd_runtime.workers import roles

_PROMPT = [5, 9, 200, 31]
_ROWS = 12


class ToldModel:
    """Stands for a draft model that takes `seconds` for a token and is right with a chance; `text` is what comes."""

    text: Sequence[int] = ()
    chance, seconds, vocab_size = 0.0, 0.0, 1
    right: Sequence[bool] = ()

    def __init__(self, *of_a_model: Any) -> None:
        self.tokens, self._known = range(self.vocab_size), 0

    def another(self) -> "ToldModel":
        """For another request."""
        return type(self)()

    def begin(self, capacity: int) -> None:
        """Another text begins."""
        self._known = 0

    def follow(self, tokens: Sequence[int], states: Tensor | None = None) -> None:
        """It knows them."""
        self._known += len(tokens)

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Log-odds that give the named token the chance."""
        time.sleep(self.seconds * len(chains))
        logits = torch.zeros(len(chains), self.vocab_size)
        for row, chain in enumerate(chains):
            place = min(self._known + len(chain), len(self.text) - 1)
            named = self.text[place] if self.right[place] else (self.text[place] + 1) % self.vocab_size
            logits[row, named] = math.log(self.chance / (1 - self.chance) * (self.vocab_size - 1))
        return logits


def measure(options: argparse.Namespace) -> Figures:
    """A row for each number of stages."""
    device = EmulatedDevice(options.layer_ms, draft_ms=options.draft_ms)
    params = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    with model_folder(options.model) as model, woken_at_once(), cores_awake():
        with OrdinaryDecoding(model, emulate=device) as ordinary:
            before, info = ordinary.generate(_PROMPT, params), ordinary.info
        right = np.random.default_rng(0).random(len(_PROMPT) + options.tokens) < options.chance
        kind = type("Told", (ToldModel,), {"text": [*_PROMPT, *before.token_ids], "right": right.tolist()})
        kind.chance, kind.seconds, kind.vocab_size = options.chance, options.draft_ms / 1000, info.vocab_size
        drawn, whole, rows = float(right[len(_PROMPT) + 1 :].mean()), info.num_layers * options.layer_ms, []
        with _standing_for_draft_models(kind):
            for stages in options.stages:
                found = _decoded(model, info.vocab_size, stages, device, params)
                speedup = before.stats.time_per_token_s / found.stats.time_per_token_s
                expected = whole / _expected(drawn, options.draft_ms, stages, whole)
                same = found.token_ids == before.token_ids
                figures = {"speedup": speedup, "expected": expected, "off": speedup / expected - 1}
                rows.append({"stages": stages, **figures, "identical": same})
    return {"layer_ms": options.layer_ms, "draft_ms": options.draft_ms, "chance": options.chance, "rows": rows}


def _decoded(
    model: str, vocab_size: int, stages: int, device: EmulatedDevice, params: SamplingParams
) -> GenerationResult:
    settings: dict[str, Any] = {"rows": _ROWS, "drafter": model, "draft_memory_mb": 0, "transport": "local"}
    settings |= {"repetitions": False}
    if stages > 1:
        settings |= {"drafter_device": "cpu", "exit_head": OracleHead((), 0.0, vocab_size)}
    with PPDRuntime(model, stages=stages, speculation="always", emulate=device, **settings) as runtime:
        return runtime.generate(_PROMPT, params)


def _expected(chance: float, draft: float, stages: int, whole: float) -> float:
    """Milliseconds of a token, by the formulas."""
    if stages == 1:
        guesses = _ROWS - 1
        return whole / drafting.speedup(drafting.chain([chance] * guesses), 0.0, guesses * draft / whole)
    waits = (drafting.draft_model_time(chance, draft, stages, whole / stages, waits) for waits in range(_ROWS))
    return min(waits)


@contextmanager
def _standing_for_draft_models(kind: type[ToldModel]) -> Iterator[None]:
    before = roles.DraftModel, named_drafter.load_draft_model
    roles.DraftModel, named_drafter.load_draft_model = kind, lambda *_: kind()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        roles.DraftModel, named_drafter.load_draft_model = before  # type: ignore[misc]


def table(figures: Figures) -> str:
    """A row for each number of stages."""
    devices = f"EMULATED: {figures['layer_ms']:g} ms a layer, {figures['draft_ms']:g} ms a draft"
    return table_of(
        figures["rows"],
        stages=f"stages, {devices}, right {figures['chance']:g}",
        speedup="speed-up",
        expected="by the formula",
        off="off by",
        identical="tokens identical",
    )


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--layer-ms", type=float, default=20.0, help="of an emulated layer (default 20)")
    options.add_argument("--draft-ms", type=float, default=1.0, help="of a draft model's token (default 1)")
    options.add_argument("--chance", type=share, default=0.75, help="that a name is right (default 0.75)")
    options.add_argument("--stages", type=whole_numbers, default=[1, 2, 4], help="numbers of stages (default 1,2,4)")
    options.add_argument("--tokens", type=positive, default=96, help="new tokens (default 96)")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
