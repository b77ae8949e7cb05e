"""What all commands have in common: their words for mistakes, --json and --out, and terminals that know ASCII only."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, get_args

import pytest
import typer
from commands import ppd, refused
from grids import nightly

import ppd_runtime
from ppd_runtime.cli.train.adapter import adapter
from ppd_runtime.cli.train.layerskip import layerskip
from ppd_runtime.cli.train.probe import probe
from ppd_runtime.cli.words import in_its_words
from ppd_runtime.settings.fields import UnknownSettingError
from ppd_runtime.training.adapter import AdapterRecipe
from ppd_runtime.training.layerskip import LayerSkipRecipe
from ppd_runtime.training.probe import ProbeRecipe

TIMES = "--layer-ms 1 --head-ms 1 --exit-head-ms 1 --hop-ms 0.1"


def command(
    exit_layer: Annotated[int, typer.Option()] = 1,
    layer: Annotated[str, typer.Option("--slow-layer")] = "",
    threads: Annotated[int, typer.Option(help="x")] = 1,
    compile: Annotated[bool, typer.Option("--compile")] = False,
    adaptive: Annotated[bool, typer.Option()] = False,
    no_run_ahead: Annotated[bool, typer.Option("--no-run-ahead")] = False,
    prompt: Annotated[str, typer.Argument()] = "",
) -> None:
    """A command with options of every form."""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("exit_layer=9: with 4 layers choose 2", "--exit-layer 9: with 4 layers choose 2"),
        ("exit_layer=9 with threads_per_worker=2, both", "--exit-layer 9 with --threads 2, both"),
        ("layer='a b'", "--slow-layer 'a b'"),
        ("layer='ab': x", "--slow-layer ab: x"),
        ("layer='it\\'s'", "--slow-layer 'it'\"'\"'s'"),
        ("adaptive=True has no use", "--adaptive has no use"),
        ("adaptive=False has no use", "--no-adaptive has no use"),
        ("run_ahead=False with exit_layer=2: drop", "--no-run-ahead with --exit-layer 2: drop"),
        ("needs exit_layer=NUMBER", "needs --exit-layer NUMBER"),
        ("--exit-layer='two': give", "--exit-layer two: give"),
        ("rates.json: exit_layer=0: give", "rates.json: exit_layer=0: give"),
        ("layerskip:exit_layer=6;layer=3", "layerskip:exit_layer=6;layer=3"),
        ("my_exit_layer=6", "my_exit_layer=6"),
        ("k=3: must be", "k=3: must be"),
        ("prompt='x': is", "prompt='x': is"),
    ],
)
def test_settings_are_told_as_options(message: str, expected: str) -> None:
    assert in_its_words(ValueError(message), command) == expected


def test_only_options_that_there_are_are_listed() -> None:
    error = UnknownSettingError("swift", "exit_layer", ["threads_per_worker", "compile", "run_ahead", "stage"])
    known = "it has --compile, --no-run-ahead, --threads"
    assert in_its_words(error, command) == f"--exit-layer is not for swift: {known}"


def test_the_version_is_told_without_torch() -> None:
    shown = ppd("--version")
    assert (shown.exit_code, shown.stdout) == (0, f"ppd {ppd_runtime.__version__}\n")


@pytest.mark.parametrize(
    ("command", "settings"),
    [(layerskip, LayerSkipRecipe), (adapter, AdapterRecipe), (probe, ProbeRecipe)],
    ids=lambda value: value.__name__,
)
def test_numbers_that_help_gives_as_defaults_are_the_settings_own(command: Callable[..., None], settings: type) -> None:
    """Help is there without torch, so it does not ask the settings."""
    told = {}
    for name, parameter in inspect.signature(command).parameters.items():
        about = get_args(parameter.annotation)[1].help or ""
        if found := re.search(r"[Dd]efault: (?:the paper's )?([\d.e-]*\d)", about):
            told[name] = float(found[1])
    own = {name: getattr(settings, name) for name in told}
    assert len(told) >= 4
    assert told == own


@pytest.mark.parametrize(
    "arguments",
    [
        "tradeoff --layers 8 --exit-layer 4,6",
        f"plan --match-rates FOLDER/rates.json {TIMES} --devices 3",
        "match-rate --model MODEL --prompts FOLDER/prompts.jsonl --max-new-tokens 4 --dtype float32",
        "bench --model MODEL --prompts FOLDER/prompts.jsonl --max-new-tokens 4 --methods layerskip --dtype float32",
        "generate fox --model MODEL --method layerskip --max-new-tokens 4 --dtype float32",
        "search-layers --model MODEL --prompts FOLDER/prompts.jsonl --search-steps 1 --bayes-interval 0",
    ],
    ids=lambda arguments: arguments.split()[0],
)
def test_json_goes_to_standard_output_and_out_names_the_file(
    model_folder: Callable[..., Path], tmp_path: Path, arguments: str
) -> None:
    (tmp_path / "rates.json").write_text('{"match_rates": {"4": {"1": 0.8}}, "num_layers": 8}')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The quick brown fox"}\n')
    out, model = tmp_path / "out.json", str(model_folder("llama"))
    given = arguments.replace("FOLDER", str(tmp_path)).replace("MODEL", model).split()
    result = ppd(*given, "--json", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1, "nothing but the JSON"
    assert json.loads(result.stdout) == json.loads(out.read_text())
    if given[0] != "search-layers":
        out.unlink()
        result = ppd(*given, "--out", out)
        with pytest.raises(ValueError):
            json.loads(result.stdout)
        assert json.loads(out.read_text())
        assert not list(tmp_path.glob("*.partial.jsonl"))
        result = ppd(*given, "--out", tmp_path / "none" / "out.json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "give a file in a folder that exists" in result.stderr


@pytest.mark.parametrize("name", ["bench", "match-rate", "plan", "tradeoff"])
@pytest.mark.parametrize("words", [["--json", "old.json"], ["--json=old.json"], ["--limit", "1", "--json", "old.json"]])
def test_the_old_spelling_is_told_the_new_one(name: str, words: list[str]) -> None:
    if words[0] == "--limit" and name == "tradeoff":
        words = words[2:]
    result = ppd(name, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "ppd: --json prints on standard output and takes no file: give --out old.json\n"


def test_other_mistakes_beside_json_keep_their_words() -> None:
    result = ppd("tradeoff", "--json", "--fast")
    assert (result.exit_code, result.stderr) == (2, "ppd: No such option: --fast\n")
    result = ppd("tradeoff", "what", "--json")
    assert "unexpected extra argument" in result.stderr


@pytest.mark.parametrize("name", ["serve", "plan", "bench", "match-rate", "generate x", "search-layers --out y"])
def test_a_model_that_has_to_be_an_option_is_told_so(name: str) -> None:
    line = refused(*name.split(), "smollm2")
    assert line == "ppd: no place for 'smollm2': give a model as --model NAME\n"


@pytest.mark.parametrize("name", ["adapt", "quantize"])
def test_a_model_that_has_to_be_an_argument_is_told_so(name: str) -> None:
    line = refused(name, "--model", "smollm2", "out")
    assert line == "ppd: no option --model: give the model as the first argument, without it\n"


def test_other_arguments_too_many_keep_their_words() -> None:
    for words in ("chat demo more", "adapt demo more", "tradeoff more"):
        assert refused(*words.split()) == "ppd: Got unexpected extra argument(s) (more)\n"


@pytest.mark.parametrize("method", ["autoregressive", "layerskip"])
def test_a_stream_ends_with_a_line_of_figures(model_folder: Callable[..., Path], method: str) -> None:
    given = ("generate", "fox", "--model", model_folder("llama"), "--method", method, "--max-new-tokens", 4)
    shown, quiet = ppd(*given), ppd(*given, "--quiet")
    assert shown.exit_code == quiet.exit_code == 0
    assert shown.stdout == quiet.stdout
    assert shown.stdout.startswith("fox")
    assert shown.stderr.startswith("4 tokens, ")
    assert "tokens/s" in shown.stderr
    assert ("match rate" in shown.stderr) == (method == "layerskip")
    assert shown.stderr.count("\n") == 1
    assert quiet.stderr == ""
    assert ppd(*given, "--json").stderr == ""
    late = ppd(*given[:-1], 400, "--timeout-s", 0.001, "--ignore-eos")
    assert late.stderr.rstrip().endswith(", timeout")


@pytest.mark.parametrize(
    "locale",
    [
        pytest.param({"PYTHONIOENCODING": "ascii"}, id="forced", marks=nightly),
        pytest.param({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, id="C"),
    ],
)
def test_a_terminal_of_ascii_gets_what_it_can_show(model_folder: Callable[..., Path], locale: dict[str, str]) -> None:
    model = str(model_folder("llama"))
    generate = f"generate --model {model} --method autoregressive --max-new-tokens 3".split()
    environment = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LANG")} | locale
    asked = [
        (["--help"], ""),
        (["tradeoff", "--help"], ""),
        (["tradeoff", "--layers", "8", "--exit-layer", "4"], ""),
        (["tradeoff", "--layers", "8", "--exit-layer", "é"], ""),
        ([*generate, "naïve café 東京"], ""),
        (generate, "naïve café 東京"),
    ]
    command = [sys.executable, "-c", ONE_BY_ONE, json.dumps(asked)]
    shown = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert b"Traceback" not in shown.stderr
    parts, said = shown.stdout.split(b"<ended>\n"), shown.stderr.split(b"<ended>\n")
    assert [part.rpartition(b"<")[2] for part in parts[:-1]] == [b"0", b"0", b"0", b"2", b"0", b"0"]
    assert all(part.startswith(b"na") for part in parts[4:6])
    assert all(part.startswith(b"3 tokens") for part in said[4:6])


ONE_BY_ONE = """
import io, json, os, sys
from ppd_runtime.cli.main import app
for arguments, given in json.loads(sys.argv[1]):
    sys.argv[1:] = [os.fsdecode(word.encode()) for word in arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    try:
        app()
    except SystemExit as ended:
        print(f"<{ended.code or 0}<ended>", flush=True)
    print("<ended>", file=sys.stderr, flush=True)
"""
"""Runs commands with what is on their standard input: the words as a program finds them, and each exit code."""


def test_standard_input_that_is_no_text_is_refused(model_folder: Callable[..., Path]) -> None:
    line = refused("generate", "--model", model_folder("llama"), input=b"\xff\xfe")
    assert line == "ppd: standard input: no UTF-8 text at byte 0; give a text\n"


@pytest.mark.parametrize(
    "command",
    [
        "generate x --model",
        "generate x --method autoregressive --model",
        "generate x --method layerskip --model",
        "match-rate --model",
        "bench --model",
        "plan --model",
    ],
)
def test_no_command_takes_more_threads_than_there_are_cores(model_folder: Callable[..., Path], command: str) -> None:
    line = refused(*command.split(), model_folder("llama"), "--threads", 4096)
    assert line.startswith("ppd: --threads 4096: there are ")
    assert line.endswith(" CPU cores here, choose at most so many\n")


def test_a_gguf_file_that_is_none_is_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for model, reason in (
        (file, "is cut short; download or convert it again"),
        (tmp_path, "a folder of GGUF files; give one of them"),
        ("somebody/some-model.GGUF", "no such GGUF file here; give one, a folder, a hub name or 'demo'"),
    ):
        assert reason in refused("generate", "x", "--model", model)
