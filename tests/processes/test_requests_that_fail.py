"""Refused and failed requests over sockets: their error comes from another process, which lives on."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from commands import ppd, refused
from damage import with_numbers
from models_for_tests import build_tokenizer

import ppd_runtime.client.request
from ppd_runtime import OrdinaryDecoding, PPDRuntime, RequestError, SamplingParams
from ppd_runtime.client.ending import Ending
from ppd_runtime.pipeline import wire

pytestmark = pytest.mark.processes
PROMPT, DAMAGED = [40, 7, 291, 65], 17
ASKED = {"max_new_tokens": 8, "ignore_eos": True}
LAYOUTS = {"paper": {"k": 1}, "stages": {"stages": 2, "k": 2, "rows": 2, "max_requests": 4}}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without numbers for what follows one token, whose tokenizer has a token more than the model."""
    whole, out = model_folder("llama", num_layers=4, tied=False), tmp_path_factory.mktemp("damaged") / "model"
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(with_numbers(whole, out, "model.embed_tokens.weight", DAMAGED, math.nan))
    return str(out)


@pytest.fixture(scope="module")
def expected(folder: str) -> tuple[int, ...]:
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        return ordinary.generate(PROMPT, **ASKED).token_ids


@pytest.fixture(scope="module", params=LAYOUTS)
def runtime(request: pytest.FixtureRequest, folder: str) -> Iterator[PPDRuntime]:
    with PPDRuntime(folder, dtype="float32", launcher="processes", **LAYOUTS[request.param]) as found:
        yield found
        assert found.restarts == 0


def test_a_request_fails_alone(runtime: PPDRuntime, expected: tuple[int, ...]) -> None:
    """Whether a worker finds no numbers or refuses it; others go on, at once where they can."""

    def ask(number: int) -> tuple[int, ...] | None:
        with suppress(RequestError):
            return runtime.generate([DAMAGED, *PROMPT] if number % 2 else PROMPT, **ASKED).token_ids
        return None

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(8))) == [expected, None] * 4
    with pytest.raises(RequestError, match="the model.s logits for position 5 are NaN or infinite"):
        list(runtime.stream([*PROMPT, DAMAGED], **ASKED))
    began = time.monotonic()
    with pytest.raises(RequestError, match="refuses the request: token id 300 is not among the model.s 300"):
        list(runtime._steps([5, 300], SamplingParams(3), 0, Ending(None)))
    assert time.monotonic() - began < 60
    assert runtime.generate(PROMPT, **ASKED).token_ids == expected


def test_workers_of_another_version_are_named(
    runtime: PPDRuntime, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side can read the other, and nobody waits for what does not come."""
    monkeypatch.setattr(ppd_runtime.client.request, "_ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(ppd_runtime.client.request, "_END_DEADLINE_S", 0.2)
    with monkeypatch.context() as patch, pytest.raises(RequestError) as raised:
        patch.setattr(wire, "WIRE_VERSION", 99)
        runtime.generate(PROMPT, **ASKED)
    assert str(raised.value).endswith(" sends cannot be read: not a message of wire version 99")
    assert runtime.generate(PROMPT, **ASKED).token_ids == expected


def test_the_command_line_tells_it_in_a_line(folder: str) -> None:
    asked = f"generate --model {folder} --k 1 --transport local --dtype float32 --max-new-tokens 4".split()
    line = refused(*asked, "fox <pad>")
    assert line.startswith("ppd: the tokenizer makes '<pad>' token id 300, which the model lacks")
    text = build_tokenizer().decode([DAMAGED])
    result = ppd(*asked, text)
    assert result.exit_code == 1
    assert "ppd: the model's logits for position 1 are NaN or infinite: a weight is damaged" in result.stderr
