"""Ways in that people expect of a library for text generation: forms of prompts, settings, results."""

import contextlib
import inspect
import json
import logging
import pydoc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BatchEncoding,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from ppd_runtime import OrdinaryDecoding, PPDRuntime, RuntimeConfig, decode, open_method
from ppd_runtime.methods import in_process
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.prompts import token_ids_of
from ppd_runtime.methods.self_speculative import SelfSpeculativeDecoding
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import IN_PROCESS_SETTINGS

ModelFolder = Callable[..., Path]
PROMPT = [40, 7, 291, 65, 133, 9, 12, 250]
NEW_SETTINGS = (
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05, "seed": 3},
    {"temperature": 1.0, "frequency_penalty": 0.8, "top_p": 0.95, "seed": 4},
    {"logits_processors": (NoRepeatNGramLogitsProcessor(2),)},
    {"temperature": 0.8, "logits_processors": (SuppressTokensLogitsProcessor([5, 6, 7]),), "min_p": 0.1, "seed": 5},
)
WAYS = {
    "pipelined, k=1": {"method": "ppd", "speculation": "always", "k": 1, "transport": "local"},
    "pipelined, k=3": {"method": "ppd", "speculation": "always", "k": 3, "transport": "local"},
    "layerskip": {"method": "layerskip", "exit_layer": 2, "num_speculations": 4},
    "swift": {"method": "swift", "threshold": 0.3, "context_window": 6, "search_steps": 40},
}


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> str:
    return str(model_folder("llama", num_layers=5, quiet_from=2))


@pytest.fixture(scope="module")
def ordinary(folder: str) -> OrdinaryDecoding:
    return OrdinaryDecoding(folder, dtype="float32")


@pytest.fixture(scope="module")
def expected(ordinary: OrdinaryDecoding) -> list[tuple[int, ...]]:
    """Ordinary decoding's tokens with each of the new settings."""
    asked = {"max_new_tokens": 30, "ignore_eos": True}
    return [ordinary.generate(PROMPT, **asked, **settings).token_ids for settings in NEW_SETTINGS]


def repeated(presence: float, frequency: float, prompt_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """OpenAI's penalties over what follows the prompt, as a processor of transformers'."""

    def change(input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, prompt_size:], minlength=scores.shape[-1])
        return scores - torch.tensor(frequency) * counts - torch.tensor(presence) * (counts > 0)

    return change


