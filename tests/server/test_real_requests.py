"""Requests as clients' own programs write them (`tests/real_files/requests.jsonl`): a report is a line there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import HERMES, Running, running

from ppd_runtime import OrdinaryDecoding

FILE = Path(__file__).parents[1] / "real_files" / "requests.jsonl"
LINES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]

SHORT = {"request_timeout_s": 0.05}
"""Where a request names no number of tokens."""

MEMBERS = {"/v1/responses": "output", "/v1/messages": "content", "/v1/messages/count_tokens": "input_tokens"}
"""What an answer's contents are called where they are no choices."""
NAMED_EVENTS = {
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": ("event: message_stop",),
}
"""The last event of a stream, by paths whose events have names."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("templates") / "chat.jinja"
    template.write_text(HERMES)
    with running(OrdinaryDecoding("demo"), chat_template=template, served_model_name="tiny", **SHORT) as found:
        yield found


@pytest.mark.parametrize("line", LINES, ids=[line["name"] for line in LINES])
def test_a_clients_request_is_answered_or_refused_by_its_field(server: Running, line: dict[str, Any]) -> None:
    answer = server.post(line["path"], **line["body"])
    assert answer.status_code == line["status"], answer.text
    if "error" in line:
        assert line["error"] in answer.json()["error"]["message"]
    elif line["body"].get("stream") and line["path"] in NAMED_EVENTS:
        events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
        assert all(f"event: {json.loads(data.removeprefix('data: '))['type']}" == name for name, data in events)
        assert events[-1][0] in NAMED_EVENTS[line["path"]]
    elif line["body"].get("stream"):
        *events, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events)
    else:
        assert answer.json()[MEMBERS.get(line["path"], "choices")]


def test_each_line_has_a_name_of_its_own_and_what_is_refused_is_named() -> None:
    assert len({line["name"] for line in LINES}) == len(LINES)
    assert all(("error" in line) == (line["status"] != 200) for line in LINES)
