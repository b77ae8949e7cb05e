"""Log-probabilities: the model's own, of every way of decoding, of texts and of prompts."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppd_runtime import OrdinaryDecoding, SamplingParams, open_method
from ppd_runtime.results import GenerationResult
from ppd_runtime.sampling.logprobs import LEAST, TokenLogprobs, packed, token_logprobs, unpacked

PROMPT = [5, 9, 200, 31, 7] * 60  # more than a chunk
SETTINGS = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": True}
METHODS = {
    "paper": ("ppd", {"k": 2, "transport": "local"}),
    "stages": ("ppd", {"stages": 2, "transport": "local"}),
    "layerskip": ("layerskip", {}),
    "swift": ("swift", {}),
    "rejection": ("layerskip", {"acceptance": "rejection"}),
}


@pytest.fixture(scope="module")
def ordinary(folder: str) -> Iterator[OrdinaryDecoding]:
    with OrdinaryDecoding(folder, dtype="float32") as found:
        yield found


@pytest.fixture(scope="module", params=[0.0, 0.8])
def expected(ordinary: OrdinaryDecoding, request: pytest.FixtureRequest) -> GenerationResult:
    return ordinary.generate(PROMPT, temperature=request.param, repetition_penalty=1.2, **SETTINGS)


def numbers(noted: tuple[TokenLogprobs, ...]) -> list[float]:
    return [number for one in noted for number in (one.logprob, *(logprob for _, logprob in one.top))]


@torch.inference_mode()
def test_they_are_the_log_softmax_of_the_models_logits(folder: str, expected: GenerationResult) -> None:
    text = [*expected.prompt_ids, *expected.token_ids]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = model(torch.tensor([text])).logits[0].log_softmax(-1)
    noted = [*expected.prompt_logprobs, *expected.logprobs]
    assert [one.token_id for one in noted] == text[1:]
    for one, row in zip(noted, right, strict=False):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [logprob for _, logprob in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_every_way_of_decoding_gives_them(folder: str, expected: GenerationResult, name: str) -> None:
    method, settings = METHODS[name]
    temperature = 0.0 if expected.logprobs[0].top[0][0] == expected.token_ids[0] else 0.8
    with open_method(folder, method, dtype="float32", **settings) as generator:
        found = generator.generate(PROMPT, temperature=temperature, repetition_penalty=1.2, **SETTINGS)
    assert [one.token_id for one in found.logprobs] == list(found.token_ids)
    assert found.prompt_logprobs == expected.prompt_logprobs
    if name == "rejection" and temperature:
        return
    assert found.token_ids == expected.token_ids
    if method == "ppd":
        assert found.logprobs == expected.logprobs
    assert numbers(found.logprobs) == pytest.approx(numbers(expected.logprobs), abs=1e-4)


def test_they_come_with_their_tokens(ordinary: OrdinaryDecoding) -> None:
    stream = ordinary.stream("a text", max_new_tokens=3, logprobs=0)
    events = list(stream)
    assert [event.logprobs.token_id for event in events] == [event.token_id for event in events]
    assert stream.result.logprobs == tuple(event.logprobs for event in events)
    assert stream.result.prompt_logprobs is None
    assert stream.result.to_dict()["logprobs"][0]["top"] == []
    unasked = ordinary.generate("a text", max_new_tokens=3)
    assert (unasked.logprobs, "logprobs" in unasked.to_dict()) == (None, False)


def test_infinite_logits_have_finite_ones() -> None:
    logits = torch.tensor([0.0, -float("inf"), 1.0])
    noted = token_logprobs(logits, 1, 5, 4)
    assert noted.logprob == LEAST
    assert [token for token, _ in noted.top] == [2, 0, 1]


def test_messages_hold_them_as_they_are() -> None:
    noted = (TokenLogprobs(4, -0.5, ((1, -0.25), (4, -0.5))), TokenLogprobs(5, -2.0, ((5, -2.0), (6, -3.0))))
    assert unpacked(*packed(noted), [4, 5]) == noted
    assert unpacked(*packed(noted[:1]), [4]) == noted[:1]
    with pytest.raises(ValueError, match="for 3 tokens"):
        unpacked(*packed(noted), [4, 5, 6])


@pytest.mark.parametrize("wrong", [{"logprobs": 21}, {"logprobs": -1}, {"logprobs": True}, {"prompt_logprobs": True}])
def test_wrong_settings_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
