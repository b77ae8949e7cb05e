"""What mutated requests have found (`tests/processes/test_bad_requests.py`): each is refused by its field."""

import json

import pytest
from servers import Running

from ppd_runtime.request_error import RequestError, no_text
from ppd_runtime.server.forms import Formed

_SAID = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
_DEEP = json.loads("[" * 70 + "]" * 70)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {**_SAID, "thinking": {"type": ["enabled"]}}, "thinking"),
        ("/v1/messages", {**_SAID, "tool_choice": {"type": {}}}, "tool_choice"),
        ("/v1/messages", {**_SAID, "stop_sequences": [""]}, "stop_sequences"),
        ("/v1/responses", {"input": "a", "metadata": {"a": float("nan")}}, "metadata"),
        ("/v1/responses", {"input": "a", "stream": True, "user": [float("inf")]}, "user"),
        ("/v1/responses", {"input": "a", "metadata": _DEEP}, "metadata"),
        ("/v1/chat/completions", {**_SAID, "guided_json": {"properties": {"a": []}}}, "guided_json"),
        ("/v1/chat/completions", {**_SAID, "guided_json": {"maxLength": float("nan")}}, "guided_json"),
        ("/v1/completions", {"prompt": ["a"] * 2000, "n": 2}, "prompt"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": ["a"] * 2000}}, "logit_bias"),
    ],
)
def test_a_bad_field_is_named(server: Running, path: str, body: dict, param: str) -> None:
    with server.client() as client:  # httpx' own JSON has no NaN
        answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, param)
    assert len(told["message"]) < 1000


def test_a_form_that_a_worker_cannot_follow_is_named() -> None:
    """Behind thinking it is part of a grammar that no client has written."""
    fault = no_text("lexer error: too many states")
    told = Formed(guided_regex="a{99999}").form_failed(RequestError(f"grammar: {fault}"))
    assert (told.status, told.param, told.message) == (400, "guided_regex", f"guided_regex: {fault}")
    assert not RequestError("a worker is lost").fault_of_form
