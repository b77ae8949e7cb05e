"""A request that cannot be answered ends with an error that says why, and alone: the next one is answered."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos import Fate, chaos
from damage import with_numbers
from heads_for_tests import make_adapter
from seeds import SEED
from torch import Tensor
from ways import LAYOUTS, LOCAL, METHODS, PROMPT, WAYS

import ppd_runtime.launch.startup
from ppd_runtime import OrdinaryDecoding, PPDRuntime, RequestError, open_method
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.verification import RejectionSampling, SharedNoise
from ppd_runtime.workers import worker

ModelFolder = Callable[..., Path]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "penalised": {"frequency_penalty": 0.5},
    "log-probabilities": {"logprobs": 2, "prompt_logprobs": True},
}
GUESSING = ("k=2", "stages of rows", "three stages", "layerskip")
"""Ways whose guesses are often wrong here."""
KANGAROO = "kangaroo"
AT = "the model's logits for position {} are NaN or infinite: a weight is damaged .* or float16 overflows"


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    return model_folder("llama", num_layers=4, tied=False, quiet_from=2)


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> OrdinaryDecoding:
    return OrdinaryDecoding(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def expected(ordinary: OrdinaryDecoding) -> tuple[int, ...]:
    """The text behind `PROMPT`."""
    return ordinary.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def damaged_token(expected: tuple[int, ...]) -> int:
    """One that the text comes to, and not in the beginning."""
    return next(token for token in expected[8:] if token not in (*PROMPT, *expected[:8]))


@pytest.fixture(scope="module")
def damaged(folder: Path, damaged_token: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has no numbers for what follows that token."""
    out = tmp_path_factory.mktemp("damaged") / "model"
    return str(with_numbers(folder, out, "model.embed_tokens.weight", damaged_token, math.nan))


