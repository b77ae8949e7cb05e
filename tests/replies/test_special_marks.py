"""Marks that are special tokens, which texts leave out: replies are read with them."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from models_for_tests import END, END_ID, VOCAB_SIZE, build_tokenizer
from servers import running
from written_replies import Written

from ppd_runtime.text import TextStream

MARKS = [
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
]
ANY = "{{ tools }}{{ messages | tojson }}"
TEMPLATES = {
    "mistral": (f"[TOOL_CALLS][THINK]{ANY}", '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]f[ARGS]{"a": "é"}'),
    "gpt_oss": (
        f"{ANY}<|channel|><|message|><|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>commentary<|message|>I look."
        '<|start|>assistant<|channel|>commentary to=functions.f json<|message|>{"a": "é"}<|call|>',
    ),
}
TOOL = {"type": "function", "function": {"name": "f"}}
USER = {"role": "user", "content": "Hi."}


@pytest.fixture(scope="module")
def written(model_folder: Callable[..., Path]) -> Written:
    found = Written(model_folder("llama", num_layers=2, vocab_size=VOCAB_SIZE + 16))
    found.tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("stop", [(), ("never", "\n\n")])
def test_replies_are_read_with_their_marks(written: Written, name: str, stop: tuple[str, ...]) -> None:
    template, reply = TEMPLATES[name]
    written.replies = deque([reply])
    result = written.chat([USER], chat_template=template, tools=[TOOL], stop=stop)
    assert result.text.removesuffix(END) == reply
    message = result.message
    assert (message.reasoning_content, message.content) == ("Hm.", "I look.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": "é"}')]
    plain = written.chat([USER], chat_template="{{ messages | tojson }}", stop=stop)
    assert "Hm." in plain.text
    assert not any(mark in plain.text for mark in MARKS), "elsewhere special tokens are left out"


@pytest.mark.parametrize("name", TEMPLATES)
def test_streams_are_read_so_too(written: Written, name: str, tmp_path: Path) -> None:
    template, reply = TEMPLATES[name]
    written.replies = deque([reply])
    (tmp_path / "chat.jinja").write_text(template)
    asked = {"messages": [USER], "tools": [TOOL], "max_tokens": 200}
    with running(written, chat_template=tmp_path / "chat.jinja") as server:
        whole = server.post("/v1/chat/completions", **asked).json()["choices"][0]
        stream = server.post("/v1/chat/completions", **asked, stream=True).text
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "é"}'}
    assert '"finish_reason":"tool_calls"' in stream
    assert not any(mark in stream for mark in MARKS)


def test_shown_special_tokens_are_in_their_places() -> None:
    tokenizer = build_tokenizer()
    half, rest = tokenizer.encode("é", add_special_tokens=False)[0], tokenizer.encode("ab", add_special_tokens=False)
    for stop in ((), ("abc",)):
        text = TextStream(tokenizer, stop, frozenset({END_ID}))
        pieces = [text.push(token) for token in (*rest, END_ID, half, END_ID, *rest)] + [text.finish()]
        end = tokenizer.convert_ids_to_tokens(END_ID)
        assert "".join(pieces) == f"ab{end}\ufffd{end}ab"
