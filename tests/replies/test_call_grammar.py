"""Replies that have to be calls: whatever a model would rather write, they are, and arguments obey their schemas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from models_for_tests import VOCAB_SIZE, build_tokenizer

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.replies.choice import REASONING_PARSERS, TOOL_CALL_PARSERS, ReplyFormats
from ppd_runtime.replies.reading import reading_of
from ppd_runtime.replies.tools import tool_use
from ppd_runtime.sampling.params import SamplingParams

ANY = "{{ tools }}{{ messages | tojson }}"
TEMPLATES = {
    "hermes": f"<tool_call>{ANY}",
    "qwen3_coder": f"<tool_call><function=<parameter={ANY}",
    "llama3_json": f"<|eot_id|>{ANY}",
    "mistral": f"[TOOL_CALLS]{ANY}",
    "mistral's later form": f"[TOOL_CALLS][ARGS]{ANY}",
    "gemma": f"<start_of_turn>{ANY}",
    "gpt_oss": f"<|channel|><|message|>{ANY}<|start|>assistant",
}
MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zug", "Zürich"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                    "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 1},
                },
                "required": ["city", "days"],
                "$defs": {"place": {"enum": ["in", "out"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
USER = {"role": "user", "content": "Weather?"}
MOST = {"max_new_tokens": 400}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> Path:
    """A model whose tokenizer has marks as special tokens."""
    found = model_folder("llama", num_layers=2, vocab_size=VOCAB_SIZE + 16, max_position_embeddings=4096, seed=5)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def special(folder: Path) -> OrdinaryDecoding:
    return OrdinaryDecoding(folder)


@pytest.fixture(scope="module")
def plain(model_folder: Callable[..., Path]) -> OrdinaryDecoding:
    return OrdinaryDecoding(model_folder("llama", num_layers=2, max_position_embeddings=4096, seed=6))


def check_calls(message: Any) -> list[str]:
    """The names of a message's calls, whose arguments are what their tools take."""
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.name])
        assert set(arguments) <= set(SCHEMAS[call.name].get("properties", ()))
    return [call.name for call in message.tool_calls]


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("decoder", ["plain", "special"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "seed": 3}])
def test_a_reply_that_has_to_be_a_call_is_one(
    request: pytest.FixtureRequest, form: str, decoder: str, settings: dict
) -> None:
    generator = request.getfixturevalue(decoder)
    asked = {"chat_template": TEMPLATES[form], "tools": TOOLS, **MOST, **settings}
    result = generator.chat([USER], tool_choice="required", parallel_tool_calls=False, **asked)
    assert result.finish_reason in ("eos", "stop"), result.text
    assert (len(check_calls(result.message)), result.message.content) == (1, None)
    named = generator.chat([USER], tool_choice="weather", **asked)
    assert check_calls(named.message) == ["weather"]
    result = generator.chat([USER], tool_choice="required", **{**asked, "max_new_tokens": 1500})
    assert 1 <= len(check_calls(result.message)) <= 16


def test_every_layout_gives_the_same_call(folder: Path, special: OrdinaryDecoding) -> None:
    asked = {"chat_template": TEMPLATES["hermes"], "tools": TOOLS, "tool_choice": "weather", **MOST}
    expected = special.chat([USER], **asked)
    for layout in ({"k": 2}, {"stages": 2, "rows": 2, "k": 2, "cuts": (1,)}, {"stages": 1}):
        with PPDRuntime(folder, transport="local", dtype="float32", **layout) as runtime:
            found = runtime.chat([USER], **asked)
        assert (found.text, check_calls(found.message)) == (expected.text, ["weather"])


@pytest.mark.parametrize("is_open", [False, True])
def test_thinking_may_come_first(plain: OrdinaryDecoding, is_open: bool) -> None:
    template = f"{TEMPLATES['hermes']}<think>{'' if is_open else '</think>'}"
    prompt = plain.chat_prompt([USER], template)
    use = tool_use(TOOLS, "weather")
    reading = reading_of(template, prompt, plain.tokenizer, use, ReplyFormats())
    assert reading is not None
    assert reading.thinking == REASONING_PARSERS["think"]._replace(is_open=is_open)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zug", "days": 2}}\n</tool_call>'
    for text in ([] if is_open else [call]) + [f"{'' if is_open else '<think>'}Hm </thin.</think>\n\n{call}"]:
        assert is_taken(plain, reading.grammar, text), text
        assert check_calls(reading.message_of(text)) == ["weather"]
    for text in ("Hm.", call.replace("Zug", "Bern"), call.replace("days", "day"), f"<think></think>Hm.{call}"):
        assert not is_taken(plain, reading.grammar, text), text


