"""Replies in each family's form, read whole and in pieces of every size."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.replies.choice import REASONING_PARSERS, TOOL_CALL_PARSERS, ReplyFormats
from ppd_runtime.replies.message import AssistantMessage, message_of
from ppd_runtime.replies.reader import Reader
from ppd_runtime.replies.reading import ReplyReading

THINK = REASONING_PARSERS["think"]
OPEN = THINK._replace(is_open=True)
TOOLS = {"f": {"properties": {"a": {"type": "string"}}}, "g": {}}
"""Of every request here."""
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=a>\n12\n\nx\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n</function>\n"
)
HARMONY = "<|channel|>analysis<|message|>We need it.<|end|><|start|>assistant"
TO_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'


def read(name: str, text: str, size: int = 10**6, **settings) -> AssistantMessage:
    """A reply's message, the text given in pieces of `size` characters."""
    reading = ReplyReading(TOOL_CALL_PARSERS.get(name, Reader), tools=TOOLS, **settings)
    reader = reading.open()
    deltas = [delta for at in range(0, len(text), size) for delta in reader.push(text[at : at + size])]
    return message_of([*deltas, *reader.finish()])


def calls(message: AssistantMessage) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


REPLIES = {
    "one call": (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x\\"}"}}\n</tool_call>',
        None,
        [("f", '{"a": "x\\"}"}')],
    ),
    "text, then two calls": (
        "hermes",
        'Well.\n\n<tool_call>{"name":"f","arguments":{"a":"x"}}</tool_call>\n'
        '<tool_call>{"arguments": {"b": [1]}, "name": "g"}\n</tool_call>\n',
        "Well.",
        [("f", '{"a":"x"}'), ("g", '{"b": [1]}')],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "g"}</tool_call>', None, [("g", "{}")]),
    "null arguments": ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', None, [("g", "{}")]),
    "arguments in a text": (
        "hermes",
        '<tool_call>{"name": "g", "arguments": "{\\"b\\": 1}"}</tool_call>',
        None,
        [("g", '{"b": 1}')],
    ),
    "no call after all": (
        "hermes",
        "See <tool_call>me</tool_call>, and < tool_call>. \n",
        "See <tool_call>me</tool_call>, and < tool_call>. \n",
        [],
    ),
    "a call without a name": ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "a call that is cut short": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', None, [("f", '{"a": "x')]),
    "a name that is cut short": ("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    "a fault behind the name": ("hermes", '<tool_call>{"name": "g", oh}</tool_call> So', " So", [("g", "")]),
    "Llama's": ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}', None, [("f", '{"a": "x"}')]),
    "Llama's behind a mark": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
        None,
        [("f", "{}")],
    ),
    "Llama's, two": (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 1}}',
        None,
        [("f", "{}"), ("g", '{"b": 1}')],
    ),
    "an answer in JSON": (
        "llama3_json",
        '{"name": "Ann", "parameters": {}}\n',
        '{"name": "Ann", "parameters": {}}\n',
        [],
    ),
    "Llama's text": ("llama3_json", ' Hi {"name": "f"}', ' Hi {"name": "f"}', []),
    "Mistral's": (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]',
        None,
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    "Mistral's later form": (
        "mistral",
        'Ok.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "x"}[TOOL_CALLS]g{}',
        "Ok.",
        [("f", '{"a": "x"}'), ("g", "{}")],
    ),
    "Mistral's, cut short": ("mistral", "[TOOL_CALLS]fu", "[TOOL_CALLS]fu", []),
    "Gemma's Python": (
        "gemma",
        'So:\n```tool_code\nprint(f(a="x", b=[1, None]))\n```',
        "So:",
        [("f", '{"a": "x", "b": [1, null]}')],
    ),
    "Gemma's JSON": (
        "gemma",
        '```json\n[{"name": "f", "parameters": {"a": "x"}}]\n```\nDone.',
        "\nDone.",
        [("f", '{"a": "x"}')],
    ),
    "Gemma's list": ("gemma", "[f(a='x'), g()]", None, [("f", '{"a": "x"}'), ("g", "{}")]),
    "Gemma's JSON alone": ("gemma", '{"name": "g", "parameters": {}}', None, [("g", "{}")]),
    "code that calls no tool": (
        "gemma",
        "```python\nimport os\n``` or ```tool_code\nos.remove('x')\n```",
        "```python\nimport os\n``` or ```tool_code\nos.remove('x')\n```",
        [],
    ),
    "code with more than literals": (
        "gemma",
        "```tool_code\nf(a=open('x'))\n```",
        "```tool_code\nf(a=open('x'))\n```",
        [],
    ),
    "Qwen3-Coder's": ("qwen3_coder", f"Ok.\n{QWEN}</tool_call>", "Ok.", [("f", '{"a": "12\\n\\nx", "b": [1]}')]),
    "Qwen3-Coder's, no arguments": (
        "qwen3_coder",
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        None,
        [("g", "{}")],
    ),
    "Qwen3-Coder's numbers that JSON has not": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=b>\nNaN\n</parameter>\n</function>\n</tool_call>",
        None,
        [("f", '{"b": "NaN"}')],
    ),
    "Qwen3-Coder's text": ("qwen3_coder", "<tool_call> is a mark", "<tool_call> is a mark", []),
    "gpt-oss' call": ("gpt_oss", TO_F, None, [("f", '{"a": "x"}')]),
    "gpt-oss' call in the role": (
        "gpt_oss",
        ' to=functions.g<|channel|>commentary json<|message|>{"b":1}<|call|>',
        None,
        [("g", '{"b":1}')],
    ),
    "gpt-oss' answer": ("gpt_oss", "<|channel|>final<|message|>Hello\n there.<|return|>", "Hello\n there.", []),
    "gpt-oss' preamble": (
        "gpt_oss",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO_F}",
        "I look.",
        [("f", '{"a": "x"}')],
    ),
    "no channels": ("gpt_oss", "Hello.", "Hello.", []),
}


