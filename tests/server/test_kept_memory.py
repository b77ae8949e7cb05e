"""What a server keeps of answered and refused requests is bounded: more of them leave no more in use."""

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from heap import in_use, needs_mallinfo2
from servers import Running

Ask = Callable[[int], tuple[str, dict[str, Any]]]
_KINDS: dict[str, Ask] = {
    "good": lambda number: ("completions", {"prompt": f"a {number}"}),
    "a form": lambda number: ("completions", {"prompt": "a", "guided_regex": f"[a-z]{{1,20}}{number}"}),
    "a form that is none": lambda number: ("completions", {"prompt": "a", "guided_regex": f"[{number}"}),
    "an unknown field": lambda number: ("completions", {"prompt": "a", f"x{number}": number}),
    "a chat": lambda number: ("chat/completions", {"messages": [{"role": "user", "content": f"{number}"}]}),
    "an odd role": lambda number: ("chat/completions", {"messages": [{"role": f"x{number}", "content": "a"}]}),
}
_WARM = 70
"""More than each of the tables for forms has."""
_WINDOWS, _REQUESTS = 3, 30
_LONG = "x" * 4000
"""In each body: whoever keeps one keeps this."""
_MOST_BYTES, _MOST_BLOCKS = 1000, 1
"""What a request may leave: of C's heap, and of small objects of Python's, which that does not count."""


@needs_mallinfo2
@pytest.mark.parametrize("kind", _KINDS)
def test_what_is_kept_is_bounded(server: Running, kind: str) -> None:
    """Tables that fill up grow in some windows; what is kept of each request grows in all."""

    def ask(numbers: range) -> tuple[int, int]:
        for number in numbers:
            path, body = _KINDS[kind](10**6 + number)
            settings = {"max_tokens": 2, "temperature": 0, "user": f"{number}{_LONG}"}
            answer = client.post(f"/v1/{path}", json={**settings, **body})
            assert answer.status_code in (200, 400), answer.text
        return in_use()

    gc.freeze()  # what is there already need not be looked through
    with server.client() as client:
        held = [ask(range(_WARM))]
        for window in range(_WINDOWS):
            begin = _WARM + window * _REQUESTS
            held.append(ask(range(begin, begin + _REQUESTS)))
    gc.unfreeze()
    more = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(held)]
    assert min(size for size, _ in more) < _REQUESTS * _MOST_BYTES, more
    assert min(blocks for _, blocks in more) <= _REQUESTS * _MOST_BLOCKS, more