@pytest.fixture(scope="module")
def ways(damaged: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All ways for that model."""
    adapter = make_adapter(tmp_path_factory.mktemp("parts") / "adapter", Path(damaged), 2)
    return {**WAYS, KANGAROO: {"method": KANGAROO, "adapter": adapter.folder, "threshold": 0.05}}


@pytest.fixture(autouse=True)
def nobody_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No refusal and no failed request looks like a death."""
    caplog.set_level(logging.WARNING, "ppd_runtime")
    yield
    assert not [line for line in caplog.messages if "is lost" in line]


def told(generator: TextGenerator, prompt: list[int], **settings: Any) -> tuple[list[int], str]:
    """The tokens that come, and the error behind them."""
    tokens: list[int] = []
    with pytest.raises(RequestError) as raised:
        for event in generator.stream(prompt, max_new_tokens=24, ignore_eos=True, **settings):
            tokens.append(event.token_id)
    return tokens, str(raised.value)


def test_what_is_no_number_chooses_no_token(
    damaged: str, damaged_token: int, expected: tuple[int, ...], ways: dict[str, dict[str, Any]]
) -> None:
    """All tokens before it come; then an error names its position."""
    before = [*expected[: expected.index(damaged_token) + 1]]
    for way, options in ways.items():
        with open_method(damaged, dtype="float32", **options) as method:
            if way != "rejection sampling":
                assert told(method, PROMPT)[0] == before, way
            tokens, error = told(method, PROMPT)
            assert len(tokens) == len(before)
            assert error.startswith(f"the model's logits for position {len(PROMPT) + len(before)} are NaN")
            short = method.generate(PROMPT, max_new_tokens=len(before), ignore_eos=True)
            assert short.token_ids == tuple(before), "the next request is answered"


@pytest.mark.parametrize("way", [*WAYS, KANGAROO])
def test_every_way_to_choose_finds_it(
    damaged: str, damaged_token: int, ways: dict[str, dict[str, Any]], way: str
) -> None:
    with open_method(damaged, dtype="float32", **ways[way]) as method:
        for settings in SETTINGS.values():
            with pytest.raises(RequestError, match=AT.format(len(PROMPT) if "logprobs" not in settings else r"\d")):
                method.generate([*PROMPT[:-1], damaged_token], max_new_tokens=24, ignore_eos=True, **settings)
            assert len(method.generate(PROMPT, max_new_tokens=3, ignore_eos=True).token_ids) == 3
        if isinstance(method, PPDRuntime):
            assert method.restarts == 0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_one_number_in_the_head_is_enough(
    folder: Path, ordinary: OrdinaryDecoding, tmp_path: Path, number: float
) -> None:
    """Logits of minus infinity alone are no fault: masks are made of them."""
    model = str(with_numbers(folder, tmp_path / "model", "lm_head.weight", (17, 0), number))
    found = set()
    for options in ({"method": "autoregressive"}, LAYOUTS["stages of rows"], METHODS["layerskip"]):
        with open_method(model, dtype="float32", **options) as method:
            found.add(told(method, PROMPT)[1])
    assert len(found) == 1


def test_float16_that_overflows_is_named_and_bfloat16_does_not(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    model = str(with_numbers(folder, tmp_path / "model", name, ..., 3e4))
    for dtype in ("float32", "bfloat16"):
        assert OrdinaryDecoding(model, dtype=dtype).generate(PROMPT, max_new_tokens=3, ignore_eos=True).token_ids
    for options in ({"method": "autoregressive"}, LAYOUTS["k=2"], LAYOUTS["three stages"]):
        with (
            open_method(model, dtype="float16", **options) as method,
            pytest.raises(RequestError, match="float16 overflows .choose dtype float32 or bfloat16"),
        ):
            method.generate(PROMPT, max_new_tokens=3, ignore_eos=True)


@dataclass(frozen=True)
class Names:
    """Names one token everywhere, and then the right one."""

    token: int
    text: tuple[int, ...]

    def candidates(self, hidden: Tensor, history: list[int], k: int) -> list[int]:
        right = self.text[len(history)] if len(history) < len(self.text) else 1
        return [self.token, right if right != self.token else 2, 3][:k]

    def guesses(self, hidden: Tensor, texts: list[list[int]], k: int) -> list[list[tuple[int, float]]]:
        return [[(token, 0.4) for token in self.candidates(hidden, [*text], k)] for text in texts]


@pytest.mark.parametrize("layout", [*LAYOUTS, "fewer workers"])
def test_guesses_without_numbers_change_no_token(
    damaged: str, damaged_token: int, expected: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LAYOUTS.get(layout, {"k": 2, "workers": 1, "run_ahead": False, **LOCAL})
    monkeypatch.setattr(worker, "OracleHead", Names)
    right = expected[: expected.index(damaged_token)]
    runtime = PPDRuntime(damaged, dtype="float32", **settings)
    runtime._specs = [replace(spec, exit_head=Names(damaged_token, (*PROMPT, *right))) for spec in runtime._specs]
    with runtime:
        assert runtime.generate(PROMPT, max_new_tokens=len(right), ignore_eos=True).token_ids == right


def test_drafts_without_numbers_change_no_token(
    damaged: str,
    damaged_token: int,
    expected: tuple[int, ...],
    ways: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their numbers come into those of the tokens before them, where a mask multiplies them by 0."""
    drafted = []
    for rule in (SharedNoise, RejectionSampling):
        propose = rule.propose

        def named(self: Any, logits: Tensor, history: list[int], most: int = 1, propose: Any = propose) -> Any:
            drafted.append(len(history))
            first, *others = propose(self, logits, history, most)
            return [replace(first, token=damaged_token, distribution=None), *others]

        monkeypatch.setattr(rule, "propose", named)
    right = expected[: expected.index(damaged_token)]
    for way in (*METHODS, KANGAROO):
        with open_method(damaged, dtype="float32", **ways[way]) as method:
            result = method.generate(PROMPT, max_new_tokens=len(right), ignore_eos=True)
            assert result.token_ids == right, way
            assert drafted
            drafted.clear()


def test_its_end_comes_whatever_is_lost(
    damaged: str, damaged_token: int, expected: tuple[int, ...], hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [*expected[: expected.index(damaged_token) + 1]]
    for layout in ("k=2", "three stages"):
        fate = Fate(SEED, lost=0.1, doubled=0.1, stale=0.1)
        monkeypatch.setattr(ppd_runtime.launch.startup, "LocalWorkers", chaos(fate))
        with PPDRuntime(damaged, dtype="float32", **LAYOUTS[layout]) as runtime:
            for _ in range(2):
                tokens, error = told(runtime, PROMPT)
                assert tokens == before
                assert f"position {len(PROMPT) + len(before)} " in error
        assert fate.happened["lost"]


class Failing:
    """A processor that fails on texts that are not the beginning of one."""

    def __init__(self, text: tuple[int, ...]) -> None:
        self.text, self.failed = text, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        known = tuple(input_ids[0].tolist())
        if known != self.text[: len(known)]:
            self.failed += 1
            raise KeyError(known)
        return scores


@pytest.mark.parametrize("way", WAYS)
def test_a_processor_that_fails_ends_its_request_alone(folder: Path, expected: tuple[int, ...], way: str) -> None:
    """And where it fails on a guess, nobody's."""
    if way == "rejection sampling":
        expected = ()
    with open_method(str(folder), dtype="float32", **WAYS[way]) as method:
        whole = Failing((*PROMPT, *expected))
        if expected:
            for _ in range(50 if way in GUESSING else 1):  # wrong guesses that come too late are asked nothing
                result = method.generate(PROMPT, max_new_tokens=20, ignore_eos=True, logits_processors=whole)
                assert result.token_ids == expected[:20]
                if whole.failed:
                    break
            assert whole.failed or way not in GUESSING, "guesses are its business too"
        for text in ((*PROMPT, *expected[:3]), ()):
            with pytest.raises(RequestError, match=r"logits_processors: .*Failing.* raised KeyError"):
                method.generate(PROMPT, max_new_tokens=20, ignore_eos=True, logits_processors=Failing(text))
        assert len(method.generate(PROMPT, max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_processors_that_leave_no_score_are_named(ordinary: OrdinaryDecoding, number: float) -> None:
    def spoil(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, number)

    for settings in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}):
        with pytest.raises(RequestError, match="logits_processors and penalties leave no finite score for position 4"):
            ordinary.generate(PROMPT, max_new_tokens=2, logits_processors=spoil, **settings)
