"""Chats with tools and thinking, asked for by OpenAI's own client: what the model is told, what the answer says."""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import DEADLINE_S, HERMES, TEMPLATE, Running, running
from written_replies import Written

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.async_runtime import AsyncDecoding

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
BAD = {"type": "object", "properties": {"a": {"type": "nothing"}}}
TIME = {"type": "function", "function": {"name": "time"}}
USER = {"role": "user", "content": "How is it in Zürich?"}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time"}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(writing_server: Running) -> Running:
    return writing_server


def chat(client: openai.OpenAI, **settings: Any) -> Any:
    asked = {"model": "tiny", "messages": [USER], "tools": [WEATHER, TIME], "max_tokens": 200, **settings}
    return client.chat.completions.create(**asked)


def made(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_an_answer_with_calls(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([CALLS])
    (choice,) = chat(client).choices
    assert made(choice.message) == [("weather", '{"city": "Zürich"}'), ("time", "{}")]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert {call.type for call in choice.message.tool_calls} == {"function"}
    assert len({call.id for call in choice.message.tool_calls}) == 2
    prompt = written.prompts[-1]
    assert json.dumps(WEATHER["function"]["name"]) in prompt
    assert '"time"' in prompt


def test_a_streams_deltas_make_the_same_message(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([CALLS])
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[WEATHER, TIME], max_tokens=200) as stream:
        events = list(stream)
        (choice,) = stream.get_final_completion().choices
    assert made(choice.message) == [("weather", '{"city": "Zürich"}'), ("time", "{}")]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert len([event for event in events if event.type == "tool_calls.function.arguments.delta"]) > 3
    chunks = list(chat(client, stream=True))
    tokens = [chunk for chunk in chunks if chunk.choices[0].finish_reason is None][1:]
    assert len(tokens) == len(written.tokenizer.encode(CALLS, add_special_tokens=False)) + 1, "an event for each token"


def test_a_result_goes_back_to_the_model(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([CALLS, "Sunny."])
    message = chat(client).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    answer = chat(client, messages=[USER, message, *results]).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("Sunny.", None, "stop")
    assert "tool: sunny" in written.prompts[-1]
    assert "<tool_call>" in written.prompts[-1]


def test_a_call_that_is_cut_short_says_so(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque(['<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}'])
    size = len(written.tokenizer.encode('<tool_call>{"name": "weather", "arguments": {"ci', add_special_tokens=False))
    for stream in (False, True):
        answer = chat(client, max_tokens=size, stream=stream)
        reason = list(answer)[-1].choices[0].finish_reason if stream else answer.choices[0].finish_reason
        assert reason == "length"


def test_one_call_is_told_where_one_is_wanted(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([CALLS])
    answer = chat(client, parallel_tool_calls=False)
    assert made(answer.choices[0].message) == [("weather", '{"city": "Zürich"}')]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens < chat(client).usage.completion_tokens, "the text ends behind the call"


def test_choices_have_calls_of_their_own(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque(["No.", CALLS])
    answer = chat(client, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "tool_calls"]
    written.replies = deque(["No.", CALLS])
    reasons = [chunk.choices[0].finish_reason for chunk in chat(client, n=2, stream=True)]
    assert sorted(filter(None, reasons)) == ["stop", "tool_calls"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "place"}}])
def test_a_call_can_be_required_of_any_model(
    model_folder: Callable[..., Path], tmp_path: Path, choice: str | dict[str, Any]
) -> None:
    (tmp_path / "chat.jinja").write_text(HERMES)
    cities = {"type": "object", "properties": {"city": {"enum": ["Zug", "Zürich"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "place", "parameters": cities}}
    asked = {"messages": [USER], "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}
    plain = OrdinaryDecoding(model_folder("llama", num_layers=2, max_position_embeddings=2048))
    with (
        running(plain, chat_template=tmp_path / "chat.jinja", served_model_name="tiny") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0) as client,
    ):
        (whole,) = client.chat.completions.create(model="tiny", **asked).choices
        with client.chat.completions.stream(model="tiny", **asked) as stream:
            (streamed,) = stream.get_final_completion().choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    ((name, arguments),) = made(whole.message)
    assert (name, json.loads(arguments)["city"] in ("Zug", "Zürich")) == ("place", True)
    assert made(streamed.message) == [(name, arguments)]
    assert streamed.finish_reason == "tool_calls"


def test_without_a_choice_of_tools_their_marks_are_text(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([CALLS])
    for settings in ({"tool_choice": "none"}, {"tools": []}):
        message = chat(client, **settings).choices[0].message
        assert (message.content, message.tool_calls) == (CALLS, None)
        assert "<tools>" not in written.prompts[-1]


@pytest.mark.parametrize("is_open", [False, True])
def test_thinking_is_split_off(client: openai.OpenAI, written: Written, is_open: bool) -> None:
    reply = "Hm, \nso.\n</think>\n\nSunny. \n"
    written.replies = deque([reply if is_open else f"<think>\n{reply}"])
    asked = {"tools": [], "extra_body": {"chat_template_kwargs": {"thinks": is_open}}}
    message = chat(client, **asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, \nso.", "Sunny. \n")
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True, **asked)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, \nso."
    assert "".join(delta.content or "" for delta in deltas) == "Sunny. \n"


def test_thinking_stays_where_it_is_not_looked_for(written: Written, tmp_path: Path) -> None:
    written.replies = deque(["<think>Hm.</think>Yes."])
    template = tmp_path / "chat.jinja"
    for text, parser in ((HERMES, "none"), (TEMPLATE, "auto")):
        template.write_text(text)
        with running(written, chat_template=template, reasoning_parser=parser) as server:
            message = server.post("/v1/chat/completions", messages=[USER]).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<think>Hm.</think>Yes.", "refusal": None}


def test_a_form_can_be_named(written: Written, tmp_path: Path) -> None:
    written.replies = deque(['[TOOL_CALLS]weather[ARGS]{"city": "Zug"}'])
    template = tmp_path / "chat.jinja"
    template.write_text(HERMES)
    with running(written, chat_template=template, tool_call_parser="mistral") as server:
        answer = server.post("/v1/chat/completions", messages=[USER], tools=[WEATHER]).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Zug"}'}


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools: number 0 has no name: give function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "only functions are known"),
        ({"tools": [5]}, "tools", "tools.0=5"),
        ({"tools": {"a": 1}}, "tools", "tools={'a': 1}"),
        ({"tool_choice": "weather?"}, "tool_choice", "is no tool of the request, give one of time, weather"),
        ({"tool_choice": 5}, "tool_choice", "tool_choice=5"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}]},
            "tools",
            "a call cannot be required, the tools make a grammar that fails",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls='no'"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages", "which no message before"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages", "names no function"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools' is not given in this way"),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(server: Running, settings: dict, param: str, message: str) -> None:
    answer = server.post("/v1/chat/completions", **{"messages": [USER], "tools": [WEATHER, TIME], **settings})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], message in error["message"]) == (400, param, True), error


