"""Conversations as prompts: what goes to the template, what it is given besides, and what is told where it fails."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionMessage
from servers import TEMPLATE

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.async_runtime import AsyncDecoding

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
HISTORY = [
    {"role": "system", "content": "Help.", "name": "boss"},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It is sunny.", "reasoning_content": "The tool says so.", "annotations": []},
    {"role": "user", "content": "Thanks."},
]
"""An agent's, as openai's client writes it."""
AS_JSON = "{% for message in messages %}{{ message | tojson }}\n{% endfor %}{{ 'so:' if add_generation_prompt }}"
OBJECTS = [{**CALL, "function": {"name": "weather", "arguments": {"city": "Zürich"}}}]
"""The call as a template that writes its arguments as JSON has to get it."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""As SmolLM2's and many others': it adds contents to texts."""


def of_transformers(ordinary: OrdinaryDecoding, messages: list, template: str, **settings) -> str:
    asked = {"add_generation_prompt": True, **settings}
    return ordinary.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **asked)


def test_an_agents_history_goes_to_the_template_as_it_is(ordinary: OrdinaryDecoding) -> None:
    text = ordinary.chat_prompt(HISTORY, AS_JSON)
    with_objects = [{**message, "tool_calls": OBJECTS} if "tool_calls" in message else message for message in HISTORY]
    assert text == of_transformers(ordinary, with_objects, AS_JSON)
    assert json.loads(text.splitlines()[2])["tool_calls"] == OBJECTS
    assert '"tool_call_id": "call_1"' in text.splitlines()[3]
    assert '"reasoning_content": "The tool says so."' in text.splitlines()[4]


def test_a_message_object_of_an_earlier_answer_is_one(ordinary: OrdinaryDecoding) -> None:
    answer = ChatCompletionMessage(role="assistant", content="Hello.")
    for given in (answer, answer.model_dump()):
        history = [{"role": "user", "content": "Hi."}, given, {"role": "user", "content": "More."}]
        assert ordinary.chat_prompt(history, TEMPLATE) == "user: Hi.\nassistant: Hello.\nuser: More.\n"


def test_contents_of_parts_are_one_text(ordinary: OrdinaryDecoding) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    history = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert ordinary.chat_prompt(history, TEMPLATE) == "system: ab\nassistant: No.\n"


def test_a_template_that_needs_contents_gets_empty_ones(ordinary: OrdinaryDecoding) -> None:
    contents = [{**message, "content": message["content"] or ""} for message in HISTORY]
    assert ordinary.chat_prompt(HISTORY, CHATML) == of_transformers(ordinary, contents, CHATML)


def test_a_template_that_needs_arguments_as_objects_gets_them(ordinary: OrdinaryDecoding) -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or () %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    assert ordinary.chat_prompt(HISTORY, template) == "city=Zürich"


@pytest.mark.parametrize("written", ["arguments", "arguments | tojson", "arguments if arguments is string else 5"])
def test_arguments_are_never_json_within_json(ordinary: OrdinaryDecoding, written: str) -> None:
    template = (
        "{% for message in messages %}{% for call in message.tool_calls or () %}"
        f"{{% set arguments = call.function.arguments %}}{{{{ {written} }}}}"
        "{% endfor %}{% endfor %}"
    )
    assert ordinary.chat_prompt(HISTORY, template) == '{"city": "Zürich"}'


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user"}, "has no content"),
        ({"role": "system", "content": None}, "has no content"),
        ({"content": "a"}, "give a role and a content"),
        ({"role": 5, "content": "a"}, "give a role and a content"),
        ({"role": "user", "content": 5}, "content=5: give a text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url' is no text"),
        ({"role": "user", "content": [{"type": "text"}]}, "has no text, give it"),
        ({"role": "user", "content": ["a"]}, "'a' is no text"),
        ({"role": "assistant", "content": None, "audio": {"id": "audio_1"}}, "has audio"),
        ({"role": "user", "content": "a", "x": json.loads("[" * 200 + "]" * 200)}, "more than 64 levels"),
    ],
)
def test_what_is_no_message_is_named(ordinary: OrdinaryDecoding, message: dict, told: str) -> None:
    with pytest.raises(ValueError, match=f"messages: .*{told}") as found:
        ordinary.chat_prompt([message], TEMPLATE)
    assert "\n" not in str(found.value)


