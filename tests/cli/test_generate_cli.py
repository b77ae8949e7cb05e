"""`ppd generate --method ...`: the methods by name, their options, and what does not fit together."""

import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from commands import ppd, refused

from cluster.job import generate as job
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.cli import options
from ppd_runtime.cli.drafting import DRAFTING, Acceptance
from ppd_runtime.cli.generate import generate as command
from ppd_runtime.cli.options import PARAMETERS
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import RUNTIME_SETTINGS, RuntimeConfig, without_earlier_texts
from ppd_runtime.settings.fields import summary

WITHOUT_OPTION = {
    "placement_timeout_s": "a command starts and ends; those who wait for a cluster's room submit a job, which has it",
    "gpus_per_worker": "a cluster's too, so the job has it",
    "trace": "--trace FILE and --timeline FILE ask for it, and say where it goes",
    "logits_processors": "functions are not typed on a command line",
    "num_generated": "goes on with an earlier request, which a command has not",
    "max_requests": "a command has one request; `ppd serve` has an option for it",
    "max_cache_tokens": "the same",
    "prefix_cache_tokens": "the same",
    "draft_memory_mb": "the same",
    "logprobs": "numbers for programs: Python and `ppd serve` give them",
    "prompt_logprobs": "numbers for programs, too",
    **dict.fromkeys(
        (
            "logit_bias",
            "sequence_bias",
            "bad_words_ids",
            "suppress_tokens",
            "begin_suppress_tokens",
            "forced_bos_token_id",
            "forced_eos_token_id",
        ),
        "token ids, which programs and models' files know",
    ),
    **dict.fromkeys(
        (
            "min_length",
            "exponential_decay_length_penalty",
            "encoder_repetition_penalty",
            "encoder_no_repeat_ngram_size",
            "renormalize_logits",
        ),
        "rare: a model's file may have it, and Python",
    ),
    "eos_token_ids": "a conversation's, which a command has not",
}
OF_JOBS = {
    "placement_timeout_s",
    "gpus_per_worker",
    "max_requests",
    "max_cache_tokens",
    "prefix_cache_tokens",
    "draft_memory_mb",
}
JOB_WITHOUT_OPTION = WITHOUT_OPTION.keys() - OF_JOBS | {
    "layout",  # is measured on one host
    "launcher",  # a job's is Ray
    "ray_address",  # of the cluster that it runs on
    "run_ahead",
    "timeout_s",
    "drafter_device",  # a process that Ray does not start
    *("schema", "regex", "choice", "grammar"),  # a batch's texts are of several kinds
}
NEGATED = {"no_run_ahead": "run_ahead", "no_repetitions": "repetitions", "no_generation_config": "generation_config"}
OWN = {setting.name: setting for kind in (RuntimeConfig, SamplingParams) for setting in fields(kind)}


