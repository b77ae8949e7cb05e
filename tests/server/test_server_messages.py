"""Anthropic's `/v1/messages`: texts, tools, thinking, streams, counts, keys, and what is refused."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import HERMES, Running, running
from written_replies import Written

from ppd_runtime import OrdinaryDecoding

WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
REPLY = (
    "<think>Hm, \nso.</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n<tool_call>{"name": "weather"}</tool_call>'
)
USER = {"role": "user", "content": "Weather?"}


@pytest.fixture(scope="module")
def server(writing_server: Running) -> Running:
    return writing_server


def ask(server: Running, **settings: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "max_tokens": 300, "messages": [USER], "tools": [WEATHER], **settings}
    return server.post("/v1/messages", **asked).json()


def events(server: Running, **settings: Any) -> list[dict[str, Any]]:
    """A stream's events, whose names are their types."""
    asked = {"max_tokens": 300, "messages": [USER], "tools": [WEATHER], "stream": True, **settings}
    found = []
    for text in server.post("/v1/messages", **asked).text.strip().split("\n\n"):
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


CONTENT = [
    {"type": "thinking", "thinking": "Hm, \nso.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Zürich"}},
    {"type": "tool_use", "name": "weather", "input": {}},
]


def test_a_message_has_thinking_text_and_calls(server: Running, written: Written) -> None:
    written.replies = deque([REPLY])
    answer = ask(server, system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}])
    assert without_ids(answer["content"]) == CONTENT
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens"] == len(written.tokenizer.encode(REPLY, add_special_tokens=False)) + 1
    assert "system: Be kind." in written.prompts[-1]


def test_a_stream_tells_the_same(server: Running, written: Written) -> None:
    written.replies = deque([REPLY])
    told = events(server)
    assert [event["type"] for event in told[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    blocks: dict[int, dict[str, Any]] = {}
    for event in told:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "input": ""}
        elif event["type"] == "content_block_delta":
            kind, *_, text = event["delta"].values()
            name = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "input"}[kind]
            blocks[event["index"]][name] += text
    made = [
        {
            name: json.loads(value) if name == "input" else value
            for name, value in block.items()
            if value or name != "input"
        }
        for block in blocks.values()
    ]
    assert without_ids(made) == CONTENT
    assert sum(event["type"] == "content_block_stop" for event in told) == 4
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] > 20


def test_results_of_calls_go_back_to_the_model(server: Running, written: Written) -> None:
    written.replies = deque([REPLY, "Sunny."])
    content = ask(server)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
        for block in content
        if block["type"] == "tool_use"
    ]
    turns = [USER, {"role": "assistant", "content": content}]
    answer = ask(server, messages=[*turns, {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}])
    assert without_ids(answer["content"]) == [{"type": "text", "text": "Sunny."}]
    assert answer["stop_reason"] == "end_turn"
    prompt = written.prompts[-1]
    assert prompt.index("I look.<tool_call>") < prompt.index("tool: sunny") < prompt.index("user: And?")


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_text_ended(server: Running, written: Written, stream: bool) -> None:
    def reason(**settings: Any) -> tuple[str, str | None]:
        told = events(server, **settings)[-2]["delta"] if stream else ask(server, **settings)
        return told["stop_reason"], told["stop_sequence"]

    written.replies = deque(["One two three four."])
    assert reason() == ("end_turn", None)
    assert reason(max_tokens=3) == ("max_tokens", None)
    assert reason(stop_sequences=["four", "two three", "three"]) == ("stop_sequence", "two three")
    written.replies = deque(['<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'])
    assert reason(max_tokens=30) == ("max_tokens", None)


def test_arguments_that_are_cut_short_are_no_call(server: Running, written: Written) -> None:
    written.replies = deque(['<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'])
    size = len(written.tokenizer.encode('<tool_call>{"name": "weather", "arguments": {"cit', add_special_tokens=False))
    (block,) = ask(server, max_tokens=size)["content"]
    assert (block["type"], block["text"].startswith('weather: {"')) == ("text", True)


def test_choices_of_tools(server: Running, written: Written) -> None:
    written.replies = deque([REPLY])
    assert ask(server, tool_choice={"type": "none"})["content"][1]["text"].startswith("I look.\n<tool_call>")
    one = ask(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]


def test_thinking_is_a_variable_of_the_template(written: Written, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ 'off' if enable_thinking is false else 'on' }}{{ messages[0].content }}")
    written.replies = deque(["Yes."])
    with running(written, chat_template=template) as server:
        for thinking, expected in (({"type": "disabled"}, "off"), ({"type": "enabled", "budget_tokens": 99}, "on")):
            assert "content" in ask(server, model=None, tools=None, thinking=thinking)
            assert written.prompts[-1].startswith(expected)


def test_a_text_has_the_form_of_a_schema(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(HERMES.replace("<think>", ""))
    form = {"type": "json_schema", "schema": {"enum": ["Zug", "Bern"]}}
    with running(
        OrdinaryDecoding(model_folder("llama", num_layers=2)), chat_template=tmp_path / "chat.jinja"
    ) as server:
        answer = ask(server, model=None, tools=None, max_tokens=50, output_config={"format": form, "effort": "low"})
    assert answer["content"][0]["text"] in ('"Zug"', '"Bern"')


def test_tokens_are_counted(server: Running, written: Written) -> None:
    written.replies = deque(["Yes."])
    asked = {"model": "tiny", "messages": [USER], "tools": [WEATHER]}
    count = server.post("/v1/messages/count_tokens", **asked).json()
    assert count == {"input_tokens": ask(server)["usage"]["input_tokens"]}


def test_keys_come_as_anthropics_clients_send_them(written: Written, hermes: Path) -> None:
    written.replies = deque(["Yes."])
    with running(written, key="secret", chat_template=hermes) as server:
        server.headers = {"x-api-key": "secret"}
        assert ask(server, model=None)["content"] == [{"type": "text", "text": "Yes."}]
        for headers in ({"x-api-key": "wrong"}, {"authorization": "Bearer wrong", "x-api-key": "secret"}, {}):
            server.headers = headers
            answer = ask(server)
            assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens"),
        ({"messages": []}, "messages", "messages=[]"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "messages.0.role='robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "which is no text"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages", "messages.0.content"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]},
            "messages",
            "give an object",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages",
            "the call 'x', which no message before it made",
        ),
        ({"system": [{"type": "image"}]}, "system", "system has a block {'type': 'image'}"),
        ({"tools": [{"input_schema": {}}]}, "tools", "tools: number 0 has no name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "the server has no such tool"),
        ({"tool_choice": {"type": "some"}}, "tool_choice", "tool_choice.type='some'"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "'f': is no tool of the request"),
        ({"thinking": {"type": "deep"}}, "thinking", "thinking.type='deep'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config", "give the type json_schema and a schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config", "output_config: json_schema={"),
        ({"container": "c"}, "container", "does not support it"),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(server: Running, settings: dict, param: str, message: str) -> None:
    answer = ask(server, **settings)
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert (answer["error"]["param"], message in answer["error"]["message"]) == (param, True), answer


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_that_json_cannot_hold_are_text(server: Running, written: Written, number: str) -> None:
    written.replies = deque([f'<tool_call>{{"name": "weather", "arguments": {{"city": {number}}}}}</tool_call>'])
    answer = ask(server)
    assert answer["content"] == [{"type": "text", "text": f'weather: {{"city": {number}}}'}]
    assert answer["stop_reason"] == "end_turn"
