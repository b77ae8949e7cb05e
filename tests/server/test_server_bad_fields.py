"""What mutated requests have found (`tests/processes/test_bad_requests.py`): each is refused by its field."""

import json

import pytest
from servers import Running

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
    ],
)
def test_a_bad_field_is_named(server: Running, path: str, body: dict, param: str) -> None:
    with server.client() as client:  # httpx' own JSON has no NaN
        answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