def test_greedy_tokens_are_transformers_generate_with_the_same_processors(
    folder: str, ordinary: OrdinaryDecoding
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    grids = [(0.0, 0.0, ()), (1.5, 0.0, ()), (0.0, 0.7, ()), (-0.3, 0.2, (NoRepeatNGramLogitsProcessor(2),))]
    texts = []
    for presence, frequency, processors in grids:
        output = model.generate(
            torch.tensor([PROMPT]),
            do_sample=False,
            max_new_tokens=45,
            repetition_penalty=1.1,
            logits_processor=[repeated(presence, frequency, len(PROMPT)), *processors],
        )
        result = ordinary.generate(
            PROMPT,
            max_new_tokens=45,
            repetition_penalty=1.1,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logits_processors=processors,
        )
        texts.append(result.token_ids)
        assert list(result.token_ids) == output[0, len(PROMPT) :].tolist()
    assert len(set(texts)) == len(grids)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_with_the_new_settings_are_ordinary_decodings(
    folder: str, expected: list[tuple[int, ...]], way: str
) -> None:
    with open_method(folder, **WAYS[way], dtype="float32") as method:
        hits = 0
        for settings, tokens in zip(NEW_SETTINGS, expected, strict=True):
            result = method.generate(PROMPT, max_new_tokens=30, ignore_eos=True, **settings)
            assert result.token_ids == tokens, settings
            hits += result.stats.hits
        assert hits > 15, "guesses go through the same settings"


def test_rejection_sampling_keeps_to_the_new_settings(folder: str) -> None:
    """Its tokens are its own, but never one that a filter or a processor forbids."""
    forbidden = list(range(0, 300, 2))
    with open_method(folder, **WAYS["layerskip"], acceptance="rejection", dtype="float32") as method:
        processors = (SuppressTokensLogitsProcessor(forbidden),)
        result = method.generate(PROMPT, max_new_tokens=60, temperature=1.0, logits_processors=processors)
        assert not set(result.token_ids) & set(forbidden)
        high = method.generate(PROMPT, max_new_tokens=60, temperature=1.0, min_p=1.0, ignore_eos=True)
        greedy = method.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
        assert high.token_ids == greedy.token_ids, "nothing but the likeliest token is as probable as itself"


@pytest.mark.parametrize("way", ["ordinary", *WAYS])
def test_stop_tokens_end_a_text_and_are_in_it(folder: str, ordinary: OrdinaryDecoding, way: str) -> None:
    whole = ordinary.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    stop = next(token for token in whole.token_ids[5:] if token not in whole.token_ids[:5])
    cut = whole.token_ids[: whole.token_ids.index(stop) + 1]
    with ordinary if way == "ordinary" else open_method(folder, **WAYS[way], dtype="float32") as method:
        for given in (stop, [stop, 299]):
            result = method.generate(PROMPT, max_new_tokens=30, ignore_eos=True, stop_token_ids=given)
            assert (result.token_ids, result.finish_reason) == (cut, "stop")
            assert result.text == ordinary.tokenizer.decode(cut, skip_special_tokens=True)
        with pytest.raises(ValueError, match="stop_token_ids=300: is outside the vocabulary, choose 0 to 299"):
            method.generate(PROMPT, stop_token_ids=300)
        with pytest.raises(ValueError, match="logit_bias=300: is outside the vocabulary, choose 0 to 299"):
            method.generate(PROMPT, logit_bias={5: 1.0, 300: -1.0})


def test_a_request_that_is_split_goes_on_as_a_whole_one(ordinary: OrdinaryDecoding) -> None:
    settings = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "ignore_eos": True}
    whole = ordinary.generate(PROMPT, max_new_tokens=40, **settings)
    first = ordinary.generate(PROMPT, max_new_tokens=15, **settings)
    second = ordinary.generate([*PROMPT, *first.token_ids], max_new_tokens=25, num_generated=15, **settings)
    assert first.token_ids + second.token_ids == whole.token_ids
    forgetful = ordinary.generate([*PROMPT, *first.token_ids], max_new_tokens=25, **settings)
    assert first.token_ids + forgetful.token_ids != whole.token_ids
    with pytest.raises(ValueError, match="num_generated=9: the prompt has 8 tokens"):
        ordinary.generate(PROMPT, num_generated=9)


def test_functions_do_not_go_to_other_processes(folder: str) -> None:
    runtime = PPDRuntime(folder, k=1, launcher="processes")
    for call in (runtime.generate, runtime.stream):
        with pytest.raises(ValueError, match="transport='local'") as error:
            call(PROMPT, logits_processors=NoRepeatNGramLogitsProcessor(2))
        assert "\n" not in str(error.value)
    runtime.close()


@pytest.mark.parametrize("way", ["ordinary", "pipelined, k=1"])
def test_a_processor_that_fails_is_told_and_nothing_hangs(folder: str, ordinary: OrdinaryDecoding, way: str) -> None:
    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError("in the user's function")

    restarts = {} if way == "ordinary" else {"max_restarts": 0}
    with (
        ordinary if way == "ordinary" else open_method(folder, **WAYS[way], **restarts) as method,
        pytest.raises((ZeroDivisionError, RuntimeError), match="in the user's function"),
    ):
        method.generate(PROMPT, max_new_tokens=5, logits_processors=fail)
    assert len(ordinary.generate(PROMPT, max_new_tokens=5, ignore_eos=True).token_ids) == 5


