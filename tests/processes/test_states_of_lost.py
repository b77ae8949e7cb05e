"""What unusual layers keep: a lost process' successor has it again, and the text is ordinary decoding's."""

from pathlib import Path
from typing import Any

import pytest
from families.specimens import UNUSUAL
from grids import nightly
from models_for_tests import build_tokenizer
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime

PROMPT = [3, 17, 5, 60, 33]
ASKED: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.9, "seed": 3}
SETTINGS: dict[str, Any] = {"dtype": "float32", "launcher": "processes", "compile": False}
STAGES = {"stages": 3, "k": 2, "rows": 2}
PAPER = {"k": 2, "exit_layer": 2, "speculation": "always"}


BY_DAY = "qwen3_next", "falcon_h1", "gemma4_text"
MODELS = [one if one.family in BY_DAY else pytest.param(one, marks=nightly) for one in UNUSUAL]


@pytest.fixture(scope="module", params=MODELS, ids=lambda specimen: specimen.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    place: Path = tmp_path_factory.mktemp("model")
    request.param.build().save_pretrained(place)
    build_tokenizer().save_pretrained(place)
    return str(place)


@pytest.mark.parametrize(
    ("layout", "lost"),
    [(STAGES, ("stage-1", "stage-3", "stage-2")), (PAPER, ("main", "sub-1"))],
    ids=["stages", "paper"],
)
def test_a_killed_process_has_a_successor(folder: str, layout: dict[str, Any], lost: tuple[str, ...]) -> None:
    expected = OrdinaryDecoding(folder, dtype="float32", compile=False).generate(PROMPT, **ASKED).token_ids
    with PPDRuntime(folder, **layout, **SETTINGS) as runtime:
        for number, name in enumerate(lost):
            stream = runtime.stream(PROMPT, **ASKED)
            tokens = [next(stream).token_id for _ in range(6 + number)]
            worker_processes()[name].kill()
            tokens += [event.token_id for event in stream]
            assert tuple(tokens) == expected, name
        assert runtime.generate(PROMPT, **ASKED).token_ids == expected
        assert runtime.restarts
