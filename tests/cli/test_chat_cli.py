"""`ppd chat` as it is used: at a terminal, from a pipe, with Ctrl-C, and what it refuses before it starts anything."""

import io
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ppd, refused
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.cli.chat import _cancelled_by_ctrl_c, talk
from ppd_runtime.cli.conversation import SETTABLE, Conversation, Turn
from ppd_runtime.cli.typed import _completer, typed_at_terminal, typed_lines

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.mark.parametrize(
    "way",
    ["", "--rows 4 --max-restarts 0", "--stages 2 --transport local", "--k 1 --transport local", "--method layerskip"],
)
def test_a_pipe_has_a_message_a_line(model_folder: Callable[..., Path], template: Path, way: str) -> None:
    """One stage is the default, also with options that say how it runs."""
    folder = model_folder("llama")
    arguments = f"{folder} {way} --dtype float32 --max-new-tokens 8 --chat-template {template} --system word7".split()
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        messages, answers = [{"role": "system", "content": "word7"}], []
        for question in ("word1", "word2\nword3"):
            messages.append({"role": "user", "content": question})
            answers.append(ordinary.chat(messages, chat_template=TEMPLATE, max_new_tokens=8).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    result = ppd("chat", *arguments, input="word1\nword2\\\nword3\n/exit\nunread\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.stderr.count("8 tokens, ") == 2
    assert ("named first by" in result.stderr) == (not way or "stages" in way or "rows" in way)


def test_what_cannot_be_done_ends_a_pipe_with_one_line(model_folder: Callable[..., Path], template: Path) -> None:
    start = ("--model", model_folder("llama"), "--method", "autoregressive", "--chat-template", template)
    for typed, reason in (
        ("/set temperature hot\nword1\n", "ppd: temperature='hot': give a number 0 or more\n"),
        ("/foo\n", "ppd: /foo: no such command; /help lists them, and // begins a message with a slash\n"),
        ('"""\nword1\n', 'ppd: the last message is not finished: \'"""\'; end it with """, or without a backslash\n'),
    ):
        result = ppd("chat", *start, input=typed)
        assert (result.exit_code, result.stderr, result.stdout) == (2, reason, "")


def test_models_and_templates_that_cannot_chat_are_refused(
    model_folder: Callable[..., Path], template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(PPDRuntime, "start", started.append)
    folder, wrong = model_folder("llama"), tmp_path / "wrong.jinja"
    for text, arguments, reason in (
        ("", ("demo",), "model 'demo' has no chat template: give one with --chat-template FILE"),
        ("one\n{% if %}", (folder, "--chat-template", wrong), "no Jinja template, line 2: Expected an expression"),
        ("one\n{% if %}", (folder, "--chat-template", wrong), "; give another"),
        ("\n\n{{ messages[0].a.b }}", (folder, "--chat-template", wrong), "take them, line 3: "),
        ("{{ raise_exception('no') }}", (folder, "--chat-template", wrong), "take them, line 1: no"),
        ("", (folder, "--chat-template", tmp_path / "none"), "No such file or directory"),
        ("", (folder, "--chat-template", template, "--temperature", "-1"), "--temperature -1.0: must be finite and 0"),
    ):
        wrong.write_text(text)
        assert reason in refused("chat", *arguments, input="word1\n")
    assert not started


def test_ctrl_c_ends_the_answer_and_not_the_program(model_folder: Callable[..., Path]) -> None:
    before = signal.default_int_handler
    signal.signal(signal.SIGINT, before)  # a shell's background job begins with another
    with OrdinaryDecoding(model_folder("llama"), dtype="float32") as generator:
        conversation = Conversation(generator, {"max_new_tokens": 64, "ignore_eos": True}, TEMPLATE)
        turn = conversation.take("word1")
        assert isinstance(turn, Turn)
        with _cancelled_by_ctrl_c(turn.generation):
            next(turn.generation)
            signal.raise_signal(signal.SIGINT)
            assert len(list(turn.generation)) < 3
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
        assert conversation.keep(turn) == ""
        assert turn.generation.result.finish_reason == "cancelled"
        assert isinstance(conversation.take("word2"), Turn)


def test_at_a_terminal_it_goes_on_behind_what_is_refused(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with OrdinaryDecoding(model_folder("llama"), dtype="float32") as generator:
        conversation = Conversation(generator, {"max_new_tokens": 4}, TEMPLATE)
        talk(conversation, iter(["/set top_p 7", "word1", "/help"]), 0, goes_on=True)
    printed = capsys.readouterr()
    first, second = printed.err.splitlines()
    assert first == "top_p=7: must be finite and in [0, 1]"
    assert second.startswith("4 tokens, ")
    assert len(conversation.messages) == 2
    assert "/retry" in printed.out


def test_typing_at_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Enter, Alt-Enter, a backslash and quotes; Ctrl-C once is a hint, twice in a row leaves."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        typed = typed_at_terminal()
        for keys, meant in (
            ("one\r", "one"),
            ("one\x1b\rtwo\r", "one\ntwo"),
            ("one\\\rtwo\r", "one\\\ntwo"),
            ('"""one\r\rtwo"""\r', '"""one\n\ntwo"""'),
            ("\x03one\r", "one"),
        ):
            pipe.send_text(keys)
            assert next(typed) == meant
        pipe.send_text("\x03\x03")
        assert list(typed) == []
        pipe.send_text("\x04")
        assert list(typed_at_terminal()) == []
    assert capsys.readouterr().err == "Ctrl-C again leaves\n" * 2


def test_the_tab_key_knows_commands_and_settings() -> None:
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    def offered(text: str) -> list[str]:
        return [each.text for each in _completer().get_completions(Document(text), CompleteEvent())]

    assert offered("/s") == ["/system", "/set", "/save"]
    assert offered("/set top") == ["top_k", "top_p"]
    assert offered("/set ") == list(SETTABLE)
    assert offered("hello /s") == []


def test_a_pipe_that_is_no_text_is_refused() -> None:
    lines = typed_lines(io.TextIOWrapper(io.BytesIO(b"one\n\xff\xfe")))
    with pytest.raises(ValueError, match="standard input: no UTF-8 text"):
        list(lines)