FORMS = {
    "list": PROMPT,
    "tuple": tuple(PROMPT),
    "tensor": torch.tensor(PROMPT),
    "tensor of one row": torch.tensor([PROMPT]),
    "small integers": torch.tensor(PROMPT, dtype=torch.int16),
    "array": np.array(PROMPT),
    "array of one row": np.array([PROMPT], dtype=np.int32),
    "list of one row": [PROMPT],
    "array's numbers": list(np.array(PROMPT)),
    "iterator": PROMPT,
    "encoding": BatchEncoding({"input_ids": PROMPT, "attention_mask": [1] * 8}),
    "encoding of tensors": BatchEncoding({"input_ids": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 8)}),
    "dictionary": {"input_ids": PROMPT},
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts_come_in_many_forms(ordinary: OrdinaryDecoding, form: str) -> None:
    prompt = iter(FORMS[form]) if form == "iterator" else FORMS[form]
    assert token_ids_of(prompt, ordinary.tokenizer, 300) == PROMPT


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor([PROMPT, PROMPT]), "holds 2 rows of token ids: give one at a time"),
        (torch.tensor([1.0, 2.0]), "token id 1.0: give a text or a list of whole numbers"),
        (torch.tensor([True]), "token id True"),
        (np.array([300]), "token id 300 is outside the vocabulary"),
        (torch.tensor([], dtype=torch.int64), "the prompt is empty"),
        (BatchEncoding({"attention_mask": [1]}), "has no input_ids"),
        (BatchEncoding({"input_ids": [0, 5], "attention_mask": [0, 1]}), "without padding"),
        (["a text", 5], "prompt 2 of 2 is 5: give a list of texts, or one prompt"),
        (b"bytes", "give a text or a list of token ids"),
        ("", "the prompt is empty"),
    ],
)
def test_other_prompts_are_refused_in_a_line(ordinary: OrdinaryDecoding, prompt: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ordinary.generate(prompt, max_new_tokens=1)
    assert "\n" not in str(error.value)


@pytest.fixture
def beginning(folder: str) -> TextGenerator:
    """A model whose tokenizer puts a beginning token before every text."""
    generator = OrdinaryDecoding(folder)
    tokenizer = generator.tokenizer
    tokenizer.bos_token = "<|end|>"
    plain = tokenizer.encode

    def encode(text: str, add_special_tokens: bool = True, **_: object) -> list[int]:
        return ([tokenizer.bos_token_id] if add_special_tokens else []) + plain(text)

    tokenizer.encode = encode
    return generator


def test_special_tokens_can_be_left_out(beginning: TextGenerator, caplog: pytest.LogCaptureFixture) -> None:
    templated = "<|end|>The quick"
    with caplog.at_level(logging.WARNING):
        with_them = beginning.generate("The quick", max_new_tokens=1)
        without = beginning.generate(templated, max_new_tokens=1, add_special_tokens=False)
    assert with_them.prompt_ids == without.prompt_ids
    assert not caplog.records
    beginning.generate(templated, max_new_tokens=1)
    assert "begins with <|end|> and the tokenizer adds another: give add_special_tokens=False" in caplog.text
    with pytest.raises(ValueError, match="add_special_tokens=False is for a text"):
        beginning.generate(PROMPT, add_special_tokens=False)
    with pytest.raises(ValueError, match="add_special_tokens='no': give True or False"):
        beginning.stream("a", add_special_tokens="no")


def test_settings_come_by_name_or_as_params(folder: str, ordinary: OrdinaryDecoding) -> None:
    params = SamplingParams(max_new_tokens=7, temperature=0.9, seed=3)
    by_name = ordinary.generate(PROMPT, max_new_tokens=7, temperature=0.9, seed=3, top_k=-1).token_ids
    assert ordinary.generate(PROMPT, params).token_ids == by_name
    assert decode(folder, PROMPT, "autoregressive", dtype="float32", params=params).token_ids == by_name
    stream = ordinary.stream(PROMPT, params=params)
    assert tuple(event.token_id for event in stream) == by_name
    with pytest.raises(ValueError, match="params and seed are both given"):
        ordinary.generate(PROMPT, params, seed=3)
    with pytest.raises(ValueError, match="no setting 'max_tokens': it has"):
        ordinary.stream(PROMPT, max_tokens=3)


def test_signatures_show_every_setting_with_type_and_default() -> None:
    shown = inspect.signature(PPDRuntime).parameters
    for field in fields(RuntimeConfig):
        assert shown[field.name].default == field.default
        assert shown[field.name].annotation in (field.type, str | Path)
    assert {*shown} - {field.name for field in fields(RuntimeConfig)} == {"config", "emulate", "progress"}
    for ways, own in ((OrdinaryDecoding, {"emulate"}), (SelfSpeculativeDecoding, {"method", "acceptance", "stage"})):
        assert {*inspect.signature(ways).parameters} == {*IN_PROCESS_SETTINGS} | own
    assert "k: int | None = None" in pydoc.plain(pydoc.render_doc(PPDRuntime))


@pytest.mark.parametrize("method", ["autoregressive", "layerskip", "adaspeed", "swift"])
def test_each_method_has_its_kinds_of_passes_compiled_before_it_is_made(
    folder: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(in_process, "code_for", lambda *given: asked.append(tuple(given[-1])) or {})
    drafting = () if method == "autoregressive" else (PassKind.SEVERAL,)
    less = (PassKind.WITHOUT_ATTENTION, PassKind.WITHOUT_MLP) if method == "swift" else ()
    open_method(folder, method, compile=True, dtype="float32").close()
    assert asked == [(PassKind.ONE, *drafting, *less)]


@pytest.mark.parametrize(("workers", "siblings"), [(3, (1, 1, 1)), (2, (2, 1)), (1, (3,))])
def test_each_worker_has_its_kinds_of_passes(folder: str, workers: int, siblings: tuple[int, ...]) -> None:
    made = PPDRuntime(folder, k=3, workers=workers, transport="local", dtype="float32")
    with contextlib.closing(made) as runtime:
        assert [spec.pass_kinds for spec in runtime._specs] == [{1}, *({1, share} for share in siblings)]


def test_workers_know_at_what_length_a_text_is_as_heavy_as_the_weights(folder: str) -> None:
    (weights,) = Path(folder).glob("*.safetensors")
    config = AutoConfig.from_pretrained(folder)
    entries = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    place = {"k": 1, "transport": "local", "dtype": "bfloat16"}
    with contextlib.closing(PPDRuntime(folder, **place)) as runtime:
        assert {spec.heavy_length for spec in runtime._specs} == {weights.stat().st_size / entries}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fewer_workers_than_candidates_need_float32(folder: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=f"workers=2 with k=3 in {dtype}: .* give workers=3, or dtype='float32'"):
        PPDRuntime(folder, k=3, workers=2, transport="local", dtype=dtype)


@pytest.mark.parametrize("way", ["pipelined, k=3", "swift"])
def test_a_result_is_json_ready(folder: str, way: str) -> None:
    with open_method(folder, **WAYS[way], dtype="float32") as method:
        result = method.generate("The quick", max_new_tokens=6, ignore_eos=True)
    told = result.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["text"] == result.text
    assert told["token_ids"] == list(result.token_ids)
    assert told["prompt_ids"] == list(result.prompt_ids)
    assert told["finish_reason"] == "length"
    assert told["stats"]["match_rate"] == result.stats.match_rate
    assert told["stats"]["ledger"]["layers_s"] == result.stats.ledger.layers_s


def test_a_repr_tells_model_layout_and_devices(folder: str, ordinary: OrdinaryDecoding) -> None:
    assert repr(ordinary) == f"OrdinaryDecoding({folder!r}, 5 layers, cpu, float32)"
    with open_method(folder, **WAYS["layerskip"], dtype="float32", acceptance="rejection") as method:
        assert repr(method) == f"SelfSpeculativeDecoding(layerskip, {folder!r}, 5 layers, cpu, float32)"
    runtime = PPDRuntime(folder, k=3, workers=2, transport="local", dtype="float32")
    layout = "k=3, exit after layer 3 of 5, 2 sub-processes"
    assert repr(runtime) == f"PPDRuntime({folder!r}, {layout}, transport local, cpu, float32, not started)"
    with runtime:
        assert repr(runtime).endswith("float32, running)")
    assert repr(runtime).endswith("float32, closed)")
