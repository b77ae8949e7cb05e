"""Every setting is checked where it is made, with a one-line ValueError that names it and its value."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.sampling.params import SamplingParams, sampling_from
from ppd_runtime.settings.config import RuntimeConfig, in_process_config, runtime_config
from ppd_runtime.settings.fields import UnknownSettingError, documentation


def check_refusal(error: pytest.ExceptionInfo[ValueError], name: str, value: object) -> None:
    text = str(error.value)
    named = value if isinstance(value, tuple) else ()  # of several, the one that is wrong
    assert text.startswith(tuple(f"{name}={one!r}"[:100] for one in (*named, value)))
    assert ": " in text
    assert "\n" not in text


REFUSED: dict[str, tuple[object, ...]] = {
    "max_new_tokens": (0, None),
    "temperature": (-0.1, "hot"),
    "top_k": (-2,),
    "top_p": (1.0001,),
    "repetition_penalty": (0,),
    "seed": (-2, 2**64, None),
    "stop": (("good", ""), (5,), "END", None),
    "min_p": (1.1,),
    "presence_penalty": (2.1,),
    "frequency_penalty": (-2.1,),
    "stop_token_ids": ((-1,), (2**31,), [1], (1,) * 1001),
    "eos_token_ids": ((-1,), [1]),
    "timeout_s": (0, "1"),
    "logits_processors": ((5,), print),
    "num_generated": (-1,),
    "logit_bias": (5, [5]),
    "encoder_repetition_penalty": (0,),
    "min_new_tokens": (-1,),
    "min_length": (1.5,),
    "no_repeat_ngram_size": (101,),
    "encoder_no_repeat_ngram_size": (2**31 - 1,),
    "bad_words_ids": ("words",),
    "sequence_bias": (5,),
    "suppress_tokens": ("5", (-1,)),
    "begin_suppress_tokens": ((True,),),
    "forced_bos_token_id": (-1,),
    "forced_eos_token_id": (1.5,),
    "exponential_decay_length_penalty": (5, (1, 2, 3)),
    "renormalize_logits": (1,),
    "schema": (5, "{"),
    "regex": ("", 5),
    "choice": ((), (5,)),
    "grammar": ("", 5),
}
"""Values by the setting that does not take them; `test_checks.py` has each check's other ones."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_sampling_params_refuse(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    check_refusal(error, name, value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1: must be at least 0"),
        ({"logit_bias": {True: 1.0}}, "logit_bias=True: give a whole number"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias='5': give a whole number"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\]=101: must be finite and in \[-100, 100\]"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan"),
        ({"logit_bias": {5: None}}, r"logit_bias\[5\]=None: give a number"),
        ({"logit_bias": dict.fromkeys(range(2**16 + 1), 1)}, "logit_bias: 65537 token ids, give at most 65536"),
        ({"bad_words_ids": [[1], []]}, r"bad_words_ids=\[\]: give token ids in lists, each of one at least"),
        ({"bad_words_ids": [[1] * 2**15] * 3}, "bad_words_ids: 98304 token ids, give at most 65536"),
        ({"sequence_bias": [[[1], math.inf]]}, r"sequence_bias\[\(1,\)\]=inf: must be finite"),
        ({"sequence_bias": [[1, 1.0]]}, "sequence_bias=1: give token ids in lists"),
        (
            {"exponential_decay_length_penalty": (1, 0)},
            r"exponential_decay_length_penalty\[1\]=0: must be finite and abov",
        ),
    ],
)
def test_what_is_wrong_in_a_list_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}") as error:
        SamplingParams(**settings)
    assert "\n" not in str(error.value)


def test_lists_of_tokens_have_one_form() -> None:
    params = SamplingParams(
        logit_bias={7: -100, 3: 1}, sequence_bias=[[[5, 6], 2]], bad_words_ids=[[1], [2, 3]], forced_eos_token_id=4
    )
    assert params.logit_bias == ((3, 1.0), (7, -100.0))
    assert params.sequence_bias == (((5, 6), 2.0),)
    assert params.bad_words_ids == ((1,), (2, 3))
    assert params.forced_eos_token_id == (4,)
    by_pairs = SamplingParams(
        logit_bias=((3, 1.0), (7, -100)),
        sequence_bias={(5, 6): 2},
        bad_words_ids=((1,), (2, 3)),
        forced_eos_token_id=[4],
    )
    assert params == by_pairs
    assert hash(params) == hash(by_pairs)


