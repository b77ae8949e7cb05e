"""What the server's fields have in common with the library's settings."""

import pytest
from pydantic import ValidationError

from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.server.errors import invalid, shown
from ppd_runtime.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeRequest


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", (0, 1e-7, 1e-6, 1.0), (-0.1,)),
        ("top_p", (0, 1e-9, 1), (-0.1, 1.001)),
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


_TALK = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("request_type", "body", "field", "most"),
    [
        (ChatRequest, {"messages": [{**_TALK, "content": [5] * 5000}]}, "messages", 2),
        (ChatRequest, {"messages": [{}] * 5000}, "messages", 2),
        (TokenizeRequest, {"messages": [5] * 5000}, "messages", 1),
        (DetokenizeRequest, {"tokens": ["a"] * 5000}, "tokens", 1),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 900}, "stop", 2),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * 900}, "stop_token_ids", 1),
        (CompletionRequest, {f"field_{number}": 1 for number in range(5000)}, None, 1),
    ],
)
def test_a_request_of_many_faults_is_told_its_first(request_type: type, body: dict, field: str, most: int) -> None:
    """A megabyte of them takes seconds to list, and the server answers nobody meanwhile."""
    with pytest.raises(ValidationError) as found:
        request_type(**body)
    assert found.value.error_count() <= most + 1, "one of each form that the field may have"
    told = invalid(found.value.errors())
    assert (told.status, told.param) == (400, field)


def test_a_large_value_is_shown_by_its_beginning() -> None:
    assert shown(["x" * 10**6] * 10**6) == shown(["x" * 10**6] * 7)
    assert len(shown("x" * 10**6)) <= 100
    assert shown({"a": 1}) == "{'a': 1}"


def test_a_truth_is_no_number_that_asks_for_nothing() -> None:
    for value in (True, 2, 1.5):
        with pytest.raises(ValueError, match="best_of"):
            CompletionRequest(prompt="a", best_of=value)
    for value in (1, 1.0):
        assert CompletionRequest(prompt="a", best_of=value).prompts() == ["a"]