@pytest.mark.parametrize("case", REPLIES)
def test_replies_are_read_in_pieces_of_any_size(case: str) -> None:
    name, text, content, made = REPLIES[case]
    for size in (1, 2, 7, 10**6):
        message = read(name, text, size)
        assert (message.content, calls(message), message.reasoning_content) == (content, made, None), size


THOUGHTS = {
    "thinking and an answer": ("hermes", THINK, "<think>\nHm, \nso.\n</think>\n\nYes. ", "Hm, \nso.", "Yes. ", []),
    "opened in the prompt": ("hermes", OPEN, "\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", []),
    "none": ("hermes", THINK, " Yes <think>", None, " Yes <think>", []),
    "empty": ("hermes", THINK, "<think>\n\n</think>\n\nYes.", None, "Yes.", []),
    "cut short": ("hermes", THINK, "<think>Hm. </thi", "Hm. </thi", "", []),
    "before a call": (
        "qwen3_coder",
        OPEN,
        f"So.</think>{QWEN}</tool_call>",
        "So.",
        None,
        [("f", '{"a": "12\\n\\nx", "b": [1]}')],
    ),
    "without calls": ("plain", THINK, "<think>Hm.</think><tool_call>{}", "Hm.", "<tool_call>{}", []),
    "Mistral's": ("mistral", REASONING_PARSERS["mistral"], "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes.", []),
    "gpt-oss'": (
        "gpt_oss",
        REASONING_PARSERS["gpt_oss"],
        f"{HARMONY}{TO_F}",
        "We need it.",
        None,
        [("f", '{"a": "x"}')],
    ),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_thinking_is_split_off(case: str) -> None:
    name, thinking, text, thought, content, made = THOUGHTS[case]
    for size in (1, 3, 10**6):
        message = read(name, text, size, thinking=thinking)
        assert (message.reasoning_content, message.content, calls(message)) == (thought, content, made), size


def test_thinking_that_is_not_looked_for_is_text() -> None:
    assert read("gpt_oss", f"{HARMONY}<|channel|>final<|message|>Yes.").content == "We need it.\nYes."
    assert read("hermes", "<think>Hm.</think>Yes.").content == "<think>Hm.</think>Yes."


def test_arguments_are_told_while_they_are_written() -> None:
    reader = ReplyReading(TOOL_CALL_PARSERS["hermes"]).open()
    told = [
        reader.push(text) for text in ('<tool_call>{"name": "f"', ', "arguments": {"a', '": "x', '"}}', "</tool_call>")
    ]
    assert [[getattr(delta, "text", "begins") for delta in deltas] for deltas in told] == [
        ["begins"], ['{"a'], ['": "x'], ['"}'], [],
    ]  # fmt: skip


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_where_one_call_is_wanted_the_others_are_not_told(name: str) -> None:
    for form, text, _, made in REPLIES.values():
        if form == name:
            assert calls(read(name, text, parallel=False)) == made[:1]


def test_calls_have_ids_of_their_own_and_mistrals_their_form() -> None:
    text = '<tool_call>{"name": "g"}</tool_call>'
    assert len({read("hermes", text).tool_calls[0].id for _ in range(20)}) == 20
    (call,) = read("mistral", "[TOOL_CALLS]g{}").tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
@given(data=st.data())
def test_any_text_is_read_to_its_end_the_same_in_pieces(name: str, data: st.DataObject) -> None:
    """Made of marks, brackets and names: nothing hangs, fails, or depends on where pieces end."""
    marks = [*TOOL_CALL_PARSERS[name].markers, "<think>", "</think>", "```json", "```", *'{}[]"\\:,;=<> \n', "f(a=1)"]
    texts = st.lists(
        st.sampled_from([*marks, '"name"', '"arguments"', '"f"', "<function=", "<parameter=", "to=f", "1"])
    )
    text = "".join(data.draw(texts))
    whole = read(name, text, thinking=THINK)
    for size in (1, 4):
        pieces = read(name, text, size, thinking=THINK)
        assert (pieces.content, pieces.reasoning_content) == (whole.content, whole.reasoning_content)
        assert calls(pieces) == calls(whole)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_arguments_come_through_as_they_are_written(value: object) -> None:
    arguments = json.dumps({"a": value})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for size in (1, 5, 10**6):
        assert calls(read("hermes", text, size)) == [("f", arguments)]


TEMPLATES = {
    "{{ tools }}<tool_call>": ("hermes", None),
    "{{ tools }}<tool_call><function=x><parameter=y><think>": ("qwen3_coder", "think"),
    "[TOOL_CALLS][THINK]": ("mistral", "mistral"),
    "<|eot_id|>{% if tools %}": ("llama3_json", None),
    "<start_of_turn>{{ tools }}": ("gemma", None),
    "<|channel|>{{ 1 }}<|message|>": ("gpt_oss", "gpt_oss"),
    "<|im_start|>": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_show_the_forms(template: str) -> None:
    formats = ReplyFormats()
    assert (formats.calls_in(template), formats.thinking_in(template)) == TEMPLATES[template]
    named = ReplyFormats("gemma", "none")
    assert (named.calls_in(template), named.thinking_in(template)) == ("gemma", None)


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_form_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='xml': choose one of auto, "):
        ReplyFormats(**{name: "xml"})