FORMS = {
    "schema": ({"schema": {"enum": ["Zug", "a/b"]}}, '"a/b"'),
    "regex": ({"regex": "(a/b|a\\/c)\n"}, "a/c\n"),
    "choice": ({"choice": ["a/b", 'c"d']}, 'c"d'),
}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_leaves_room_for_thinking(plain: OrdinaryDecoding, name: str, is_open: bool) -> None:
    """Else the prompt's open thinking would be the form's text."""
    template = f"<think>{'' if is_open else '</think>'}"
    given, expected = FORMS[name]
    turn = plain.chat_turn([USER], f"{{{{ messages | tojson }}}}{template}", {}, tool_use(), ReplyFormats())
    assert turn.reading is not None
    params = plain.chat_params(SamplingParams(**given), turn)
    thought = f"{'' if is_open else '<think>'}Hm.</think>\n\n"
    assert is_taken(plain, params.grammar, thought + expected)
    assert is_taken(plain, params.grammar, expected) is not is_open
    assert not is_taken(plain, params.grammar, f"{thought}Zug")
    message = turn.reading.message_of(thought + expected)
    assert (message.reasoning_content, message.content) == ("Hm.", expected)


@pytest.mark.parametrize("form", [form for form in TEMPLATES if not form.startswith("gpt_oss")])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_leaves_room_for_calls(plain: OrdinaryDecoding, form: str, name: str) -> None:
    """A schema of answers would leave an agent no call."""
    given, expected = FORMS[name]
    turn = plain.chat_turn([USER], TEMPLATES[form], {}, tool_use(TOOLS), ReplyFormats())
    forced = plain.chat_turn([USER], TEMPLATES[form], {}, tool_use(TOOLS, "weather"), ReplyFormats())
    params = plain.chat_params(SamplingParams(**given), turn)
    call = plain.chat([USER], chat_template=TEMPLATES[form], tools=TOOLS, tool_choice="weather", **MOST).text
    assert is_taken(plain, forced.reading.grammar, call)
    assert is_taken(plain, params.grammar, call)
    assert is_taken(plain, params.grammar, expected)
    assert not is_taken(plain, params.grammar, "Zug")
    assert turn.reading.message_of(expected).content == expected


def test_a_grammar_leaves_none(plain: OrdinaryDecoding) -> None:
    given = {"grammar": 'start: "a"', "max_new_tokens": 5}
    with pytest.raises(ValueError, match="grammar: the model thinks first"):
        plain.chat([USER], chat_template="{{ messages | tojson }}<think>", **given)
    result = plain.chat([USER], chat_template="<think></think>{{ messages | tojson }}", **given)
    assert (result.message.content, result.message.reasoning_content) == ("a", None)


def is_taken(decoder: OrdinaryDecoding, grammar: str | None, text: str) -> bool:
    """Whether a grammar takes a whole text."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(decoder.tokenizer.backend_tokenizer.to_str())
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    tokens = decoder.tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("form", "parameters", "message"),
    [
        (
            "hermes",
            {"type": "object", "properties": {"a": {"type": "nothing"}}},
            "tools: a call cannot be required, .*",
        ),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x+"}}}, "its text 'a' has 'pattern'"),
        ("hermes", {"properties": {"a": {"multipleOf": 999_999}}}, "tools: multipleOf=999999 would take too long"),
        ("qwen3_coder", {"properties": [None]}, "tools: 'f' has properties that are no object"),
        ("qwen3_coder", {"properties": {}, "required": 5}, "tools: 'f' has .* a required that is no list"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "enum": 5}}}, "its text 'a' has 'enum'"),
    ],
)
def test_arguments_that_cannot_be_kept_to_are_refused(
    plain: OrdinaryDecoding, form: str, parameters: dict, message: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ValueError, match=message):
        plain.chat([USER], chat_template=TEMPLATES[form], tools=[tool], tool_choice="f")


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_arguments_may_be_described_elsewhere(plain: OrdinaryDecoding, form: str) -> None:
    """As pydantic describes a model of one field that is a model."""
    city = {"type": "object", "properties": {"city": {"enum": ["Zug", "Bern"]}}, "required": ["city"]}
    shapes = [{"$defs": {"a/b": city, "c": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/c"}]
    closed = {**city, "additionalProperties": False}
    shapes += [{"anyOf": [closed]}, {"allOf": [closed]}] if form == "hermes" else []
    for parameters in shapes:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        asked = {"chat_template": TEMPLATES[form], "tools": [tool], "tool_choice": "f", **MOST}
        (call,) = plain.chat([USER], **asked).message.tool_calls
        assert json.loads(call.arguments)["city"] in ("Zug", "Bern"), parameters


def test_a_form_of_answers_is_not_that_of_required_calls(plain: OrdinaryDecoding) -> None:
    asked = {"chat_template": TEMPLATES["hermes"], "tools": TOOLS, "tool_choice": "required", "max_new_tokens": 20}
    assert plain.chat([USER], regex="a+", **asked).token_ids == plain.chat([USER], **asked).token_ids


def test_each_form_can_be_required() -> None:
    assert {form.split("'")[0] for form in TEMPLATES} == set(TOOL_CALL_PARSERS)