def test_variables_go_to_the_template(ordinary: OrdinaryDecoding) -> None:
    hi = [{"role": "user", "content": "Hi."}]
    options = {"chat_template_kwargs": {"enable_thinking": False, "no_template_has_this": 1}}
    expected = of_transformers(ordinary, hi, CHATML, enable_thinking=False)
    assert expected.endswith("</think>\n\n")
    assert ordinary.chat_prompt(hi, CHATML, **options) == expected
    settings = {"max_new_tokens": 3, "chat_template": CHATML}
    answer = ordinary.generate(expected, add_special_tokens=False, max_new_tokens=3)
    assert ordinary.chat(hi, **settings, **options).token_ids == answer.token_ids
    told = asyncio.run(AsyncDecoding(ordinary).chat(hi, **settings, **options))
    assert told.prompt_ids == answer.prompt_ids


def test_a_last_message_is_continued(ordinary: OrdinaryDecoding) -> None:
    history = [{"role": "user", "content": "Two words."}, {"role": "assistant", "content": "One and"}]
    expected = of_transformers(ordinary, history, CHATML, add_generation_prompt=False, continue_final_message=True)
    assert expected.endswith("assistant\nOne and")
    for options in ({}, {"add_generation_prompt": False}):
        assert ordinary.chat_prompt(history, CHATML, continue_final_message=True, **options) == expected
    closed = of_transformers(ordinary, history, CHATML, add_generation_prompt=False)
    assert ordinary.chat_prompt(history, CHATML, add_generation_prompt=False) == closed
    begun = ordinary.chat_prompt(history, CHATML)
    assert begun == ordinary.chat_prompt(history, CHATML, add_generation_prompt=True) != closed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message=True: .*leave one"),
        ({"continue_final_message": "content"}, "continue_final_message='content'"),
        ({"add_generation_prompt": 1}, "add_generation_prompt=1"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs=5"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs=.5"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(201)))}, "chat_template_kwargs: 201 of them"),
        ({"chat_template_kwargs": {"x": json.loads("[" * 200 + "]" * 200)}}, "chat_template_kwargs: more than 64"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"kwargs: '{name}' is not")
            for name in ("messages", "tokenize", "bos_token")
        ),
    ],
)
def test_what_is_no_templates_variable_is_refused(ordinary: OrdinaryDecoding, options: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ordinary.chat_prompt([{"role": "user", "content": "Hi."}], TEMPLATE, **options)


OF_TRANSFORMERS = {
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks trimmed": "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "letters as they are": "{{ messages | tojson }}",
    "the date": "{{ strftime_now('%Y') }}",
    "its own dictionaries": "{{ dict(a=1) }}{% set n = namespace(x=1) %}{{ n.x }}",
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_a_templates_file_is_rendered_as_one_of_the_folder(
    ordinary: OrdinaryDecoding, tmp_path: Path, name: str
) -> None:
    file, history = tmp_path / "chat.jinja", [{"role": "user", "content": "é<b>"}, {"role": "user", "content": "more"}]
    file.write_text(OF_TRANSFORMERS[name], encoding="utf-8")
    own = ordinary.tokenizer.chat_template
    try:
        ordinary.tokenizer.chat_template = OF_TRANSFORMERS[name]
        assert ordinary.chat_prompt(history, file) == ordinary.chat_prompt(history)
    finally:
        ordinary.tokenizer.chat_template = own


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages }}\n\n{{ raise_exception('Roles must\nalternate.') }}", "line 3: Roles must alternate."),
        ("a\n{{ messages[0].nothing.more }}", "line 2: 'dict object' has no attribute 'nothing'"),
        ("\n\n\n{{ 1 // 0 }}", "line 4: ZeroDivisionError: integer division or modulo by zero"),
        ("{{ messages }}\n{{ 'x' | of_no_filter }}", "line 2: No filter named 'of_no_filter'."),
        ("{% macro fail() %}\n{{ 1 + 'a' }}\n{% endmacro %}\n{{ fail() }}", "line 2: TypeError: unsupported operand"),
    ],
)
def test_a_template_that_fails_tells_its_line(ordinary: OrdinaryDecoding, template: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as found:
        ordinary.chat_prompt([{"role": "user", "content": "Hi."}], template)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 500


def test_without_a_template_the_way_out_is_named(ordinary: OrdinaryDecoding) -> None:
    with pytest.raises(ValueError, match="no chat template, give one: chat_template="):
        ordinary.chat([{"role": "user", "content": "Hi."}])
