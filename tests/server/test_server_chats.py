"""What clients send the server besides: agents' histories, hints, numbers as 16.0, variables of the template."""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import Running, running

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.server.conversations import ChatMessage
from ppd_runtime.server.left_aside import Hints
from ppd_runtime.server.requests import ChatRequest, CompletionRequest

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message.tool_calls | tojson if"
    " message.tool_calls }}{{ message.tool_call_id }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %} no thought{% endif %}{% endif %}"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "Sunny.", "annotations": [], "reasoning_content": "So it says."},
]


@pytest.fixture(scope="module")
def server(ordinary: OrdinaryDecoding, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("templates") / "chat.jinja"
    template.write_text(TEMPLATE)
    with running(ordinary, chat_template=template) as found:
        yield found


def chat(server: Running, **settings: Any) -> dict[str, Any]:
    """The answer to a greedy chat, or what it is refused with."""
    asked = {"messages": HISTORY, "max_tokens": 4, "temperature": 0, **settings}
    return server.post("/v1/chat/completions", **asked).json()


def told(answer: dict[str, Any]) -> tuple[str | None, str]:
    """Which field is refused, and what is said of it."""
    return answer["error"]["param"], answer["error"]["message"]


OPTIONS = {
    "none": {},
    "a variable": {"chat_template_kwargs": {"enable_thinking": False}},
    "a message to go on with": {"continue_final_message": True, "add_generation_prompt": False},
    "no beginning": {"add_generation_prompt": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_history_is_read_as_the_library_reads_it(server: Running, ordinary: OrdinaryDecoding, name: str) -> None:
    prompt = ordinary.chat_prompt(HISTORY, TEMPLATE, **OPTIONS[name])
    ends = {"none": "assistant:", "a variable": "no thought", "a message to go on with": "Sunny.", "no beginning": "\n"}
    assert prompt.endswith(ends[name])
    expected = ordinary.generate(prompt, add_special_tokens=False, max_new_tokens=4)
    answer = chat(server, **OPTIONS[name])
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    tokens = server.post("/tokenize", messages=HISTORY, **OPTIONS[name]).json()["tokens"]
    assert tokens == list(expected.prompt_ids)


def test_an_answers_message_is_one_of_the_next_request(server: Running) -> None:
    answer = chat(server)["choices"][0]["message"]
    assert "choices" in chat(server, messages=[*HISTORY, answer, {"role": "user", "content": "More."}])


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "leave one of them",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize' is not given in this way"),
        ({"chat_template": TEMPLATE}, "chat_template", "does not support it"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "does not tell it of tools"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "type='structural_tag', choose one of"),
        ({"web_search_options": {}}, "web_search_options", "does not support it"),
        ({"messages": [{"role": "user", "content": [{}] * 5000}]}, "messages", "is no text"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages", "has audio"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "messages.0.role='robot'"),
    ],
)
def test_what_would_change_the_text_and_cannot_is_refused(
    server: Running, settings: dict, param: str, message: str
) -> None:
    named, said = told(chat(server, **settings))
    assert (named, message in said) == (param, True), said


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("name", Hints.model_fields)
def test_hints_are_taken_whatever_they_hold(request_type: type, name: str) -> None:
    asked = {"messages": HISTORY} if request_type is ChatRequest else {"prompt": "a"}
    for value in (True, "high", {"a": "b"}, None):
        request_type(**asked, **{name: value})


def test_the_guide_sorts_every_field_of_openais() -> None:
    """A client's new field fails here until it is decided on."""
    guide = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    rows = defaultdict[str, set[str]](set)
    for kind, names in re.findall(r"^\| (applied|taken|refused)\b(.*)", guide, re.MULTILINE):
        rows[kind] |= set(re.findall(r"`(\w+)`", names))
    resources = openai.resources.chat.completions.Completions, openai.resources.completions.Completions
    of_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    sent = {name for one in resources for name in inspect.signature(one.create).parameters} - of_client
    assert sent <= rows["applied"] | rows["taken"] | rows["refused"]
    assert rows["taken"] == set(Hints.model_fields)
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert rows["applied"] == known - rows["taken"] - {"ppd"} | {"continuous_usage_stats"}
    assert not rows["refused"] & known


WHOLE = {"max_tokens": 4.0, "n": 2.0, "seed": 7.0, "top_k": 20.0, "stop_token_ids": [5.0, 6]}


@pytest.mark.parametrize("chats", [False, True])
def test_whole_numbers_are_taken_however_they_are_written(server: Running, chats: bool) -> None:
    path, asked = ("/v1/chat/completions", {"messages": HISTORY}) if chats else ("/v1/completions", {"prompt": [5, 9]})
    counts = {"top_logprobs": 2.0, "logprobs": True} if chats else {"logprobs": 2.0}
    whole = {name: [*map(int, value)] if isinstance(value, list) else int(value) for name, value in WHOLE.items()}
    assert (found := server.post(path, **asked, **WHOLE, **counts)).status_code == 200, found.text
    expected = server.post(path, **asked, **whole, **{name: type(value)(value) for name, value in counts.items()})
    assert _texts(found.json()) == _texts(expected.json())
    for name, value in {**WHOLE, **counts}.items():
        if type(value) is float:
            answer = server.post(path, **{**asked, **counts, name: value + 0.5}).json()
            assert told(answer)[0] == name


def _texts(answer: dict[str, Any]) -> list[Any]:
    return [(choice.get("text"), choice.get("message"), choice["logprobs"]) for choice in answer["choices"]]


def test_token_ids_may_be_written_so_too(server: Running) -> None:
    prompts = [[5, 9], [7, 8]]
    texts = [
        _texts(server.post("/v1/completions", prompt=given, max_tokens=3, temperature=0).json())
        for given in (prompts, [[5.0, 9.0], [7, 8.0]])
    ]
    assert texts[0] == texts[1]
    assert server.post("/detokenize", tokens=[5.0, 9]).json() == server.post("/detokenize", tokens=[5, 9]).json()
    for wrong in ([5.5], [[5.5]], [1e300]):
        answer = server.post("/v1/completions", prompt=wrong)
        assert (answer.status_code, told(answer.json())[0]) == (400, "prompt")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_token_at_the_most_is_as_if_not_given(name: str) -> None:
    for value in (-1, -1.0):
        asked = ChatRequest(messages=HISTORY, **{name: value})
        assert (asked.max_tokens, asked.max_completion_tokens, asked.most_tokens) == (None, None, None)
    assert CompletionRequest(prompt="a", max_tokens=-1).most_tokens == 16
    with pytest.raises(ValueError, match=name):
        ChatRequest(messages=HISTORY, **{name: -2})


def test_what_asks_for_nothing_is_as_if_not_given(server: Running) -> None:
    nothing = {
        "logprobs": False,
        "echo": None,
        "stream_options": None,
        "best_of": 1.0,
        "suffix": "",
        "logit_bias": None,
        "stop": None,
    }
    plain, given = (
        server.post("/v1/completions", prompt="a", max_tokens=3, temperature=0, **settings).json()
        for settings in ({}, nothing)
    )
    assert _texts(plain) == _texts(given)
    assert given["choices"][0]["logprobs"] is None
    named, said = told(server.post("/v1/completions", prompt="a", logprobs=True).json())
    assert (named, "is a number here" in said) == ("logprobs", True)


def test_a_prompts_tokens_need_no_template(server: Running) -> None:
    named, said = told(server.post("/tokenize", prompt="a", add_generation_prompt=True).json())
    assert (named, said) == ("add_generation_prompt", "add_generation_prompt: is for messages, leave it out")


def test_a_messages_own_fields_stay_as_they_are() -> None:
    given = {"role": "assistant", "content": None, "tool_calls": [], "weight": 1.0, "best_of": 1}
    kept = {name: value for name, value in given.items() if name != "content"}
    assert ChatMessage(**given).as_dict() == {**kept, "content": None}


def test_a_template_refuses_in_one_line(ordinary: OrdinaryDecoding, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages | length }}\n{{ raise_exception('Roles\nmust alternate') }}")
    with running(ordinary, chat_template=template) as server:
        answer = server.post("/v1/chat/completions", messages=HISTORY)
    assert answer.status_code == 400
    said = "messages: the chat template does not take them, line 2: Roles must alternate"
    assert told(answer.json()) == ("messages", said)
