"""The `ppd` command, as a user runs it."""

import json
import subprocess
import sys
import tempfile

import pytest
import typer
from commands import ppd, printed, refused

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.cli.errors import one_line_errors

PPD = [sys.executable, "-m", "ppd_runtime.cli.main"]


def run(*arguments, **options):
    """Run the command in a process of its own to its end."""
    return subprocess.run([*PPD, *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


def read_in(*words: str) -> set[str]:
    """The modules that a call of `ppd` has imported when it ends."""
    code = f"""
import sys
from ppd_runtime.cli.main import app
try:
    app({list(words)})
finally:
    print(*sys.modules, file=sys.stderr)
"""
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.split())


def test_help_needs_no_torch_and_a_command_no_other():
    shown = run("--help")
    assert shown.returncode == 0
    assert "generate" in shown.stdout
    modules = read_in("--help")
    assert {"ppd_runtime.cli.generate", "ppd_runtime.cli.train"} <= modules
    assert modules.isdisjoint({"torch", "ray", "zmq"})
    alone = read_in("tradeoff", "--help")
    assert "ppd_runtime.cli.tradeoff" in alone
    assert alone.isdisjoint({"torch", "ppd_runtime.cli.serve", "ppd_runtime.cli.train"})


@pytest.mark.parametrize("method", ["autoregressive", "ppd"])
def test_json_holds_the_oracles_tokens(folder, method):
    expected = OrdinaryDecoding(folder).generate("The quick", max_new_tokens=12)
    layout = ["--transport", "local", "--k", 2] if method == "ppd" else []
    given = ("--model", folder, "--method", method, *layout, "--max-new-tokens", 12, "--json")
    output = json.loads(printed("generate", "The quick", *given))
    assert {"text", "token_ids", "prompt_tokens", "method", "stats"} <= set(output)
    assert tuple(output["token_ids"]) == expected.token_ids
    assert output["text"] == expected.text
    assert output["method"] == method
    assert output["dtype"] in ("float32", "bfloat16")
    assert output["stats"]["new_tokens"] == 12
    assert sum(output["stats"]["ledger"].values()) == pytest.approx(output["stats"]["latency_s"], rel=0.03)


def test_standard_input_is_a_prompt(folder):
    command = ["generate", "--model", folder, "--method", "autoregressive", "--max-new-tokens", 2, "--json"]
    shown = ppd(*command, input="fox")
    assert json.loads(shown.stdout)["stats"]["new_tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--k", "0"], "--k 0"),
        (["x", "--workers", "4"], "--workers 4 with --k 3"),
        (["x", "--temperature", "-1"], "--temperature -1"),
        (["x", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["x", "--max-new-tokens", "100000"], "positions"),
        (["", "--k", "1"], "prompt is empty"),
        (["x", "--transport", "fax"], "--transport fax"),
        (["x", "--launcher", "mpi"], "--launcher mpi: choose one of auto, ray, processes"),
        (["x", "--max-restarts", "-1"], "--max-restarts -1"),
        (["x", "--prompt-file", "y"], "not both"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt-file", "/"], "--prompt-file /: "),
        (["--prompt-file", sys.executable], "no UTF-8 text"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(folder, arguments, words):
    assert words in refused("generate", *arguments, "--model", folder)


def test_an_unknown_model_gets_one_line(tmp_path):
    for model in ("./nowhere", str(tmp_path)):
        assert model in refused("generate", "x", "--model", model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tradeoff --layers abc", "'abc': Invalid value for '--layers'"),
        ("tradeoff --layers 1.5", "'1.5': Invalid value for '--layers'"),
        ("generate x --method fax", "'fax'"),
        ("match-rate --limit", "'--limit' requires an argument"),
        ("demo --fast", "No such option: --fast"),
        ("plan --devices two", "'two': Invalid value for '--devices'"),
        ("fly", "No such command 'fly'"),
    ],
)
def test_a_mistaken_command_line_gets_one_line_and_exit_code_2(arguments, words):
    assert words in refused(*arguments.split())


def test_no_arguments_show_the_help():
    shown = run()
    assert (shown.returncode, shown.stderr) == (2, "")
    assert "Usage:" in shown.stdout


def test_a_commands_own_exit_code_passes_unchanged():
    for code in (0, 3):
        with pytest.raises(typer.Exit) as caught, one_line_errors():
            raise typer.Exit(code)
        assert caught.value.exit_code == code


def test_closed_standard_streams_are_empty_and_take_all():
    code = """
import sys
from ppd_runtime.cli.entry import open_closed_streams
open_closed_streams()
print("gone", flush=True)
open(sys.argv[1], "w").write(repr((sys.stdin.isatty(), sys.stdin.read(), sys.stderr.isatty())))
"""
    with tempfile.NamedTemporaryFile("r") as told:
        closed = 'exec "$0" "$@" <&- >&- 2>&-'
        subprocess.run(["sh", "-c", closed, sys.executable, "-c", code, told.name], check=True, timeout=60)
        assert told.read() == "(False, '', False)"
