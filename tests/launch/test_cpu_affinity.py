"""Which cores threads are given."""

import os

import pytest

from ppd_runtime.launch.cpu_affinity import assign_cores, on_cores


def test_a_thread_stays_on_its_cores_while_the_block_lasts() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), on_cores([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
        assert assign_cores(1, 1) == [(min(before),)]
        assert assign_cores(2, 1) == [(), ()], "one core for two"
        raise KeyError
    assert os.sched_getaffinity(0) == before
