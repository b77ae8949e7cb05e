"""What an answer has to look like, by OpenAI's field and vLLM's: the library's text, or status 400 with the field."""

import json
from collections import deque
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field
from servers import Running
from written_replies import Written

from ppd_runtime import OrdinaryDecoding

SCHEMA = {
    "type": "object",
    "properties": {"fox": {"enum": ["quick", "brown"]}, "jumps": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["fox", "jumps"],
    "additionalProperties": False,
}
NAMED = {"name": "fox", "schema": SCHEMA, "strict": True}
LARK = 'start: "the " ("fox" | "dog")'
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"schema": SCHEMA}),
    "json_object": ({"response_format": {"type": "json_object"}}, {"schema": {"type": "object"}}),
    "text": ({"response_format": {"type": "text"}}, {}),
    "json": ({"structured_outputs": {"json": SCHEMA}}, {"schema": SCHEMA}),
    "json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"schema": json.dumps(SCHEMA)}),
    "regex": ({"structured_outputs": {"regex": "(fox|dog){2}"}}, {"regex": "(fox|dog){2}"}),
    "choice": ({"structured_outputs": {"choice": ["fox", "dog"], "regex": None}}, {"choice": ["fox", "dog"]}),
    "grammar": ({"structured_outputs": {"grammar": LARK}}, {"grammar": LARK}),
    "guided_json": ({"guided_json": SCHEMA}, {"schema": SCHEMA}),
    "guided_regex": ({"guided_regex": "[a-c]{3}"}, {"regex": "[a-c]{3}"}),
    "guided_choice": ({"guided_choice": ["fox", "dog"]}, {"choice": ["fox", "dog"]}),
    "guided_grammar": ({"guided_grammar": LARK}, {"grammar": LARK}),
}


@pytest.mark.parametrize("name", FORMS)
def test_answers_are_the_librarys_texts(server: Running, ordinary: OrdinaryDecoding, name: str) -> None:
    fields, form = FORMS[name]
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        expected = ordinary.generate("The fox", max_new_tokens=60, **form, **settings)
        answer = server.post("/v1/completions", prompt="The fox", max_tokens=60, **fields, **settings).json()
        assert answer["choices"][0]["text"] == expected.text
        reason = {"eos": "stop"}.get(expected.finish_reason, expected.finish_reason)
        assert answer["choices"][0]["finish_reason"] == reason


def test_a_chat_streams_what_its_schema_allows(server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "A fox?"}], "max_tokens": 80, "temperature": 1, "seed": 1}
    whole = server.post("/v1/chat/completions", **asked, **FORMS["json_schema"][0]).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert json.loads(whole["message"]["content"])["fox"] in ("quick", "brown")
    cut = server.post("/v1/chat/completions", **{**asked, "max_tokens": 2}, **FORMS["json_schema"][0]).json()
    assert cut["choices"][0]["finish_reason"] == "length"


class Fox(BaseModel):
    fox: str = Field(max_length=6)
    jumps: int = Field(ge=0, le=9)


def test_openais_client_parses_an_answer(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "A fox?"}],
        response_format=Fox,
        max_tokens=200,
        temperature=0.7,
        seed=5,
    )
    assert isinstance(answer.choices[0].message.parsed, Fox)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {"type": "xml"}},
        "response_format",
        "type='xml', choose one of text, json_object, json_schem",
    ),
    ({"response_format": {"type": ["text"]}}, "response_format", "choose one of"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "give an object with a schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "does not support 'schema'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": 1}}},
        "response_format",
        "does not support 'json_schema.strickt'",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "x"}}}}}},
        "response_format",
        "response_format: at properties.a: Invalid type: x",
    ),
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs", "at character 2 of 'a(b': unclosed group"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "2 forms, give one of"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "does not support 'structural_tag'"),
    ({"structured_outputs": {"choice": [5]}}, "structured_outputs", "give texts"),
    ({"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}, "guided_regex", "structured_outputs is given as"),
    ({"guided_json": "{"}, "guided_json", "is no JSON"),
    ({"guided_json": {"anyOf": [{"$ref": "#"}]}}, "guided_json", "cannot be followed here"),
    ({"guided_json": {"description": "x" * 2**16}}, "guided_json", "characters, give 1 to 65536"),
    ({"guided_grammar": 'start: "a" b'}, "guided_grammar", "at line 1, column 8"),
    ({"guided_grammar": "start: a\na: a"}, "guided_grammar", "cannot be followed here"),
    ({"guided_choice": ["a"] * 1001}, "guided_choice", "at most 1000"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "ends when it is complete"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_fails_within_the_text_is_the_requests_fault(
    writing_server: Running, written: Written, stream: bool
) -> None:
    written.replies = deque(["ab" * 200])
    asked = {"prompt": "a", "max_tokens": 400, "guided_regex": f"(?:.{{0,{100 + stream}}}a){{100}}", "stream": stream}
    answer = writing_server.post("/v1/completions", **asked)
    told = answer.json() if not stream else json.loads(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))
    assert (answer.status_code, told["error"]["type"]) == (200 if stream else 400, "invalid_request_error")
    assert told["error"]["param"] == "guided_regex"
    assert "guided_regex: the schema, regex, choice or grammar cannot be followed" in told["error"]["message"]
    assert writing_server.taken == 0


def test_a_stream_names_a_form_that_fails_as_its_path_does(writing_server: Running, written: Written) -> None:
    written.replies = deque(['"' + "ab" * 200])
    form = {"type": "json_schema", "schema": {"type": "string", "pattern": "^(?:.{0,102}a){100}$"}}
    user = {"role": "user", "content": "a"}
    for path, field, asked in (
        ("/v1/responses", "text", {"input": "a", "text": {"format": {"name": "a", **form}}}),
        ("/v1/messages", "output_config", {"messages": [user], "max_tokens": 400, "output_config": {"format": form}}),
    ):
        told = writing_server.post(path, **asked, stream=True).text
        assert f'"param":"{field}"' in told, told[-500:]
        assert f"{field}: the schema, regex, choice or grammar cannot be followed" in told


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_no_form_is_refused_with_its_field(
    server: Running, fields: dict[str, Any], param: str, message: str
) -> None:
    for path, asked in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = server.post(path, **asked, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert message in error["message"]
