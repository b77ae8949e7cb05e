"""What a client is told of a request that fails: the reason, as an answer or as a stream's last event."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from damage import with_numbers
from models_for_tests import build_tokenizer, save_model
from servers import TEMPLATE, Running, running
from ways import LAYOUTS

from ppd_runtime import OrdinaryDecoding, open_method

PROMPT = [5, 9, 200, 31]
ASKED = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
WAYS = {"ordinary": {"method": "autoregressive"}, "stages": LAYOUTS["stages of rows"]}


@pytest.fixture(scope="module")
def whole(model_folder: Callable[..., Path]) -> tuple[Path, tuple[int, ...]]:
    """A model, and its text."""
    folder = model_folder("llama", num_layers=4, tied=False)
    return folder, OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, max_new_tokens=24).token_ids


@pytest.fixture(scope="module", params=WAYS)
def server(
    request: pytest.FixtureRequest, whole: tuple[Path, tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """One whose model has no numbers for what follows the text's ninth token."""
    folder, text = whole
    place = ("model.embed_tokens.weight", text[8], math.nan)
    damaged = with_numbers(folder, tmp_path_factory.mktemp("damaged") / "model", *place)
    with open_method(str(damaged), dtype="float32", **WAYS[request.param]) as method, running(method) as found:
        yield found


def first_of(text: tuple[int, ...]) -> int:
    """Tokens up to the one that nothing can follow."""
    return 1 + text.index(text[8])


def test_a_request_that_fails_has_an_answer_that_says_why(
    server: Running, whole: tuple[Path, tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    good = first_of(whole[1])
    words = f"the model's logits for position {len(PROMPT) + good} are NaN or infinite"
    for asked in (ASKED, {**ASKED, "temperature": 0, "logprobs": 2}, {**ASKED, "n": 2}):
        answer = server.post("/v1/completions", **asked)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["message"].startswith(words)
        assert error["type"] == "server_error"
    assert server.post("/v1/completions", **{**ASKED, "max_tokens": good}).status_code == 200
    assert any(words in line and "request" in line for line in caplog.messages)
    assert server.taken == 0


def test_a_stream_that_fails_ends_with_an_event_that_says_why(
    server: Running, whole: tuple[Path, tuple[int, ...]]
) -> None:
    good = first_of(whole[1])
    with server.client() as client:
        *events, last, done = client.post("/v1/completions", json={**ASKED, "stream": True}).text.strip().split("\n\n")
    assert len(events) == good
    assert done == "data: [DONE]"
    assert f"position {len(PROMPT) + good} are NaN" in json.loads(last.removeprefix("data: "))["error"]["message"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": whole[0].name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        model = client.models.list().data[0].id
        stream = client.completions.create(**{**asked, "model": model}, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(openai.APIError, match="NaN or infinite"):
            list(stream)
    assert server.taken == 0


def test_tokens_that_the_model_lacks_are_refused_with_a_line(tmp_path: Path) -> None:
    folder, tokenizer = save_model(tmp_path / "model", "llama", num_layers=2), build_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    (tmp_path / "template").write_text(TEMPLATE)
    talk = [{"role": "user", "content": "a <pad>"}]
    with running(OrdinaryDecoding(folder), chat_template=str(tmp_path / "template")) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "a <pad>"}),
            ("/v1/completions", {"prompt": ["a", "a <pad>"], "stream": True}),
            ("/v1/chat/completions", {"messages": talk}),
            ("/tokenize", {"prompt": "a <pad>"}),
            ("/tokenize", {"messages": talk}),
        ):
            answer = server.post(path, **body)
            assert answer.status_code == 400, path
            assert answer.json()["error"]["message"].startswith("the tokenizer makes '<pad>' token id 300, which")
        for path, body in (
            ("/v1/completions", {"prompt": [5, 300]}),
            ("/v1/completions", {"prompt": "a", "stop_token_ids": [300]}),
            ("/detokenize", {"tokens": [5, 300]}),
        ):
            answer = server.post(path, **body)
            assert answer.status_code == 400, path
            assert "300" in answer.json()["error"]["message"]
        assert server.post("/v1/completions", prompt="a").status_code == 200


class Unreadable(OrdinaryDecoding):
    """Decoding whose files are gone."""

    def _steps(self, *_: object) -> Any:
        raise OSError(5, "Input/output error")
        yield


def test_an_error_of_a_file_is_not_taken_for_a_client_that_left(whole: tuple[Path, tuple[int, ...]]) -> None:
    with running(Unreadable(whole[0], dtype="float32")) as server, server.client() as client:
        answer = client.post("/v1/completions", json={**ASKED, "stream": True}).text
        assert "Input/output error" in json.loads(answer.split("\n\n")[0].removeprefix("data: "))["error"]["message"]
        assert server.taken == 0
