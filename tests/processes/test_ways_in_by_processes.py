"""Newer settings, and early endings, over sockets between processes."""

import pytest
from models_for_tests import END_ID

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice

pytestmark = pytest.mark.processes
PROMPT = [40, 7, 291, 65, 133, 9, 12, 250]
SETTINGS = (
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05, "seed": 3, "top_k": -1},
    {"frequency_penalty": 1.9, "stop_token_ids": [END_ID, 299, 17, 18, 19, 20]},
    {"num_generated": 5, "presence_penalty": 2.0},
    {
        "logit_bias": {60: 2.5, 61: -100},
        "suppress_tokens": [7, 8],
        "bad_words_ids": [[91, 92], [93]],
        "seed": 2**64 - 1,
    },
    {"exponential_decay_length_penalty": (5, 1.1), "no_repeat_ngram_size": 2, "stop_token_ids": [70]},
    {"temperature": 0.8, "sequence_bias": [[[5, 6], -3.0], [[7], 2.0]], "renormalize_logits": True},
    {"min_new_tokens": 30, "stop_token_ids": list(range(150)), "encoder_repetition_penalty": 1.2},
)


def test_settings_travel_and_a_request_can_be_ended(model_folder) -> None:
    folder = str(model_folder("llama", num_layers=6, hidden_size=256, quiet_from=3))
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    whole = ordinary.generate(PROMPT, max_new_tokens=300, ignore_eos=True).token_ids
    slow = EmulatedDevice(layer_ms=1.0)  # a whole text takes long enough to be ended in the middle of it
    with PPDRuntime(folder, k=1, dtype="float32", launcher="processes", emulate=slow) as runtime:
        for settings in SETTINGS:
            expected = ordinary.generate(PROMPT, max_new_tokens=40, ignore_eos=True, **settings)
            result = runtime.generate(PROMPT, max_new_tokens=40, ignore_eos=True, **settings)
            assert (result.token_ids, result.finish_reason) == (expected.token_ids, expected.finish_reason)
        timed = runtime.generate(PROMPT, max_new_tokens=300, ignore_eos=True, timeout_s=0.05)
        stream = runtime.stream(PROMPT, max_new_tokens=300, ignore_eos=True)
        next(stream)
        runtime.cancel()
        assert len(list(stream)) < 299
        for result, reason in ((timed, "timeout"), (stream.result, "cancelled")):
            assert result.finish_reason == reason
            assert len(result.token_ids) < 300
            assert result.token_ids == whole[: len(result.token_ids)]
        with pytest.raises(ValueError, match="transport='local'"):
            runtime.generate(PROMPT, logits_processors=lambda ids, scores: scores)
        after = runtime.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
        assert after.token_ids == whole[:30]
