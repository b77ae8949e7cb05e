"""The timing of `ppd demo`: pipelined beside ordinary decoding, in turn."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from busy_cores import busy, cores
from grids import nightly

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.measure.against_ordinary import Comparison, compare
from ppd_runtime.measure.machine_load import UNDISTURBED


@pytest.fixture
def both(model_folder: Callable[..., Path]) -> Iterator[tuple[PPDRuntime, OrdinaryDecoding]]:
    """A runtime by processes and ordinary decoding of the same model."""
    folder = str(model_folder("llama"))
    with (
        PPDRuntime(folder, k=1, launcher="processes", speculation="always") as runtime,
        OrdinaryDecoding(folder) as ordinary,
    ):
        yield runtime, ordinary


def check(runtime: PPDRuntime, ordinary: OrdinaryDecoding) -> Comparison:
    found = compare(runtime, ordinary, [[5, 9, 200], [31, 7]], max_new_tokens=9, rounds=2)
    assert found.identical
    assert (found.new_tokens, found.hits + found.misses) == (36, 32)
    return found


def test_texts_are_compared(both: tuple[PPDRuntime, OrdinaryDecoding]) -> None:
    check(*both)


def test_stages_are_compared_by_their_first_boundaries(model_folder: Callable[..., Path]) -> None:
    folder = str(model_folder("llama"))
    with (
        PPDRuntime(folder, stages=2, k=1, transport="local", speculation="always") as runtime,
        OrdinaryDecoding(folder) as ordinary,
    ):
        found = check(runtime, ordinary)
    assert found.first_boundary == (found.hits, found.misses)
    assert found.predicted_ratio == pytest.approx(1 - found.match_rate / 2)


@nightly
def test_other_programs_are_noticed_on_the_sub_process_core(both: tuple[PPDRuntime, OrdinaryDecoding]) -> None:
    """Ordinary decoding runs on the main process' core, which no other program wants here."""
    runtime, ordinary = both
    runtime.start()
    with busy(cores()[:2][-1]):
        found = check(runtime, ordinary)
    assert found.cpu_share is not None
    assert 0 < found.cpu_share < UNDISTURBED