def settings_of(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
    names = {name: own for own, name in PARAMETERS.items()} | NEGATED
    return {names.get(name, name): shown for name, shown in inspect.signature(command).parameters.items()}


@pytest.mark.parametrize(("command", "without"), [(command, WITHOUT_OPTION), (job, JOB_WITHOUT_OPTION)])
def test_every_setting_has_an_option_or_a_reason(command: Callable[..., None], without: Collection[str]) -> None:
    options = settings_of(command)
    assert OWN.keys() - options.keys() - {"trace"} == set(without) - {"trace"}
    for name in OWN.keys() & options.keys() - {"trace", *NEGATED.values()}:
        option, (kind, about) = options[name], get_args(options[name].annotation)
        assert option.default in (OWN[name].default, None), name
        if isinstance(OWN[name].type, type):
            assert OWN[name].type in (kind, *get_args(kind)), name
        if name not in ("exit_layer", "bind_interface"):  # whose meaning is the command's
            kept = RuntimeConfig if name in RUNTIME_SETTINGS else SamplingParams
            assert about.help == summary(kept, name)


def test_a_group_hands_on_what_was_given() -> None:
    layout = options.group(RuntimeConfig, ("k", "run_ahead", "transport"), given_only=True)
    nothing = {option.parameter.name: option.parameter.default for option in layout.options}
    assert nothing == {"k": None, "no_run_ahead": False, "transport": None}
    assert layout.read(nothing) == {}
    assert layout.read(nothing | {"k": 2, "no_run_ahead": True}) == {"k": 2, "run_ahead": False}
    sampling = options.sampling("stop", "seed", seed=7)
    assert [option.parameter.default for option in sampling.options] == [None, 7]
    assert sampling.read({"stop": ["a", "b"], "seed": 7}) == {"stop": ("a", "b"), "seed": 7}
    assert sampling.read({"stop": None, "seed": 7}) == {"seed": 7}
    drafting = {option.parameter.name: None for option in DRAFTING.options}
    given = {"adaptive": False, "acceptance": Acceptance("shared-noise")}
    assert DRAFTING.read(drafting | given) == {"adaptive": False, "acceptance": "shared-noise"}


@pytest.mark.parametrize(
    "given",
    [
        "--method layerskip --exit-layer 2 --num-speculations 4",
        "--method adaspeed --exit-layer 2 --stopping confidence --threshold 0.1",
        "--method layerskip --acceptance rejection",
        "--method swift --skip-ratio 0.3 --threshold 0.2 --search-steps 5 --bayes-interval 0",
        "--method swift --search-steps 0 --widest 1 --adaptive",
        "--method swift --search-steps 9 --context-window 2 --search-seed 3 --bayes-interval 4",
    ],
)
def test_json_holds_the_oracles_tokens(model_folder: Callable[..., Path], given: str, tmp_path: Path) -> None:
    folder, trace = str(model_folder("llama", quiet_from=2)), tmp_path / "trace.json"
    expected = OrdinaryDecoding(folder, dtype="float32").generate("The quick", max_new_tokens=12)
    arguments = f"--model {folder} --dtype float32 --max-new-tokens 12 --json --trace {trace} {given}"
    result = ppd("generate", "The quick", *arguments.split())
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert tuple(output["token_ids"]) == expected.token_ids
    assert output["method"] == given.split()[1]
    stats = output["stats"]
    assert sum(stats["run_lengths"]) == 12
    assert stats["mean_accepted_length"] == 12 / len(stats["run_lengths"])
    later = stats["run_lengths"][1:]
    assert stats["ctar"] == {str(w): sum(length > w for length in later) / len(later) for w in range(1, 7)}
    assert stats["acceptance_rate"] == sum(stats["speculation"]["accepted"]) / sum(stats["speculation"]["drafted"])
    assert "layers" in trace.read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--method layerskip --k 3", "--k is not for layerskip: it has --acceptance, --adaptive, "),
        ("--method ppd --threshold 0.5", "--threshold is not for ppd: it has --bind-interface, --compile, "),
        (
            "--method autoregressive --exit-layer 2",
            "--exit-layer is not for autoregressive: it has --compile, --device, --dtype, ",
        ),
        ("--method kangaroo", "kangaroo needs --adapter FOLDER"),
        ("--method adaspeed --stopping probe --probe /no/such/folder", "holds no probe.json"),
        ("--method layerskip --exit-layer 4", "--exit-layer 4: with 4 layers choose 1 to 3"),
        ("--method swift --skip-ratio 1", "--skip-ratio 1.0: give a number from 0 to below 1"),
        ("--method swift --layer-set /no/such/file", "--layer-set /no/such/file: No such file or directory; find one"),
        ("--bind-interface 0.0.0.0", "--bind-interface 0.0.0.0: give the address of one interface"),
        ("--bind-interface 192.0.2.1", "--bind-interface 192.0.2.1: not an address of this host"),
        ("--bind-interface 127.0.0.1 --transport unix", "--transport unix, which stays on one host: choose transport"),
        ("--method layerskip --num-speculations 0", "--num-speculations 0: give a whole number of at least 1"),
        ("--method layerskip --adaptive --stopping constant --probe x", "--probe x has no use with --stopping c"),
        ("--threads 4096", "--threads 4096: there are"),
        ("--layout auto --stages 2", "--stages 2 with --layout auto, which decides it: drop one"),
        ("--layout auto --threads 2", "--threads 2 with --layout auto, which decides it: drop one"),
        ("--layout auto --exit-layer 2", "--exit-layer 2 with --layout auto, which decides it: drop one"),
        ("--dtype int8", "--dtype int8: choose one of"),
        ("--top-p 1.5", "--top-p 1.5: must be finite and in [0, 1]"),
        ("--seed -2", "--seed -2: must be at least -1"),
        ("--stop-token-id 300", "--stop-token-id 300: is outside the vocabulary"),
        ("--max-new-tokens 600", "and --max-new-tokens 600 make"),
        ("--json out.json", "--json prints on standard output and takes no file: give --out out.json"),
        ("--json=out.json", "--json prints on standard output and takes no file: give --out out.json"),
        ("--out /no/such/folder/x", "give a file in a folder that exists"),
        ("--method medusa", "is not one of"),
        ("--schema /no/such/file", "--schema /no/such/file: No such file or directory; give a text file"),
        ("--regex ab(c", "regex: at character 3 of 'ab(c': unclosed group; mend it"),
        ("--grammar /dev/null", "--grammar '': give a text of 1 to"),
        ("--choice a --regex a", "choice: regex is given as well, give one of them"),
        ("--choice a --ignore-eos", "--ignore-eos: a text with a choice ends when it is complete, leave one out"),
    ],
)
def test_mistakes_are_one_line(model_folder: Callable[..., Path], given: str, message: str) -> None:
    assert message in refused("generate", "x", "--model", model_folder("llama"), *given.split())


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"stages": 2}, {"draft_memory_mb": 0, "stages": 2}),
        ({"cuts": "1,2", "draft_memory_mb": 8}, {"cuts": "1,2", "draft_memory_mb": 8}),
        ({"layout": "auto"}, {"draft_memory_mb": 0, "layout": "auto"}),
        ({"k": 1}, {"k": 1}),
    ],
)
def test_a_server_keeps_no_texts_unless_it_is_asked_to(layout: dict[str, object], told: dict[str, object]) -> None:
    assert without_earlier_texts(layout) == told
