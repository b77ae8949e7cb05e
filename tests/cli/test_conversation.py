"""What `ppd chat` makes of what is typed: messages, commands, settings, the history."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from families.specimens import Specimen
from models_for_tests import build_tokenizer

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.cli.conversation import COMMANDS, SETTABLE, Conversation, Turn, is_open, message_of, value_of
from ppd_runtime.results import GenerationResult

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def generator(model_folder: Callable[..., Path]) -> Iterator[OrdinaryDecoding]:
    with OrdinaryDecoding(model_folder("llama"), dtype="float32") as ordinary:
        yield ordinary


@pytest.fixture
def conversation(generator: OrdinaryDecoding) -> Conversation:
    return Conversation(generator, {"max_new_tokens": 6}, TEMPLATE)


def answered(conversation: Conversation, typed: str) -> GenerationResult:
    turn = conversation.take(typed)
    assert isinstance(turn, Turn)
    assert list(turn.generation)
    conversation.keep(turn)
    return turn.generation.result


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("word1", "word1"),
        ("one\\\ntwo\\\nthree", "one\ntwo\nthree"),
        ('"""one\ntwo"""', "one\ntwo"),
        ('"""\none\\\n\n  two\n"""', "one\\\n\n  two"),
        ('/system """\none\ntwo\n"""', "/system one\ntwo"),
        ('print("""one""")', 'print("""one""")'),
        ("one\ntwo", "one\ntwo"),  # by Alt-Enter, or pasted
    ],
)
def test_several_lines_are_one_message(typed: str, meant: str) -> None:
    lines = typed.split("\n")
    opened = [is_open("\n".join(lines[: number + 1])) for number in range(len(lines))]
    assert not opened[-1]
    if typed != "one\ntwo":
        assert all(opened[:-1])
    assert message_of(typed) == meant


def test_answers_are_chats_and_the_history_goes_along(generator: OrdinaryDecoding, conversation: Conversation) -> None:
    messages = []
    for question in ("word1 word2", "word3"):
        messages.append({"role": "user", "content": question})
        expected = generator.chat(messages, chat_template=TEMPLATE, max_new_tokens=6)
        assert answered(conversation, question).token_ids == expected.token_ids
        messages.append({"role": "assistant", "content": expected.text})
        assert conversation.whole == messages
    conversation.take("/system word5")
    assert conversation.whole == [{"role": "system", "content": "word5"}, *messages]
    with_system = generator.chat(conversation.whole[:-1], chat_template=TEMPLATE, max_new_tokens=6)
    assert answered(conversation, "/retry").token_ids == with_system.token_ids
    assert len(conversation.whole) == 5
    assert "word5" in str(conversation.take("/system"))
    assert conversation.whole[0]["role"] == "user"
    assert answered(conversation, "//word1").prompt_ids == tuple(
        generator.prompt_ids(generator.chat_prompt(conversation.whole[:-1], TEMPLATE), add_special_tokens=False)
    )
    assert conversation.whole[-2]["content"] == "/word1"
    assert conversation.take("/clear") == "6 messages forgotten; the system message and the settings stay"
    assert conversation.whole == []
    assert conversation.take("/exit") is None
    assert conversation.take(" \n") == ""


def test_an_answer_that_is_ended_stays_as_far_as_it_came(conversation: Conversation) -> None:
    turn = conversation.take("word1")
    assert isinstance(turn, Turn)
    next(turn.generation)
    turn.generation.cancel()
    list(turn.generation)
    conversation.keep(turn)
    assert conversation.whole[-1] == {"role": "assistant", "content": turn.generation.result.text}
    assert 0 < turn.generation.result.stats.new_tokens < 6
    result = replace(turn.generation.result, text="")
    unheard = replace(turn, generation=SimpleNamespace(result=result))
    assert conversation.keep(unheard) == "ended before its first word: the message is not kept"
    assert len(conversation.whole) == 2


def test_what_is_refused_changes_nothing(conversation: Conversation, tmp_path: Path) -> None:
    answered(conversation, "word1")
    before, settings = conversation.whole, conversation.settings
    for typed, message in {
        "/foo": "/foo: no such command; /help lists them, and // begins a message with a slash",
        "/save": "/save: give a file",
        f"/save {tmp_path}": "is no file; give another name",
        f"/save {tmp_path}/none/x": "give a file that can be written",
        f"/load {tmp_path}/none": "No such file or directory; give a file that /save has written",
        "/set heat 1": "/set has no setting 'heat': it has bad_words_ids, ",
    }.items():
        with pytest.raises(ValueError, match=message.replace("//", "//")):
            conversation.take(typed)
    assert (conversation.whole, conversation.settings) == (before, settings)
    with pytest.raises(ValueError, match="there is no message yet"):
        Conversation(conversation._generator, {}, TEMPLATE).take("/retry")


@pytest.mark.parametrize(
    ("name", "nonsense", "told"),
    [
        ("temperature", "hot", "temperature='hot': give a number 0 or more"),
        ("top_p", "2", "in \\[0, 1\\]"),
        ("top_k", "1.5", "give a whole number from -1 to 2147483647"),
        ("max_new_tokens", "many", "give a whole number from 1 to 2147483647"),
        ("ignore_eos", "perhaps", "give True or False"),
        ("logit_bias", "{1: 500}", "-100, 100"),
        ("stop", "5", "give texts of 1 to 65536 Unicode characters"),
    ],
)
def test_a_setting_tells_its_range(conversation: Conversation, name: str, nonsense: str, told: str) -> None:
    before = conversation.settings
    with pytest.raises(ValueError, match=told):
        conversation.take(f"/set {name} {nonsense}")
    assert conversation.settings == before


def test_settings_count_from_the_next_answer_on(generator: OrdinaryDecoding, conversation: Conversation) -> None:
    assert str(conversation.take("/set temperature 0.5")).startswith("temperature=0.5: ")
    conversation.take("/set seed 7")
    conversation.take("/set stop word9")
    assert conversation.settings == {"max_new_tokens": 6, "temperature": 0.5, "seed": 7, "stop": "word9"}
    messages = [{"role": "user", "content": "word1"}]
    expected = generator.chat(messages, chat_template=TEMPLATE, **conversation.settings)
    assert answered(conversation, "word1").token_ids == expected.token_ids
    assert answered(conversation, "/retry").token_ids == expected.token_ids
    told = str(conversation.take("/set")).splitlines()
    assert [line.split("=")[0] for line in told] == list(SETTABLE)
    for name in ("temperature", "stop", "seed", "max_new_tokens"):
        conversation.take(f"/set {name} none")
    assert conversation.settings == {}
    assert str(conversation.take("/set seed")).startswith("seed=by chance: ")
    assert str(conversation.take("/set max_new_tokens")).startswith("max_new_tokens=as many as fit: ")


def test_values_are_typed_as_python_has_them() -> None:
    typed = ("0.5", "7", "true", "False", "word", "[1, 2]", "{464: -100}", "'5'", "(" * 999)
    assert [value_of(text) for text in typed[:-1]] == [0.5, 7, True, False, "word", [1, 2], {464: -100}, "5"]
    assert value_of(typed[-1]) == typed[-1]


def test_a_greedy_retry_says_why_it_is_the_same(conversation: Conversation) -> None:
    answered(conversation, "word1")
    turn = conversation.take("/retry")
    assert isinstance(turn, Turn)
    assert "temperature 0.8" in turn.note
    conversation.take("/set temperature 0.8")
    sampled = conversation.take("/retry")
    assert isinstance(sampled, Turn)
    assert sampled.note == ""


def test_a_conversation_is_written_and_read(conversation: Conversation, tmp_path: Path) -> None:
    conversation.take("/system word3")
    answered(conversation, "word1 é")
    file = tmp_path / "one chat.json"
    assert conversation.take(f"/save {file}") == f"3 messages written to {file}"
    other = Conversation(conversation._generator, {"max_new_tokens": 6}, TEMPLATE)
    assert other.take(f"/load {file}") == "3 messages read"
    assert (other.whole, other.system) == (conversation.whole, "word3")
    assert answered(other, "word2").token_ids == answered(conversation, "word2").token_ids
    for held, reason in (
        ("{", "no conversation"),
        ("[" * 99999, "no conversation"),
        ("3", "has no list of messages"),
        (json.dumps([{"role": "tool", "content": "x"}]), "message 1 has no content, or no role of system, user"),
        (json.dumps([{"role": "user"}]), "message 1 has no content"),
        (json.dumps({"messages": [{"role": r, "content": ""} for r in ("user", "system")]}), "message 2 is a system"),
    ):
        file.write_text(held)
        with pytest.raises(ValueError, match=reason):
            other.take(f"/load {file}")
    assert len(other.whole) == 5


def test_a_full_context_is_told_and_nothing_dropped(generator: OrdinaryDecoding) -> None:
    most = generator.info.max_positions
    assert most is not None
    conversation = Conversation(generator, {"ignore_eos": True}, TEMPLATE)
    with pytest.raises(ValueError, match=f"and {most} fit: it is not sent; give a shorter one"):
        conversation.take("word1 " * most)
    turn = conversation.take("w" * (most - 40))
    assert isinstance(turn, Turn)
    assert list(turn.generation)
    assert len(turn.generation.result.prompt_ids) + turn.generation.result.stats.new_tokens == most
    assert conversation.keep(turn).startswith("ended, for the context is full; /clear begins a new conversation")
    before = conversation.whole
    with pytest.raises(ValueError, match=f"and {most} fit: it is not sent; /clear begins a new conversation"):
        conversation.take("word2")
    assert conversation.whole == before
    short = Conversation(generator, {"ignore_eos": True, "max_new_tokens": 2}, TEMPLATE)
    cut = short.take("word1")
    assert isinstance(cut, Turn)
    list(cut.generation)
    assert short.keep(cut).startswith("ended at max_new_tokens=2; /set max_new_tokens none")


def test_help_names_every_command(conversation: Conversation) -> None:
    shown = str(conversation.take("/help"))
    assert all(f"/{name}" in shown for name in COMMANDS)


def test_an_answer_of_a_model_that_names_no_end_has_one(tmp_path: Path) -> None:
    """One stage has room for far more."""
    Specimen("mamba2", "endless", {"max_position_embeddings": None}).build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with PPDRuntime(tmp_path, stages=1, dtype="float32", max_cache_tokens=20_000) as runtime:
        assert runtime.info.max_positions is None
        assert Conversation(runtime, {}, TEMPLATE)._left(10) == 4096
        assert Conversation(runtime, {"max_new_tokens": 5000}, TEMPLATE)._left(10) == 5000
        assert Conversation(runtime, {}, TEMPLATE)._left(19_990) == 10
