"""What a model's `generation_config.json` says counts as transformers' `generate` has it."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commands import refused
from families.specimens import BORDER, SPECIAL
from generation_files import DEMO, generated, with_generation
from models_for_tests import build_tokenizer

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.generation import generation_defaults
from ppd_runtime.sampling.params import FROM_THE_MODEL, SamplingParams

ModelFolder = Callable[..., Path]
PROMPT, NEW = "def read_lines(path):\n", 24


@pytest.fixture(scope="module")
def plain() -> Iterator[OrdinaryDecoding]:
    """The demo model without any such fields."""
    with OrdinaryDecoding("demo", dtype="float32") as ordinary:
        yield ordinary


@pytest.fixture(scope="module")
def text(plain: OrdinaryDecoding) -> tuple[int, ...]:
    """Its greedy text."""
    return plain.generate(PROMPT, max_new_tokens=NEW).token_ids


FIELDS: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.1},
    "a whole repetition_penalty, which generate takes as a float": lambda text: {"repetition_penalty": 2.0},
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[1], text[2]], [text[5]], [0]]},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[0], text[1]], -9.5], [[text[4]], -4.0]]},
    "suppress_tokens": lambda text: {"suppress_tokens": [text[2], -1, 10**6]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": [text[0], text[3]]},
    "an end": lambda text: {"eos_token_id": [text[9], 0]},
    "min_new_tokens": lambda text: {"eos_token_id": [text[9], 0], "min_new_tokens": 15},
    "min_length": lambda text: {"eos_token_id": [text[9], 0], "min_length": 30},
    "both of them": lambda text: {"eos_token_id": [text[9], 0], "min_length": 90, "min_new_tokens": 12},
    "forced_eos_token_id": lambda text: {"forced_eos_token_id": [7, 8]},
    "exponential_decay_length_penalty": lambda text: {"exponential_decay_length_penalty": [4, 1.2]},
    "renormalize_logits": lambda text: {"renormalize_logits": True, "repetition_penalty": 1.3},
    "many": lambda text: {
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 20,
        "suppress_tokens": [text[2]],
        "begin_suppress_tokens": [text[0]],
        "bad_words_ids": [[text[1]]],
        "exponential_decay_length_penalty": [10, 1.1],
        "encoder_repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_greedy_tokens_are_generates_with_each_field(
    plain: OrdinaryDecoding, text: tuple[int, ...], tmp_path: Path, name: str
) -> None:
    folder = with_generation(tmp_path / "model", DEMO, {"eos_token_id": 0} | FIELDS[name](text))
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        result = ordinary.generate(PROMPT, max_new_tokens=NEW)
    expected = generated(folder, list(result.prompt_ids), NEW)
    assert result.token_ids == expected
    assert expected != text, "else the field was not tested"


def test_they_can_be_left_out_but_for_the_tokens_that_end_a_text(text: tuple[int, ...], tmp_path: Path) -> None:
    fields = FIELDS["many"](text) | {"eos_token_id": [text[9], 0], "temperature": 0.5}
    folder = with_generation(tmp_path / "model", DEMO, fields)
    with OrdinaryDecoding(folder, dtype="float32", generation_config=False) as without:
        assert without.generate(PROMPT, max_new_tokens=NEW).token_ids == text[: text.index(text[9]) + 1]
        assert without.defaults.temperature is None


def test_a_prompt_of_one_token_is_followed_by_the_forced_one(plain: OrdinaryDecoding, tmp_path: Path) -> None:
    fields = {"eos_token_id": 0, "forced_bos_token_id": 77, "begin_suppress_tokens": [78], "min_new_tokens": 5}
    folder = with_generation(tmp_path / "model", DEMO, fields)
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        for prompt in ([300], [300, 301]):
            result = ordinary.generate(prompt, max_new_tokens=12)
            assert result.token_ids == generated(folder, prompt, 12)
            assert (result.token_ids[0] == 77) == (len(prompt) == 1)


FILES: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "Qwen2.5-7B-Instruct": (
        {"bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
         "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"},
        {"repetition_penalty": 1.05, "top_p": 0.8, "top_k": 20}, 0.7),
    "Qwen-7B-Chat": (
        {"chat_format": "chatml", "eos_token_id": 151643, "pad_token_id": 151643, "max_window_size": 6144,
         "max_new_tokens": 512, "do_sample": True, "top_k": 0, "top_p": 0.8, "transformers_version": "4.31.0"},
        {"top_k": 0, "top_p": 0.8}, None),
    "Llama-3.1-8B-Instruct": (
        {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6,
         "top_p": 0.9, "transformers_version": "4.42.3"},
        {"top_p": 0.9}, 0.6),
    "gemma-3-1b-it": (
        {"bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106],
         "pad_token_id": 0, "top_k": 64, "top_p": 0.95},
        {"top_k": 64, "top_p": 0.95}, None),
    "a speech model's": (
        {"begin_suppress_tokens": [220, 256], "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25], "eos_token_id": 0,
         "is_multilingual": True, "lang_to_id": {"<|en|>": 259}, "max_length": 448, "max_initial_timestamp_index": 50,
         "return_timestamps": False},
        {"begin_suppress_tokens": (220, 256), "suppress_tokens": (1, 2, 7, 8, 9, 10, 14, 25)}, None),
    "an old file with every default": (
        {"max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1,
         "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
         "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
         "num_return_sequences": 1, "output_scores": False, "forced_bos_token_id": None, "forced_eos_token_id": None,
         "remove_invalid_values": False, "exponential_decay_length_penalty": None, "suppress_tokens": None,
         "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": None, "eos_token_id": 0},
        {"min_length": 0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
         "encoder_no_repeat_ngram_size": 0}, 1.0),
}  # fmt: skip
"""As makers ship them, what requests have by them, and the temperature of a server's clients."""


