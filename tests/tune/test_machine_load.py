"""Load of other programs, beside programs that compute."""

import time

import pytest
from busy_cores import busy, cores

from ppd_runtime.host import UNDISTURBED
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.tune.machine_load import LoadMeter, busy_note


def test_computing_beside_others_is_noticed() -> None:
    load = LoadMeter()
    with busy(cores()[0]), on_cores(cores()[:1]):
        for _ in range(5):
            with load.computing(threads=1):
                end = time.perf_counter() + 0.1
                while time.perf_counter() < end:
                    pass
    assert 0 < load.share < UNDISTURBED


def test_a_probe_notices_a_core_that_this_thread_does_not_use() -> None:
    load = LoadMeter(cores())
    with busy(cores()[-1]), on_cores(cores()[:1]):
        for _ in range(5):
            load.probe()
    assert 0 < load.share < UNDISTURBED


def test_nothing_counted_is_nothing_noticed() -> None:
    load = LoadMeter()
    load.probe()
    assert load.share == 1
    load.add("one", cpu_s=1.5, usable_s=3.0)
    load.add("another", cpu_s=9.0, usable_s=1.0)
    assert load.share == 0.5
    load.add("one", cpu_s=9.0, usable_s=1.0)
    assert load.share == 1


@pytest.mark.parametrize(("share", "noted"), [(0.0, True), (0.9, True), (0.901, False), (1.0, False)])
def test_a_note_names_who_had_too_little(share: float, noted: bool) -> None:
    note = busy_note("Timing", share)
    assert (note is not None) == noted
    if note:
        assert note.startswith(f"Timing had {share:.0%} of the CPU time that it could use: others were computing")
