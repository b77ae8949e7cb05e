"""`/v1/responses`, asked for by OpenAI's own client: texts, tools, thinking, streams, and what is refused."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from servers import DEADLINE_S, HERMES, Running, running
from written_replies import Written

from ppd_runtime import OrdinaryDecoding

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
REPLY = (
    "<think>Hm, \nso.</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n<tool_call>{"name": "weather"}</tool_call>'
)


@pytest.fixture(scope="module")
def server(writing_server: Running) -> Running:
    return writing_server


def ask(client: openai.OpenAI, **settings: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "Weather?", "tools": [WEATHER], **settings})


def parts(response: Response) -> list[Any]:
    """A response's items, without their ids."""
    told = {
        "reasoning": lambda item: item.content[0].text,
        "message": lambda item: item.content[0].text,
        "function_call": lambda item: (item.name, item.arguments),
    }
    return [(item.type, told[item.type](item)) for item in response.output]


ITEMS = [
    ("reasoning", "Hm, \nso."),
    ("message", "I look."),
    ("function_call", ("weather", '{"city": "Zürich"}')),
    ("function_call", ("weather", "{}")),
]


def test_a_response_has_thinking_text_and_calls(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([REPLY])
    response = ask(client, instructions="Be kind.", temperature=0.5, metadata={"a": "b"}, store=True)
    assert parts(response) == ITEMS
    assert (response.status, response.output_text, response.store) == ("completed", "I look.", False)
    assert (response.instructions, response.temperature, response.metadata) == ("Be kind.", 0.5, {"a": "b"})
    assert response.tools[0].name == "weather"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert written.prompts[-1].index("system: Be kind.") < written.prompts[-1].index("user: Weather?")
    Response.model_validate(response.to_dict(), strict=False)


def test_a_stream_tells_the_same_in_order(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([REPLY])
    with client.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert parts(response) == ITEMS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert kinds.count("response.function_call_arguments.delta") > 3
    assert kinds.count("response.output_text.delta") > 1
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in response.output]
    raw = list(ask(client, stream=True))
    assert parts(raw[-1].response) == ITEMS


def test_a_conversation_goes_on_with_its_items(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([REPLY, "It is sunny."])
    first = ask(client)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    user = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    second = ask(client, input=[user, *first.output, *results])
    assert second.output_text == "It is sunny."
    prompt = written.prompts[-1]
    assert prompt.count("assistant:") == 2, "the answer's items are one message"
    assert "I look.<tool_call>" in prompt
    assert prompt.count("tool: sunny") == 2


def test_a_text_that_is_cut_short_says_so(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque(["One two three four five six seven eight nine ten."])
    response = ask(client, max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 4
    assert list(ask(client, max_output_tokens=4, stream=True))[-1].type == "response.incomplete"


class City(BaseModel):
    name: Literal["Zug", "Bern"]


def test_a_text_has_the_form_of_a_class(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(HERMES.replace("<think>", ""))
    with (
        running(OrdinaryDecoding(model_folder("llama", num_layers=2)), chat_template=tmp_path / "chat.jinja") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0) as client,
    ):
        model = client.models.list().data[0].id
        response = client.responses.parse(model=model, input="A city", text_format=City, max_output_tokens=100)
    assert isinstance(response.output_parsed, City)
    assert response.text.format.type == "json_schema"


def test_nothing_is_an_empty_text(client: openai.OpenAI, written: Written) -> None:
    written.replies = deque([""])
    assert parts(ask(client)) == [("message", "")]
    assert parts(list(ask(client, stream=True))[-1].response) == [("message", "")]


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses, send the whole"),
        ({"conversation": "conv_1"}, "conversation", "stores no responses"),
        ({"prompt": {"id": "p"}}, "prompt", "no prompts of its own"),
        ({"background": True}, "background", "does not support it"),
        ({"include": ["message.output_text.logprobs"]}, "include", "is not there to be included"),
        ({"text": {"format": {"type": "xml"}}}, "text", "text: type='xml', choose one of text, json_object"),
        ({"text": {"format": "xml"}}, "text", "text.format='xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "give an object with a schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text", "text: "),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools: number 0 is {'type': 'web_search'}"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools", "tools: number 0 has no name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f': is no tool of the request"),
        ({"input": []}, "input", "input=[]"),
        ({"input": 5}, "input", "input=5"),
        ({"input": [5]}, "input", "input=[5]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input", "role='robot'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "which is no text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "stores no responses"),
        ({"input": [{"type": "computer_call"}]}, "input", "of type 'computer_call', known are message"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input", "names no function"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input",
            "no message before it made",
        ),
        ({"max_output_tokens": 10**6}, "input", "max_output_tokens=1000000"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
        ({"max_tokens": 5}, "max_tokens", "does not support it"),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(server: Running, settings: dict, param: str, message: str) -> None:
    answer = server.post("/v1/responses", **{"input": "Hi.", "tools": [WEATHER], **settings})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], message in error["message"]) == (400, param, True), error


def test_another_model_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        ask(client, model="gpt-5")
