"""Completions between a prompt and a suffix."""

from collections.abc import Callable
from pathlib import Path

import pytest
from models_for_tests import VOCAB_SIZE, build_tokenizer
from servers import running

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.server.infill import infill_ids

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]


@pytest.fixture(scope="module")
def fills(model_folder: Callable[..., Path]) -> OrdinaryDecoding:
    """A model whose tokenizer has marks for it."""
    folder = model_folder("llama", num_layers=2, vocab_size=VOCAB_SIZE + 16, seed=9)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(folder)
    return OrdinaryDecoding(folder)


def test_a_text_is_filled_in(fills: OrdinaryDecoding) -> None:
    expected = fills.generate(f"{MARKS[0]}def f():{MARKS[1]}    return x\n{MARKS[2]}", max_new_tokens=5)
    asked = {"suffix": "    return x\n", "max_tokens": 5, "temperature": 0}
    with running(fills) as server:
        answer = server.post("/v1/completions", prompt="def f():", **asked).json()
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
        ids = fills.prompt_ids("def f():")
        echoed = server.post("/v1/completions", prompt=[ids, ids], echo=True, **asked).json()["choices"]
        assert [choice["text"] for choice in echoed] == [f"def f():{expected.text}"] * 2
        error = server.post("/v1/completions", prompt="a", suffix="b", echo=True, logprobs=1).json()["error"]
        assert (error["param"], "suffix='b': the prompt has another order" in error["message"]) == ("suffix", True)
        plain = server.post("/v1/completions", prompt="a", suffix="", max_tokens=3, temperature=0).json()
        assert plain["choices"][0]["text"] == fills.generate("a", max_new_tokens=3).text


def test_a_texts_beginning_stays_there(fills: OrdinaryDecoding) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "bos_token": "<s>"})
    before, between, behind = tokenizer.convert_tokens_to_ids(MARKS)
    start, (suffix,) = tokenizer.bos_token_id, tokenizer.encode("a")
    assert infill_ids([start, 5, 6], "a", tokenizer) == [start, before, 5, 6, between, suffix, behind]
    assert infill_ids([], "a", tokenizer) == [before, between, suffix, behind]


def test_a_model_without_marks_is_told_so(ordinary: OrdinaryDecoding) -> None:
    with running(ordinary) as server:
        answer = server.post("/v1/completions", prompt="a", suffix="end")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "suffix")
    assert error["message"] == "suffix='end': the model has no tokens to fill in a middle, leave it out"
