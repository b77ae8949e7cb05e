"""Benchmarks' options, tables and files."""

import argparse
import contextlib
import json
import shlex
import tempfile
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from heads_for_tests import write_texts
from transformers import AutoModelForCausalLM

from benchmarks import decode, draft_models, edits, faults, forms, hop, layouts, peers, rows, servers, serving, startup
from benchmarks.__main__ import PLAN
from benchmarks.emulated import slow_links, socket_folder
from benchmarks.models import model_folder, random_config
from benchmarks.recording import markdown_table, run, spread
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer
from ppd_runtime.pipeline.messages import End
from ppd_runtime.settings.layouts import CLIENT
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.training.texts import read_texts, token_rows
from ppd_runtime.transport.unix import UnixEndpoint
from ppd_runtime.tune.prompt_files import Prompt

MODULES = (decode, draft_models, faults, forms, hop, layouts, peers, rows, servers, serving, startup)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_benchmark_has_defaults_writes_json_and_names_commands_that_can_be_run(module, tmp_path):
    options = module.parser().parse_args(["--json", str(tmp_path / "x.json")])
    assert options.json == tmp_path / "x.json"
    lines = [line.strip() for line in module.__doc__.splitlines()]
    commands = [line for line in lines if line.startswith(f"python -m {module.__name__}")]
    assert commands
    for command in commands:
        module.parser().parse_args(shlex.split(command)[3:])


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (layouts, ["--limit", "0"]),
        (layouts, ["--rounds", "many"]),
        (layouts, ["--match-rate", "2"]),
        (hop, ["--sizes", "10,x"]),
        (startup, ["--rounds", "-1"]),
        (serving, ["--bad-share", "1.5"]),
        (hop, ["--transports", "unix,mpi"]),
        (peers, ["--engines", "llama"]),
        (startup, ["--only", "ordinary; dask"]),
    ],
)
def test_options_that_are_refused(module, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        module.parser().parse_args(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (layouts, ["--tokens", "1"], "--tokens 1: "),
        (layouts, ["--emulate-layer-ms", "-3"], "layer_ms=-3.0: "),
        (layouts, ["--model", "random:100x4"], "--model random:100x4: give random:HIDDENxLAYERS"),
        (layouts, ["--match-rate", "0", "--temperature", "1"], "--match-rate 0.0 with a temperature: "),
        (layouts, ["--model", "random:64x2", "--layouts", "stages"], "--layouts stages: give settings such as"),
        (peers, ["--tokens", "1"], "--tokens 1: "),
        (servers, ["--model", "demo"], "--model demo: give one that is a GGUF file"),
        (peers, ["--threads", "9999"], "--threads 9999: there are "),
        (decode, ["--data", "none.txt"], "none.txt: No such file or directory; give a file of texts"),
        (faults, ["--every-s", "0"], "--every-s 0.0: give more than 0"),
    ],
)
def test_mistakes_end_with_one_line(module, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as ended:
        run(module.parser(), module.measure, module.table)
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert words in written
    assert written.count("\n") == 1


@pytest.mark.parametrize("command", [command for _, command in PLAN])
def test_the_plans_commands_can_be_run(command):
    name, *options = shlex.split(command)
    module = next(module for module in MODULES if module.__name__ == f"benchmarks.{name}")
    given = module.parser().parse_args(options)
    if name in ("layouts", "faults"):
        assert all(map(layouts.settings_of, given.layouts.split(",")))


def test_figures_are_written_with_machine_versions_and_commit(monkeypatch, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=type(tmp_path))
    monkeypatch.setattr("sys.argv", ["benchmark", "--json", str(tmp_path / "figures.json")])
    run(parser, lambda options: {"ratio": 0.5}, lambda figures: f"ratio {figures['ratio']}")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ratio"] == 0.5
    assert {"machine", "versions", "commit"} <= set(figures)
    assert "torch" in figures["versions"]
    assert capsys.readouterr().out == "ratio 0.5\n"
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_tables():
    text = markdown_table(["a", "b"], [[1, 0.12345], [None, True]])
    assert text == "| a | b |\n| --- | --- |\n| 1 | 0.123 |\n| - | yes |"
    assert spread([1.0, 2.0, 3.0]) == "2 (1.5 to 2.5)"
    assert spread([1.5]) == "1.5"


def test_an_emulation_says_so_in_its_table():
    stats = [
        SimpleNamespace(ledger_per_token=LatencyBreakdown(*parts, 0.0, 0.0, 0.0))
        for parts in ((0.001, 0.002), (0.003, 0.0))
    ]
    ledgers = [layouts.mean_ledger_ms(stats)] * 2
    names = ("slowest_prompt", "first_request", "match_rate", "predicted", "realised_saving")
    row = {"layout": "k=3", "ms": [2.0, 1.0], "ratios": [0.4, 0.5, 0.6], "identical": True, "ledgers_ms": ledgers}
    row |= {"first_boundary": [0.75, 0.25], "quoted": []}
    figures = {"model": "demo", "emulate_layer_ms": 3.0, "hop_ms": 0.0, "rows": [row | dict.fromkeys(names, 0.5)]}
    shown = layouts.table(figures)
    assert "EMULATED devices of 3 ms a layer" in shown
    assert "mean, EMULATED devices" in shown
    assert "| 0.75, 0.25 |" in shown
    assert "| k=3 | 2.000 | 1.000 | 0.000 | 0.000 | 0.000 | 3.000 |" in shown
    assert "EMULATED" not in layouts.table(figures | {"emulate_layer_ms": None})


def test_cuts_of_a_layout():
    assert layouts.settings_of("stages=3;cuts=7+15") == {"stages": 3, "cuts": "7,15"}
    assert layouts.settings_of("cuts=7") == {"cuts": "7"}


def test_an_edit_quotes_its_file():
    first, *later = edits.edit_texts()
    assert len({text[:10_000] for text in (first, *later)}) == 1, "each begins with the file"
    assert [text[len(first) :].count(" changed") - 1 for text in later] == [0, 2, 3], "the file says it once itself"
    assert all(text.endswith(" changed") for text in later)
    assert edits.quoted([*range(20), 99], [*range(5, 15), 3, 4]) == pytest.approx(10 / 12)
    assert edits.quoted([1, 2, 3], [1, 2, 3]) == 0, "too few in a row"


def test_a_random_model_is_there_for_a_while():
    with model_folder("random:64x3") as folder:
        info = describe(folder)
        assert info.num_layers == 3
        assert len(load_tokenizer(info)) <= info.vocab_size
    with pytest.raises(ValueError, match="no such folder"):
        describe(folder)
    with model_folder("random:little") as folder:
        assert random_config("little").num_key_value_heads < random_config("little").num_attention_heads
    with model_folder("demo") as name:
        assert name == "demo"


def test_a_slow_link_hands_on_later_in_order_and_to_workers_alone():
    with socket_folder() as folder, contextlib.ExitStack() as stack:
        sockets = tempfile.mkdtemp()
        one, two, client = (stack.enter_context(closing(UnixEndpoint(sockets, rank))) for rank in (1, 2, CLIENT))
        slow_links(folder, delay_s=0.2)
        began = time.perf_counter()
        for request in (5, 6):
            one.send(2, End(1, request))
        one.send(CLIENT, End(1, 7))
        assert client.receive(0.1) == End(1, 7)
        assert [two.receive(5.0), two.receive(5.0)] == [End(1, 5), End(1, 6)]
        assert time.perf_counter() - began >= 0.2
    with socket_folder() as folder, pytest.raises(ValueError, match="no sockets of workers"):
        slow_links(folder, 0.2)


def test_a_losss_pause_and_its_next_hit():
    texts = [[(0.0, False), (1.0, False), (5.0, False), (6.0, True)], [(10.0, False), (11.0, True)]]
    assert faults.losses(texts, [2.0, 8.0, 20.0]) == ([4.0], [4.0])
    assert faults.losses(texts, [10.5]) == ([1.0], [0.5])


def test_what_a_format_costs_in_quality(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "_LENGTH", 32)
    monkeypatch.setattr(decode, "read_prompts", lambda *_: [Prompt("a fox"), Prompt("The quick")])
    folder, data = str(model_folder("llama", dtype="bfloat16")), str(write_texts(tmp_path / "texts.jsonl"))
    options = decode.parser().parse_args(["--rows", "3", "--texts", "2", "--tokens", "6"])
    held_out = read_texts(data).held_out
    first = decode._try(folder, {"dtype": "float32"}, held_out, options, None)
    int8 = decode._try(folder, {"weights": "int8"}, held_out, options, first[1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = token_rows(load_tokenizer(describe(folder)), held_out, 32, model.config.vocab_size)
    losses = [model(row[None], labels=row[None]).loss.item() for row in (rows[len(rows) * n // 3] for n in range(3))]
    assert first[0] == pytest.approx(losses, rel=1e-4)
    stored, packed = (decode._beside({"weights": "x"}, found, first) for found in (first, int8))
    assert (stored["more_loss"], stored["equal_tokens"], stored["equal_texts"]) == (0, 1, 1)
    assert packed["more_loss"] != 0
    assert 0 <= packed["equal_tokens"] <= 1