def test_a_request_settles_what_it_leaves_open() -> None:
    """Its own settings win, also those that ask for nothing; then the model's; a seed by chance is drawn each time."""
    model = SamplingParams(top_k=20, repetition_penalty=1.1, min_new_tokens=5, suppress_tokens=[3])
    asked = SamplingParams(temperature=0.7, repetition_penalty=1.0, min_new_tokens=0, top_p=0.5, seed=3)
    settled = asked.settled(model)
    assert settled == dataclasses.replace(asked, top_k=20, suppress_tokens=(3,))
    assert settled.settled(SamplingParams(top_k=7)) == settled
    assert asked.settled() is asked
    drawn = {SamplingParams(seed=-1).settled().seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**53 for seed in drawn)


def test_settings_come_by_name_or_as_params() -> None:
    assert sampling_from(SamplingParams(seed=3), {}) == sampling_from(None, {"seed": 3})
    assert sampling_from(None, {"stop_token_ids": 7}).stop_token_ids == (7,)
    assert sampling_from(None, {"stop_token_ids": [7, 8]}).stop_token_ids == (7, 8)
    assert sampling_from(None, {"eos_token_ids": 7}).eos_token_ids == (7,)
    assert sampling_from(None, {"logits_processors": max}).logits_processors == (max,)
    with pytest.raises(ValueError, match="params and seed are both given"):
        sampling_from(SamplingParams(), {"seed": 3})
    with pytest.raises(ValueError, match="sampling has no setting 'max_tokens': it has .*max_new_tokens"):
        sampling_from(None, {"max_tokens": 3})
    with pytest.raises(ValueError, match="give SamplingParams"):
        sampling_from({"seed": 3}, {})


def test_files_of_earlier_versions_are_recognised() -> None:
    """What they note of the sampling is what is noted today where none of the newer settings is used."""
    earlier = {"max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed", "stop", "ignore_eos"}
    assert set(SamplingParams().as_dict()) == earlier
    plain = SamplingParams().as_dict()
    assert (plain["top_k"], plain["top_p"], plain["repetition_penalty"]) == (0, 1.0, 1.0)
    assert set(SamplingParams(min_p=0.1).as_dict()) == {*earlier, "min_p"}


def test_paths_and_pytorchs_own_dtypes_become_names() -> None:
    config = RuntimeConfig(Path("a/b"), dtype=torch.bfloat16, exit_head=Path("c"))
    assert (config.model, config.dtype, config.exit_head) == ("a/b", "bfloat16", "c")
    assert RuntimeConfig("a/b", dtype="bfloat16", exit_head="c") == config
    for dtype, name in ((5, "5"), (torch.float64, "'float64'")):
        with pytest.raises(ValueError, match=f"dtype={name}: choose one of auto, float32"):
            RuntimeConfig(dtype=dtype)


def test_a_runtimes_settings_come_by_name_or_as_a_config() -> None:
    config = RuntimeConfig(k=2, trace=True)
    assert runtime_config(config, {}) == runtime_config(None, {"k": 2, "trace": True}) == config
    assert runtime_config(None, {}) == RuntimeConfig()
    with pytest.raises(ValueError, match="config and k are both given: give one of them"):
        runtime_config(config, {"k": 2})
    with pytest.raises(ValueError, match="config='demo': give RuntimeConfig"):
        runtime_config("demo", {})
    with pytest.raises(UnknownSettingError, match="PPDRuntime has no setting 'threads': it has .*threads_per_worker"):
        runtime_config(None, {"threads": 2})


def test_decoding_in_one_process_has_few_of_them() -> None:
    config = in_process_config("OrdinaryDecoding", {"model": "demo", "threads": 2, "dtype": torch.float16})
    assert config == RuntimeConfig(threads_per_worker=2, dtype="float16")
    with pytest.raises(UnknownSettingError, match="OrdinaryDecoding has no setting 'k': it has compile, device, "):
        in_process_config("OrdinaryDecoding", {"k": 2})


