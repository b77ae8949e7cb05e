"""What reports say of the machine and the versions that they were made on."""

import platform

import torch
import transformers

import ppd_runtime
from ppd_runtime.host import available_cores
from ppd_runtime.tune.measured_on import machine, versions


def test_the_processor_and_its_cores_are_named() -> None:
    processor, cores = machine().rsplit(", ", 1)
    assert processor
    assert cores == f"{available_cores()} cores"


def test_versions_are_those_that_run() -> None:
    assert {
        "python": platform.python_version(),
        "ppd-runtime": ppd_runtime.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }.items() <= versions().items()
