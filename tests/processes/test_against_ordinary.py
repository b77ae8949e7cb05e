"""The timing of `ppd demo`: pipelined beside ordinary decoding, in turn."""

from collections.abc import Callable
from pathlib import Path

from busy_cores import busy, cores

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.measure.against_ordinary import compare
from ppd_runtime.measure.machine_load import UNDISTURBED


def test_other_programs_are_noticed_on_the_sub_process_core(model_folder: Callable[..., Path]) -> None:
    """Ordinary decoding runs on the main process' core, which nobody else wants here."""
    folder = str(model_folder("llama"))
    runtime, ordinary = PPDRuntime(folder, k=1, launcher="processes"), OrdinaryDecoding(folder)
    with runtime, ordinary, busy(cores()[:2][-1]):
        found = compare(runtime, ordinary, [[5, 9, 200], [31, 7]], max_new_tokens=9, rounds=2)
    assert found.identical
    assert (found.new_tokens, found.hits + found.misses) == (36, 32)
    assert found.cpu_share is not None
    assert 0 < found.cpu_share < UNDISTURBED
