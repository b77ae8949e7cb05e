"""What the server's fields have in common with the library's settings."""

import pytest

from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.server.requests import Sampling


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", (0, 1e-6, 1.0), (-0.1,)),
        ("top_p", (1e-9, 1), (0, 1.001)),
        ("top_k", (-1, 0, 2**31 - 1), (-2, 2**31)),
        ("min_p", (0, 1), (-0.001, 1.001)),
        ("repetition_penalty", (1e-9, 1.5), (0, -1)),
        ("presence_penalty", (-2, 2), (-2.001, 2.001)),
        ("frequency_penalty", (-2, 2), (-2.001, 2.001)),
        ("stop_token_ids", ([], [1] * 1000), ([1] * 1001,)),
    ],
)
def test_both_refuse_the_same_values(name: str, inside: tuple, outside: tuple) -> None:
    """The server's ranges stand in its schema as well; what they let through reaches `SamplingParams`."""
    for value in inside:
        assert getattr(Sampling(**{name: value}).sampling(1, 1.0), name) == _as_params(name, value)
    for value in outside:
        with pytest.raises(ValueError, match=name):
            Sampling(**{name: value})
        with pytest.raises(ValueError, match=name):
            _as_params(name, value)


def _as_params(name: str, value: object) -> object:
    return getattr(SamplingParams(**{name: tuple(value) if isinstance(value, list) else value}), name)
