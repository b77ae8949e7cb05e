"""Padded passes over slots as recordings, on a GPU that is a stand-in: one serves any rows and any caches."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_operators import CapturedOperators
from models_for_tests import load_stage
from torch import Tensor
from two_gpus import TwoGpus, two_gpus

from ppd_runtime.models.stage import row_probe
from ppd_runtime.models.stage.graphs import Recordings
from ppd_runtime.models.stage.row_attention import ROWS
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.models.stage.trees import TextRows

pytest.importorskip("triton", reason="needs Triton, as `make nightly-kernels` has it")

ModelFolder = Callable[..., Path]
PATHS = [(0,), (1,), (0, 2), (0, 2, 3), (1, 4), (5,), (0, 6)]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoGpus]:
    monkeypatch.setattr(row_probe, "has_kernels", lambda device: True)
    row_probe._kernel_agrees.cache_clear()
    with two_gpus() as both, CapturedOperators(both):
        yield both
    row_probe._kernel_agrees.cache_clear()


def rows_range(model_folder: ModelFolder, recorded: bool, family: str = "llama") -> RowsRange:
    stage = RowsRange(load_stage(model_folder(family, num_layers=2, vocab_size=320)).model)
    stage._rotary._tables = False  # on a GPU the embedding is asked
    stage._recordings = Recordings() if recorded else None
    return stage


def passed(stage: RowsRange, asked: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The states of a pass over so many rows of texts behind prompts of so many tokens, and all of the texts' entries.

    `asked`: each text's prompt and rows.
    """
    texts = list[TextRows]()
    for prompt, rows in asked:
        stage.begin(prompt + ROWS)
        stage.run(0, 2, list(range(40, 40 + prompt)), 0)
        texts.append(TextRows(stage.cache, prompt, PATHS[:rows]))
    ids = list(range(9, 9 + sum(rows for _, rows in asked)))
    states = stage.run_rows([(ids, 0, texts)], 0, 0, 2)
    return [
        states,
        stage.token_logits(states),
        *(part for text in texts for layer in text.cache.layers for part in layer.rows),
    ]


def test_one_recording_serves_any_rows_and_any_caches(
    gpus: TwoGpus, model_folder: ModelFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """With the bits of launched passes, in states, logits and entries."""
    recorded, launched = (rows_range(model_folder, recorded) for recorded in (True, False))
    for asked in ([(5, 1)], [(70, 2), (3, 5)], [(33, 7)], [(9, 1), (66, 1), (20, 3)]):
        assert all(map(torch.equal, passed(recorded, asked), passed(launched, asked)))
    assert len(gpus.graphs) == 2, "one of the pass, one of the head"
    assert gpus.replays == 2 * 5, "one more of each, to try it"
    assert not caplog.records


def test_a_recording_that_does_not_write_its_entries_is_left_out(
    gpus: TwoGpus, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The launched pass has left the right ones there, so the states alone would not tell."""
    from ppd_runtime.models.stage import slot_rows

    recorded, launched = (rows_range(model_folder, recorded) for recorded in (True, False))
    append = slot_rows.append_to_slots

    def forgetful(*given: Any) -> None:
        if not gpus.current_stream().capturing:
            append(*given)

    monkeypatch.setattr(slot_rows, "append_to_slots", forgetful)
    for asked in ([(5, 1)], [(6, 2)]):
        assert all(map(torch.equal, passed(recorded, asked), passed(launched, asked)))
    assert "CUDA graphs are left out: a recording does not give what the pass gave" in caplog.text
    assert len(gpus.graphs) == 1


def test_experts_are_launched(gpus: TwoGpus, model_folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Their code may wait for what rows have chosen, which a recording cannot; the head is recorded."""
    recorded, launched = (rows_range(model_folder, recorded, "mixtral") for recorded in (True, False))
    for asked in ([(5, 1)], [(6, 2)]):
        assert all(map(torch.equal, passed(recorded, asked), passed(launched, asked)))
    assert (len(gpus.graphs), gpus.replays) == (1, 3)
    assert not caplog.records
