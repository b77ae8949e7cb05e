"""Files as other programs write them open as those programs' own readers open them, or are refused in one line."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from real_files.folders import MESSAGES, OPENED, REFUSED, Made
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer

NEW_TOKENS = 8
STAGED = ("LlamaForCausalLM in shards", "LlamaModel in shards", "one file beside shards", "a hub cache of shards")
STAGED += (
    "yarn, as Qwen2.5's model card",
    "dynamic rope_scaling, as InternLM2",
    "added tokens, resized",
    "GGUF with equal tokens",
)
_OF_WEIGHTS = re.compile("LlamaFor|LlamaModel|Gemma|file|weights|safetensors|around|head|resized|shards")
PACKED = [line for line in OPENED if _OF_WEIGHTS.search(line)]
"""Whose weights are not simply those of one file with the model's names."""
CHATS = ("chat_template.jinja", "a template in tokenizer_config.json", "templates by name")


@pytest.fixture(autouse=True)
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is in the folder in which a line is made."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def generated(made: Made) -> list[int]:
    """The tokens that transformers gives."""
    prompt = AutoTokenizer.from_pretrained(made.tokenizer)(made.prompt, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(made.oracle, dtype="float32").eval()
    with torch.inference_mode():
        text = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
    return text[0, prompt.shape[1] :].tolist()


def tokens_of(generator: Any, made: Made) -> list[int]:
    return list(generator.generate(made.prompt, max_new_tokens=NEW_TOKENS).token_ids)


@pytest.mark.parametrize("line", OPENED)
def test_tokens_are_those_of_transformers(line: str, tmp_path: Path) -> None:
    made = OPENED[line](tmp_path)
    assert tokens_of(OrdinaryDecoding(made.model, dtype="float32"), made) == generated(made)


@pytest.mark.parametrize("line", PACKED)
def test_int8_is_made_of_the_same_weights(line: str, tmp_path: Path) -> None:
    """Those that `from_pretrained` loads, saved anew."""
    made = OPENED[line](tmp_path)
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(made.oracle).save_pretrained(again)
    AutoTokenizer.from_pretrained(made.tokenizer).save_pretrained(again)
    ours, theirs = (OrdinaryDecoding(model, weights="int8") for model in (made.model, again))
    assert tokens_of(ours, made) == tokens_of(theirs, made)


@pytest.mark.parametrize("line", STAGED)
def test_stages_give_the_same_tokens(line: str, tmp_path: Path) -> None:
    made = OPENED[line](tmp_path)
    with PPDRuntime(made.model, stages=2, transport="local", dtype="float32") as runtime:
        assert tokens_of(runtime, made) == generated(made)


@pytest.mark.parametrize("line", CHATS)
def test_chats_are_those_of_transformers(line: str, tmp_path: Path) -> None:
    made = OPENED[line](tmp_path)
    expected = AutoTokenizer.from_pretrained(made.tokenizer).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert OrdinaryDecoding(made.model).chat_prompt(MESSAGES) == expected


def test_tokens_that_end_a_text_are_those_of_its_files(tmp_path: Path) -> None:
    info = describe(OPENED["Llama 3's generation_config.json"](tmp_path).model)
    assert info.eos_token_ids == {0, 17, 18}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_is_one_line(line: str, tmp_path: Path) -> None:
    make, words = REFUSED[line]
    made = make(tmp_path)
    with pytest.raises(ValueError) as caught:
        OrdinaryDecoding(made.model)
    assert words in str(caught.value)
    assert repr(made.model) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizers_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    text = "The fox – café <tool><pad> 🦊"
    for number, line in enumerate(("a slow tokenizer", "added tokens, resized", "added tokens that no prompt has")):
        made = OPENED[line](tmp_path / str(number))
        ours, theirs = load_tokenizer(describe(made.model)), AutoTokenizer.from_pretrained(made.tokenizer)
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
