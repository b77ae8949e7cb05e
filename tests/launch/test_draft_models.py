"""`drafter=MODEL`: tokens are ordinary decoding's whatever a smaller model names, and its right names are hits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from gguf_files import write_model

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models import named_drafter
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.draft_model import DraftModel, DraftModelInfo
from ppd_runtime.models.stage.emulation import EmulatedDevice

ModelFolder = Callable[..., Path]
PROMPT = "the quick brown fox"
SLOW = EmulatedDevice(4.0)
"""Beside which a draft takes no time."""
WAYS = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 3}}


@pytest.fixture(params=["right", "other", "gguf", "int4"])
def drafter(request: pytest.FixtureRequest, model_folder: ModelFolder, folder: str, tmp_path: Path) -> str:
    """The model itself, which is always right; another one; and the model in few bits."""
    if request.param == "right":
        return folder
    if request.param == "other":
        return str(model_folder("mistral", num_layers=2, seed=5))
    if request.param == "gguf":
        return str(write_model(tmp_path / "few.gguf", Path(folder), "Q8_0"))
    quantise_model(folder, tmp_path / "few", "int4")
    return str(tmp_path / "few")


@pytest.mark.parametrize(
    "settings",
    [
        {"stages": 1, "rows": 4},
        {"stages": 2, "transport": "local"},
        {"stages": 2, "launcher": "processes", "guess_vocab": 290, "exit_head": "shared"},
    ],
    ids=["one", "threads", "processes"],
)
def test_tokens_are_ordinary_decodings(
    folder: str, ordinary: OrdinaryDecoding, drafter: str, settings: dict[str, Any]
) -> None:
    with PPDRuntime(folder, drafter=drafter, speculation="always", emulate=SLOW, **settings) as runtime:
        for sampling in WAYS.values():
            asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
            assert runtime.generate(PROMPT, **asked).token_ids == ordinary.generate(PROMPT, **asked).token_ids
        prompts = ["the", "a", "I"]
        expected = [ordinary.generate(prompt, max_new_tokens=12).token_ids for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            found = pool.map(lambda prompt: runtime.generate(prompt, max_new_tokens=12).token_ids, prompts)
            assert list(found) == expected


def hits(folder: str, **settings: Any) -> int:
    """Tokens of 24 that were guessed."""
    with PPDRuntime(folder, speculation="always", emulate=SLOW, rows=4, **settings) as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        assert isinstance(runtime._specs[runtime.layout.guesser].drafter, DraftModelInfo)
        return result.stats.hits


@pytest.mark.parametrize("stages", [1, 2])
def test_right_names_are_hits(folder: str, model_folder: ModelFolder, stages: int) -> None:
    """From the first token on: the draft model reads the prompt. Of four tokens of a pass three are its rows."""
    settings = {"stages": stages, "transport": "local", "repetitions": False}
    if stages == 2:
        settings["exit_head"] = "shared"
    right = hits(folder, drafter=folder, **settings)
    assert right >= 8  # of 18 where no draft is late
    assert hits(folder, drafter=str(model_folder("llama", num_layers=1, seed=9)), **settings) < right


@pytest.mark.parametrize("fails", ["begin", "follow", "draft", "another", "the weights"])
@pytest.mark.parametrize("stages", [1, 2])
def test_one_that_fails_costs_no_token(
    folder: str,
    ordinary: OrdinaryDecoding,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stages: int,
    fails: str,
) -> None:
    settings = {"stages": stages, "transport": "local", "speculation": "always", "rows": 4}
    expected = ordinary.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    if fails == "the weights":
        monkeypatch.setattr(named_drafter, "load_draft_model", failing)
    with PPDRuntime(folder, drafter=folder, **settings) as runtime:
        if fails != "the weights":
            monkeypatch.setattr(DraftModel, fails, failing)
        for _ in range(2):
            assert runtime.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == expected
    assert [message for message in caplog.messages if "drafter" in message] == [
        "no drafter guesses, for it cannot be loaded: RuntimeError: no room"
        if fails == "the weights"
        else "the drafter fails, and is asked no more where it does: RuntimeError: no room"
    ]


def failing(*arguments: Any) -> NoReturn:
    raise RuntimeError("no room")


def test_a_draft_model_needs_stages_and_the_vocabulary(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drafter=demo: is for the staged layout"):
        PPDRuntime(folder, k=1, drafter="demo")
    with pytest.raises(ValueError, match="drafter='demo': has another vocabulary than model"):
        PPDRuntime(folder, stages=1, drafter="demo")
    with pytest.raises(ValueError, match="no folder that `ppd adapt` wrote, head .*, or model that can draft: model"):
        PPDRuntime(folder, stages=2, drafter=tmp_path)
