"""`ppd serve` under load: all kinds of requests at once while workers are killed; short by day, long in the night."""

import os

import pytest
from grids import nightly
from seeds import SEED

from benchmarks import serve_endurance

_FAULTS = int(os.environ.get("PPD_FAULTS", "20"))


def tried(options: str) -> dict:
    found = serve_endurance.measure(serve_endurance.parser().parse_args([*options.split(), "--seed", str(SEED)]))
    print(serve_endurance.table(found))
    assert found["wrong"] == []
    return found


def test_every_request_gets_its_own_text_or_an_honest_error() -> None:
    found = tried("--model random:64x4 --requests 60 --faults 1 --fault-every-s 1 --texts 12 --tokens 16")
    assert found["killed"] + found["stopped"] >= 1
    assert found["right"] >= 12
    assert min(found["bad"], found["client left"]) >= 1


@nightly
@pytest.mark.parametrize("stages", [2, 4])
def test_the_same_for_long(stages: int) -> None:
    found = tried(f"--stages {stages} --minutes 2 --faults {_FAULTS}")
    assert found["killed"] + found["stopped"] >= _FAULTS
