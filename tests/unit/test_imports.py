"""Imports that look for no garbage leave the collector as they found it."""

import gc
import subprocess
import sys

import pytest

from ppd_runtime.imports import quick_imports


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_a_worker_starts_with_nothing_heavy_imported():
    slow = "{'torch', 'transformers', 'numpy', 'ray', 'zmq'} & set(sys.modules)"
    code = f"import sys, ppd_runtime.workers.entry; sys.exit(bool({slow}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