@pytest.mark.parametrize(
    ("given_stop", "expected"),
    [(None, ()), ("END", ("END",)), ([], ()), (["a", "b"], ("a", "b")), (("a",), ("a",)), ("", ("",))],
)
def test_stops_may_stand_alone(given_stop: object, expected: tuple[str, ...]) -> None:
    if given_stop == "":
        with pytest.raises(ValueError, match="stop=''"):
            sampling_from(None, {"stop": given_stop})
    else:
        assert sampling_from(None, {"stop": given_stop}).stop == expected


@given(num_layers=st.integers(2, 100), exit_layer=st.integers(-5, 110))
def test_the_exit_is_at_least_half_way_and_before_the_end(num_layers: int, exit_layer: int) -> None:
    config = RuntimeConfig(exit_layer=exit_layer)
    if 2 * exit_layer >= num_layers and exit_layer < num_layers:
        assert config.check_against(num_layers, 300) == exit_layer
    else:
        with pytest.raises(ValueError, match=rf"exit_layer={exit_layer}: with {num_layers} layers choose") as error:
            config.check_against(num_layers, 300)
        assert f" {(num_layers + 1) // 2} to {num_layers - 1} " in str(error.value)


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_model_without_two_layers_is_refused(num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"{num_layers} layer.*at least 2"):
        RuntimeConfig().check_against(num_layers, 300)


def test_k_is_at_most_the_vocabulary() -> None:
    assert RuntimeConfig(k=300).check_against(4, 300) == 2
    with pytest.raises(ValueError, match="k=301 is more than the 300 tokens"):
        RuntimeConfig(k=301).check_against(4, 300)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"placement": "everywhere"}, "placement='everywhere': choose one of auto, pack, spread"),
        ({"placement": "spread"}, "placement='spread' with bind_interface=None, .*give bind_interface an address"),
        ({"placement": "strict-spread", "bind_interface": "127.0.0.1"}, "only processes of this host reach each other"),
        ({"placement": "pack", "launcher": "processes"}, "placement='pack' is for Ray's workers"),
        ({"placement": "strict-pack", "transport": "local"}, "placement='strict-pack' is for Ray's workers"),
        ({"placement_timeout_s": -1.0}, "placement_timeout_s=-1.0: must be finite and 0 or more"),
        ({"gpus_per_worker": 0}, "gpus_per_worker=0: must be finite and above 0"),
        ({"gpus_per_worker": 1.5}, "gpus_per_worker=1.5: must be .* whole from 1 on"),
    ],
)
def test_places_that_cannot_be_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RuntimeConfig(**settings)


@pytest.mark.parametrize(
    ("name", "usual"),
    [
        ("k", RuntimeConfig().k),
        ("prefix_cache_tokens", RuntimeConfig(stages=2).prefix_tokens),
        ("draft_memory_mb", RuntimeConfig(stages=2).draft_memory),
    ],
)
def test_documentation_names_the_defaults_that_hold(name: str, usual: int) -> None:
    assert f", {usual} by default" in documentation(RuntimeConfig)[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", 2),
        ("stages", 2),
        ("cuts", "3,6"),
        ("rows", 4),
        ("repetitions", False),
        ("exit_layer", 3),
        ("workers", 1),
        ("threads_per_worker", 2),
        ("transport", "zeromq"),
        ("launcher", "ray"),
        ("bind_interface", "10.0.0.1"),
        ("speculation", "never"),
    ],
)
def test_a_layout_that_is_found_leaves_nothing_to_say(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name}={value!r} with layout='auto', which decides it: drop one$"):
        RuntimeConfig(layout="auto", **{name: value})


def test_a_layout_is_found_or_not_named() -> None:
    with pytest.raises(ValueError, match=r"^layout='paper': choose one of auto$"):
        RuntimeConfig(layout="paper")
    with pytest.raises(ValueError, match=r"^exit_head=.* with layout='auto', which is measured in another process"):
        RuntimeConfig(layout="auto", exit_head=object())
    config = RuntimeConfig(layout="auto", max_requests=3, draft_memory_mb=0)
    assert (config.k, config.stages) == (None, None)