def test_a_template_that_knows_no_tools_is_named(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    for text, said in ((TEMPLATE, "does not tell it of tools"), (f"{TEMPLATE}{{{{ tools }}}}", "set tool_call_parser")):
        template.write_text(text)
        with running(ordinary, chat_template=template) as server:
            answer = server.post("/v1/chat/completions", messages=[USER], tools=[WEATHER])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
            assert said in answer.json()["error"]["message"]
            asked = {"messages": [USER], "tools": [WEATHER], "tool_choice": "none", "max_tokens": 1}
            assert server.post("/v1/chat/completions", **asked).status_code == 200


def test_tokens_are_counted_with_the_tools(server: Running, written: Written) -> None:
    tokens = [server.post("/tokenize", messages=[USER], **asked).json() for asked in ({}, {"tools": [WEATHER]})]
    assert tokens[1]["count"] > tokens[0]["count"]
    written.replies = deque(["Yes."])
    usage = server.post("/v1/chat/completions", messages=[USER], tools=[WEATHER]).json()["usage"]
    assert usage["prompt_tokens"] == tokens[1]["count"]
    answer = server.post("/tokenize", prompt="a", tools=[WEATHER])
    assert answer.json()["error"]["message"] == "tools: is for messages, leave it out"


def test_the_library_gives_the_same_message(written: Written) -> None:
    written.replies = deque([CALLS])
    result = written.chat([USER], chat_template=HERMES, tools=[WEATHER, TIME], max_new_tokens=200)
    later = asyncio.run(
        AsyncDecoding(written).chat([USER], chat_template=HERMES, tools=[WEATHER, TIME], max_new_tokens=200, n=2)
    )
    for one in (result, *later):
        assert one.text == CALLS
        assert [(call.name, call.arguments) for call in one.message.tool_calls] == [
            ("weather", '{"city": "Zürich"}'),
            ("time", "{}"),
        ]
    told = result.message.to_dict()
    assert told["content"] == "I look."
    assert openai.types.chat.ChatCompletionMessage.model_validate(told).tool_calls[1].function.name == "time"
    assert result.to_dict()["message"] == told
    plain = written.chat([USER], chat_template=TEMPLATE, max_new_tokens=200)
    assert (plain.message.content, plain.message.tool_calls) == (CALLS, ())
    with pytest.raises(ValueError, match="tools: number 0 has no name"):
        written.chat([USER], chat_template=HERMES, tools=[{"type": "function", "function": {}}])
