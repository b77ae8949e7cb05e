"""Compiled forms: requests share what was read by earlier ones, within a bound, and none fails for it."""

import random
import subprocess
import sys

import numpy as np
from heap import in_use, needs_mallinfo2

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.sampling.params import SamplingParams

_REQUESTS, _TOKENS = 40, 60
_MOST_KEPT_MB = 10
"""llguidance's bound on a lexer is 50,000 states, which is 34 MB here: one that all requests share meets it at the
eleventh of them, and fails for good."""


@needs_mallinfo2
def test_what_a_form_keeps_of_texts_is_bounded_and_fails_no_request() -> None:
    info, rng = describe("demo"), random.Random(1)
    params = SamplingParams(regex="(?:.{0,400}a){400}", eos_token_ids=(1,))
    assert constraint_of(info, params, 0) is not None
    before, _ = in_use()
    for _ in range(_REQUESTS):
        found = constraint_of(info, params, 0)
        assert found is not None
        place = found.root
        for _ in range(_TOKENS):
            place = found.after(place, rng.choice(np.flatnonzero(found.allowed(place)).tolist()))
    del found, place
    after, _ = in_use()
    assert after - before < _MOST_KEPT_MB * 10**6


_CHAIN = """
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.sampling.params import SamplingParams

rules = "\\n".join(f"A{number}: A{number + 1}" for number in range(4500))
params = SamplingParams(grammar=f'start: A0\\n{rules}\\nA4500: "a"', eos_token_ids=(1,))
found = constraint_of(describe("demo"), params, 0)
assert found.allowed(found.root).sum() == 1
"""


def test_a_long_chain_of_rules_does_not_end_the_process() -> None:
    assert subprocess.run([sys.executable, "-c", _CHAIN]).returncode == 0