@pytest.mark.parametrize("name", FILES)
def test_files_as_makers_ship_them(
    plain: OrdinaryDecoding, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields, expected, temperature = FILES[name]
    folder, few = with_generation(tmp_path / "model", DEMO, fields), 12
    defaults = generation_defaults(describe(str(folder)))
    assert (defaults.params, defaults.temperature) == (SamplingParams(**expected), temperature)
    assert not caplog.records, "nothing is left out"
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        result = ordinary.generate(PROMPT, max_new_tokens=few)
        assert result.token_ids == generated(folder, list(result.prompt_ids), few), "greedy, whatever do_sample says"
        asked = {"max_new_tokens": few, "ignore_eos": True, "temperature": 0.8, "seed": 3}
        by_name = plain.generate(PROMPT, **asked, **expected)
        assert ordinary.generate(PROMPT, **asked).token_ids == by_name.token_ids


def test_without_the_file_those_of_the_configuration_count(tmp_path: Path) -> None:
    """As in models of earlier days, and as transformers has it."""
    folder = with_generation(tmp_path / "model", DEMO, None)
    config = json.loads((DEMO / "config.json").read_text()) | {"repetition_penalty": 1.5}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        result = ordinary.generate(PROMPT, max_new_tokens=NEW)
        assert ordinary.defaults.params.repetition_penalty == 1.5
    assert result.token_ids == generated(folder, list(result.prompt_ids), NEW)


def test_what_is_said_wins(tmp_path: Path, text: tuple[int, ...]) -> None:
    """Also what asks for nothing, by name and in an object; and what is not said stays the model's."""
    fields = {"eos_token_id": 0, "repetition_penalty": 1.5, "suppress_tokens": [text[3]], "top_k": 1}
    folder = with_generation(tmp_path / "model", DEMO, fields)
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        own = {"repetition_penalty": 1.0, "suppress_tokens": ()}
        assert ordinary.generate(PROMPT, max_new_tokens=NEW, **own).token_ids == text
        assert ordinary.generate(PROMPT, SamplingParams(max_new_tokens=NEW, **own)).token_ids == text
        assert text[3] not in ordinary.generate(PROMPT, max_new_tokens=NEW, repetition_penalty=1.0).token_ids
        sampled = {"max_new_tokens": NEW, "temperature": 1.0, "seed": 3, **own}
        assert ordinary.generate(PROMPT, **sampled).token_ids == text, "top_k=1 is the model's"
        assert ordinary.generate(PROMPT, **sampled, top_k=0).token_ids != text


def test_a_text_that_is_read_again_is_changed_as_a_whole(tmp_path: Path) -> None:
    """Where `generate` drops its cache, a request has two parts: places and counts are the whole text's."""
    specimen = next(one for one in SPECIAL if one.name == "phi3, longrope")
    source = tmp_path / "source"
    specimen.build().save_pretrained(source)
    build_tokenizer().save_pretrained(source)
    fields = {
        "eos_token_id": 11,
        "pad_token_id": 0,
        "min_new_tokens": 20,
        "begin_suppress_tokens": list(range(0, 300, 2)),
        "encoder_repetition_penalty": 1.3,
        "forced_eos_token_id": 12,
        "no_repeat_ngram_size": 2,
    }
    folder = with_generation(tmp_path / "model", source, fields)
    prompt = list(range(30, 30 + BORDER - 8))
    with OrdinaryDecoding(folder, dtype="float32") as ordinary:
        assert ordinary.info.recomputed_at == BORDER + 1
        result = ordinary.generate(prompt, max_new_tokens=30)
    assert result.token_ids == generated(folder, prompt, 30)
    assert result.token_ids[-1] == 12


LEFT_OUT = {"num_beams": 4, "typical_p": 0.9, "guidance_scale": 1.5, "watermarking_config": {"bias": 2.0}}


def test_what_cannot_be_taken_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_generation(tmp_path / "model", DEMO, {"eos_token_id": 0, "early_stopping": True, **LEFT_OUT})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            PPDRuntime(folder, k=1).close()
    (record,) = caplog.records
    assert all(f"{name}={value!r}" in record.getMessage() for name, value in LEFT_OUT.items())
    assert "early_stopping" not in record.getMessage(), "which is for several beams alone"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        PPDRuntime(with_generation(tmp_path / "other", DEMO, LEFT_OUT), k=1, generation_config=False).close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be finite and above 0"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty='1.1': give a number"),
        ({"bad_words_ids": [[5, 2048]]}, "bad_words_ids=2048: is outside the vocabulary, choose 0 to 2047"),
        ({"suppress_tokens": "5"}, "suppress_tokens='5': give a list of token ids"),
        ({"temperature": -1}, "temperature=-1: must be finite and 0 or more"),
        ({"min_new_tokens": 2.5}, "min_new_tokens=2.5: give a whole number"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    folder = with_generation(tmp_path / "model", DEMO, fields)
    for way in (PPDRuntime, OrdinaryDecoding):
        with pytest.raises(ValueError, match=re.escape(f"generation_config.json: {named}")) as error:
            way(folder)
        assert "generation_config=False" in str(error.value)
        assert "\n" not in str(error.value)
        with closing(way(folder, generation_config=False)):
            pass
    assert "--no-generation-config" in refused("generate", "import os", "--model", folder, "--k", 1)


def test_the_names_are_generates() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    assert set(FROM_THE_MODEL) <= fields
    model = SamplingParams(**{name: value for name, value in EVERY.items() if name in FROM_THE_MODEL})
    assert set(EVERY) == set(FROM_THE_MODEL)
    assert {name: getattr(SamplingParams().settled(model), name) for name in EVERY} == EVERY


EVERY: dict[str, Any] = {
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "encoder_repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "bad_words_ids": ((5,),),
    "sequence_bias": (((5,), 1.0),),
    "min_length": 5,
    "min_new_tokens": 5,
    "forced_bos_token_id": 5,
    "forced_eos_token_id": (5,),
    "exponential_decay_length_penalty": (5, 1.5),
    "suppress_tokens": (5,),
    "begin_suppress_tokens": (5,),
    "renormalize_logits": True,
}
