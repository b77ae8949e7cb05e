"""Where texts end, with every way of decoding: chats at the tokenizer's end token too, and at stop texts with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from models_for_tests import build_tokenizer
from servers import running
from test_ways_in import WAYS
from tokenizer_kinds import with_tokenizer

from ppd_runtime import OrdinaryDecoding, open_method
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.results import GenerationResult

MOST = 30
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
PROMPT = "user: hi\n"
ALL_WAYS = {
    **{name: WAYS[name] for name in ("pipelined, k=3", "layerskip", "swift")},
    "ordinary": {"method": "autoregressive"},
    "stages": {"method": "ppd", "stages": 2, "transport": "local"},
}


class Ending(NamedTuple):
    """A model whose tokenizer has, as its end token, one that the model's configuration does not name."""

    folder: Path
    whole: GenerationResult
    """What the model goes on with behind the prompt."""
    at: int
    """The place of the end token there."""
    written: str

    @property
    def before(self) -> str:
        """The piece that comes before."""
        return build_tokenizer().decode([self.whole.token_ids[self.at - 1]])


@pytest.fixture(scope="module")
def ending(model_folder, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    folder = model_folder("llama", num_layers=5, quiet_from=2)
    tokenizer = build_tokenizer()
    whole = OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, max_new_tokens=MOST)
    for at, token in enumerate(whole.token_ids):
        written = tokenizer.convert_ids_to_tokens(token)
        if at > 3 and token not in whole.token_ids[:at] and not written.isascii():  # in no prompt then
            tokenizer.add_special_tokens({"eos_token": written})
            copy = with_tokenizer(folder, tmp_path_factory.mktemp("ending"), tokenizer)
            return Ending(copy, whole, at, written)
    raise AssertionError("the model's text has no such token")


@pytest.fixture(params=ALL_WAYS)
def generator(ending: Ending, request: pytest.FixtureRequest) -> Iterator[TextGenerator]:
    with open_method(str(ending.folder), **ALL_WAYS[request.param], dtype="float32") as found:
        yield found


def test_chats_end_at_the_tokenizers_end_token_too(ending: Ending, generator: TextGenerator) -> None:
    asked = {"chat_template": TEMPLATE, "max_new_tokens": MOST}
    cut = ending.whole.token_ids[: ending.at + 1]
    result = generator.chat(MESSAGES, **asked)
    assert (result.token_ids, result.finish_reason) == (cut, "eos")
    assert result.text == generator.tokenizer.decode(cut[:-1])
    assert [one.finish_reason for one in generator.chat(MESSAGES, **asked, n=2)] == ["eos"] * 2
    assert generator.chat(MESSAGES, **asked, ignore_eos=True).token_ids == ending.whole.token_ids
    other = generator.generate(PROMPT, max_new_tokens=MOST)
    assert other.token_ids == ending.whole.token_ids, "as transformers' generate, which knows the configuration alone"
    assert generator.generate(PROMPT, max_new_tokens=MOST, eos_token_ids=cut[-1]).token_ids == cut
    with pytest.raises(ValueError, match="eos_token_ids=300: is outside the vocabulary, choose 0 to 299"):
        generator.generate(PROMPT, eos_token_ids=300)


def test_stop_texts_match_special_tokens_and_leave_no_part_of_theirs(ending: Ending, generator: TextGenerator) -> None:
    text = generator.tokenizer.decode(ending.whole.token_ids[: ending.at])
    for stop, expected in ((ending.written, text), (ending.before + ending.written, text.removesuffix(ending.before))):
        asked = {"max_new_tokens": MOST, "stop": ["never said", stop], "ignore_eos": True}
        result = generator.generate(PROMPT, **asked)
        assert (result.text, result.finish_reason) == (expected, "stop")
        assert result.token_ids == ending.whole.token_ids[: ending.at + 1]
        stream = generator.stream(PROMPT, **asked)
        assert "".join(event.text for event in stream) == stream.result.text == expected


def test_a_servers_chats_end_there_and_its_completions_do_not(ending: Ending, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    asked = {"max_tokens": MOST, "temperature": 0}
    with running(OrdinaryDecoding(ending.folder, dtype="float32"), chat_template=template) as server:
        chat = server.post("/v1/chat/completions", messages=MESSAGES, **asked).json()
        going_on = server.post("/v1/chat/completions", messages=MESSAGES, **asked, ignore_eos=True).json()
        stopped = server.post("/v1/completions", prompt=PROMPT, **asked, stop=ending.written).json()
        other = server.post("/v1/completions", prompt=PROMPT, **asked).json()
    assert (chat["choices"][0]["finish_reason"], chat["choices"][0]["ppd"]["finish_reason"]) == ("stop", "eos")
    counts = [answer["usage"]["completion_tokens"] for answer in (chat, going_on, stopped, other)]
    assert counts == [ending.at + 1, MOST, ending.at + 1, MOST]
    assert chat["choices"][0]["message"]["content"] == stopped["choices"][0]["text"]


def test_a_tokenizer_without_an_end_token_changes_nothing(ending: Ending) -> None:
    generator = OrdinaryDecoding(ending.folder, dtype="float32")
    generator.tokenizer.eos_token = None
    result = generator.chat(MESSAGES, chat_template=TEMPLATE, max_new_tokens=MOST)
    assert result.token_ids == ending.whole.token_ids
