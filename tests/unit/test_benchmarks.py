"""Benchmarks' options, tables and files."""

import argparse
import contextlib
import json
import os
import shlex
import tempfile
import time
from contextlib import closing

import pytest
import torch
from heads_for_tests import write_texts
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks import (
    contention,
    decode,
    equal_devices,
    held_out,
    hop,
    passes,
    peers,
    pipeline,
    serve,
    serve_endurance,
    serve_guidellm,
    siblings,
    stages,
    startup,
    tracing,
    weight_formats,
)
from benchmarks.__main__ import PLAN, merged
from benchmarks.floor import Products, Reading
from benchmarks.models import model_folder, random_config
from benchmarks.recording import environment, markdown, mean_ledger_ms, run, slug, spread, write_whole
from benchmarks.slow_links import found_sockets, slow_links
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.checkpoint.config import QUANTISED
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.checkpoint.weight_cache import map_tensors
from ppd_runtime.pipeline.messages import CLIENT, End
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tracing.spans import Kind
from ppd_runtime.training.corpus import read_standard_library
from ppd_runtime.training.texts import read_texts, token_rows
from ppd_runtime.transport.unix import UnixEndpoint
from ppd_runtime.tune.comparison.methods import common_start

MODULES = (
    contention,
    decode,
    equal_devices,
    hop,
    passes,
    peers,
    pipeline,
    serve,
    serve_guidellm,
    siblings,
    stages,
    startup,
    tracing,
    weight_formats,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_benchmark_has_defaults_and_writes_json(module, tmp_path):
    options = module.parser().parse_args(["--json", str(tmp_path / "x.json")])
    assert options.json == tmp_path / "x.json"
    assert "python -m " + module.__name__ in module.__doc__


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (pipeline, ["--k", "0"]),
        (pipeline, ["--rounds", "many"]),
        (pipeline, ["--launcher", "mpi"]),
        (hop, ["--sizes", "10,x"]),
        (startup, ["--rounds", "-1"]),
        (decode, ["--dtype", "int8"]),
        (contention, ["--dtype", "int8"]),
        (tracing, ["--rounds", "none"]),
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
        (pipeline, ["--tokens", "1"], "--tokens 1: "),
        (pipeline, ["--emulate-layer-ms", "-3"], "layer_ms=-3.0: "),
        (pipeline, ["--model", "random:100x4"], "--model random:100x4: give random:HIDDENxLAYERS"),
        (equal_devices, ["--devices", "1"], "--devices 1: "),
        (equal_devices, ["--devices", "9999"], "--devices 9999: "),
        (decode, ["--rounds", "1"], "--rounds 1: give at least 2"),
        (decode, ["--tokens", "1"], "--tokens 1: give at least 2"),
        (peers, ["--tokens", "1"], "--tokens 1: "),
        (peers, ["--threads", "9999"], "--threads 9999: there are "),
        (peers, ["--engines", "llama"], "--engines llama: choose from ours-eager, "),
        (contention, ["--match-rate", "1.5"], "--match-rate 1.5: give a share from 0 to 1"),
        (contention, ["--seconds", "0"], "--seconds 0.0: give more than 0"),
        (tracing, ["--rounds", "1"], "--rounds 1: give at least 2"),
        (passes, ["--tokens", "2,99"], "--tokens 99: compiled passes are over 15 tokens at the most"),
        (startup, ["--layouts", "ordinary,dask"], "--layouts dask: choose from "),
        (weight_formats, ["--data", "none.txt"], "none.txt: No such file or directory; give a file of texts"),
        (stages, ["--tokens", "1"], "--tokens 1: "),
        (stages, ["--hop-ms", "-1"], "--hop-ms -1.0: give 0 or more"),
        (stages, ["--match-rate", "0", "--temperature", "1"], "--match-rate 0.0 with a temperature: "),
        (serve_endurance, ["--bad-share", "1.5"], "--bad-share 1.5: choose a share from 0 to 1"),
        (serve_endurance, ["--faults", "5", "--fault-every-s", "0"], "--faults 5: none happen with --fault-every-s 0"),
        (stages, ["--match-rate", "2"], "--match-rate 2.0: give a share from 0 to 1"),
        (stages, ["--beside", "--emulate-layer-ms", "3"], "--beside with --emulate-layer-ms 3.0: is for real cores"),
        (stages, ["--contention", "--emulate-layer-ms", "3"], "--contention with --emulate-layer-ms 3.0: "),
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
    module.parser().parse_args(options)


def test_the_endurances_own_commands_can_be_run():
    commands = [line.split() for line in serve_endurance.__doc__.splitlines() if line.strip().startswith("python -m")]
    assert len(commands) == 2
    for _, _, _, *options in commands:
        serve_endurance.check(serve_endurance.parser().parse_args(options))


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
    text = markdown(["a", "b"], [[1, 0.12345], [None, True]])
    assert text == "| a | b |\n| --- | --- |\n| 1 | 0.123 |\n| - | yes |"
    assert spread([1.0, 2.0, 3.0]) == "2 (1.5 to 2.5)"
    assert spread([1.5]) == "1.5"
    assert spread([1.0, 1.0012, 1.0024], 4) == "1.001 (1.001 to 1.002)"


def test_an_emulation_says_so_in_its_table():
    figures = dict.fromkeys(
        ("autoregressive_ms", "transformers_ms", "ppd_ms", "ratio", "predicted_ratio", "realised_saving"), 0.5
    )
    figures |= {
        "model": "demo",
        "k": 3,
        "match_rate": 1.0,
        "identical_tokens": 1.0,
        "pairs": 3,
        "compiled": False,
        "workers": 3,
    }
    figures |= {"ratio_quartiles": [0.4, 0.5, 0.6], "emulated_layer_ms": 3.0}
    figures |= {
        "ledger_ms": {
            "PPD": mean_ledger_ms(
                [LatencyBreakdown(0.001, 0.002, 0.0, 0.0, 0.0), LatencyBreakdown(0.003, 0.0, 0.0, 0.0, 0.0)]
            )
        }
    }
    assert "EMULATED devices of 3 ms a layer" in pipeline.table(figures)
    assert "mean, EMULATED devices" in pipeline.table(figures)
    assert "| PPD | 2.000 | 1.000 | 0.000 | 0.000 | 0.000 | 3.000 |" in pipeline.table(figures)
    assert "EMULATED" not in pipeline.table(figures | {"emulated_layer_ms": None})


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ("AMD EPYC, 2 cores", "amd-epyc-2-cores"),
        ("AMD EPYC (TM) 7B13, 2 cores", "amd-epyc-7b13-2-cores"),
        ("Intel(R) Xeon(R) Processor, 2 cores", "intel-xeon-2-cores"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz, 8 cores", "intel-xeon-8-cores"),
    ],
)
def test_a_reports_name_is_its_machines_kind(machine, kind):
    assert slug({"machine": machine}) == kind
    assert environment()["machine"].endswith("cores")


def test_rows_of_a_sections_commands_stand_under_one_head():
    speeds = [markdown(["way", "ms"], rows) for rows in ([["eager", 5.0]], [["eager", 7.0], ["compiled", 1.0]])]
    shares = markdown(["parts", "hops"], [["PPD", 0.1]])
    assert merged(speeds[:1]) == speeds[0]
    assert merged([f"{speeds[0]}\n\n{shares}", "FAILED with exit code 2: no", speeds[1]]).split("\n\n") == [
        markdown(["command", "way", "ms"], [[1, "eager", 5.0], [3, "eager", 7.0], [3, "compiled", 1.0]]),
        markdown(["command", "parts", "hops"], [[1, "PPD", 0.1]]),
        "Command 2 FAILED with exit code 2: no",
    ]


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "x"
    for text in ("one", "two"):
        write_whole(path, text)
        assert path.read_text() == text


@pytest.mark.parametrize("name", ["random:", "random:512", "random:0x4", "random:100x4", "random:64x1", "random:64xb"])
def test_random_models_of_no_shape(name):
    with pytest.raises(ValueError, match=f"--model {name}: give random:HIDDENxLAYERS"):
        random_config(name)


def test_a_random_model_is_there_for_a_while():
    with model_folder("random:64x3") as folder:
        info = describe(folder)
        assert info.num_layers == 3
        assert len(load_tokenizer(info)) <= info.vocab_size
    with pytest.raises(ValueError, match="no such folder"):
        describe(folder)
    with model_folder("random:little") as folder:
        assert random_config("random:little").num_key_value_heads < random_config("random:little").num_attention_heads
    with model_folder("demo") as name:
        assert name == "demo"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be kept on a core here")
def test_contention_needs_two_cores():
    with on_cores([max(os.sched_getaffinity(0))]), pytest.raises(ValueError, match="between two cores, .* may use 1:"):
        contention.measure(contention.parser().parse_args([]))


def test_the_bound_is_the_theorem_where_nothing_is_contended():
    calm = contention.Round(1.0, 1.0, 1.0, 1.0, 2.0, 2.0, core_share=1.0)
    assert [calm.ratio(rate) for rate in (0, 0.5, 1)] == [1, 0.75, 0.5]
    bounds = contention.bounds([calm], 0.5, num_layers=12, exit_layer=6)
    assert bounds["theorem"] == 0.75
    assert [row["ratio"] for row in bounds["rows"]] == [[pytest.approx(0.75)]] * 4
    assert [row["greatest_saving"] for row in bounds["rows"]] == [[pytest.approx(1)]] * 4


def test_the_bound_where_one_core_slows_the_other_down():
    busy = contention.Round(1.0, 1.2, 1.0, 1.4, 2.0, 2.2, core_share=1.0)
    bounds = contention.bounds([busy], 0.5, num_layers=12, exit_layer=6)
    savings = {row["step_to_floor"]: row["greatest_saving"] for row in bounds["rows"]}
    assert bounds["rows"][0]["ratio"] == [pytest.approx((1.4 + 2.2) / 4)]
    assert savings[1.0] == [pytest.approx(0.1 / 0.25)]
    assert savings[2.0] == [pytest.approx((0.4 + 1) / 2)]
    assert contention.bounds([busy], 0.0, num_layers=12, exit_layer=6)["rows"][0]["greatest_saving"] is None


def test_passes_at_the_ends_of_a_turn_do_not_count():
    begin, window_s = time.perf_counter() + 0.05, 2.0  # longer than a busy machine may keep a process waiting
    products = Products(nn.ModuleList([nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)]))
    assert products.num_bytes == (32 + 8) * 4
    seconds, share = contention.pass_time(products, contention.TimedTurn(0, 1, begin, begin + window_s))
    assert 0 < seconds < window_s
    assert share > 0
    assert contention.pass_time(products, contention.TimedTurn(0, 1, 0.0, 0.0))[0] is None


def test_a_silent_recorder_changes_no_result():
    recorder = tracing.SilentRecorder()
    recorder.begin(traced=True)
    recorder.resume()
    recorder.note(Kind.HEAD, 1.0, 2.0, 3)
    recorder.pause()
    assert recorder.ledger() == LatencyBreakdown(0.0, 0.0, 0.0, 0.0, 0.0)
    assert recorder.spans(0).spans == ()


def test_a_slow_link_hands_on_later_in_order_and_to_workers_alone():
    with found_sockets() as folder, contextlib.ExitStack() as stack:
        sockets = tempfile.mkdtemp()
        one, two, client = (stack.enter_context(closing(UnixEndpoint(sockets, rank))) for rank in (1, 2, CLIENT))
        stack.enter_context(slow_links(folder, delay_s=0.2))
        began = time.perf_counter()
        for request in (5, 6):
            one.send(2, End(1, request))
        one.send(CLIENT, End(1, 7))
        assert client.receive(0.1) == End(1, 7)
        assert [two.receive(5.0), two.receive(5.0)] == [End(1, 5), End(1, 6)]
        assert time.perf_counter() - began >= 0.2
    with found_sockets() as folder, pytest.raises(ValueError, match="no sockets of workers"), slow_links(folder, 0.2):
        pass


def test_held_out_prompts_are_whole_lines_of_held_out_files():
    documents = [d for d in read_standard_library() if d.path.startswith(("a", "f", "i"))]
    found = held_out.prompts(documents, count=9, characters=200)
    assert found == held_out.prompts(documents, count=9, characters=200)
    texts = {d.path: d.text for d in documents if d.held_out}
    for each in found:
        path, _, first = each["id"].rpartition("@")
        assert 200 <= len(each["prompt"]) < 2000
        assert texts[path][int(first) :].startswith(each["prompt"])
        assert each["prompt"].endswith("\n")


def test_threads_read_all_bytes_between_them():
    one, two = Reading(1 << 16), Reading(1 << 16, threads=min(2, len(os.sched_getaffinity(0))))
    assert one.num_bytes == two.num_bytes == 1 << 16
    assert one.seconds(3) > 0 < two.seconds(3)


def test_what_weights_of_few_bits_cost(model_folder, tmp_path):
    folder, out, prompts = model_folder("llama", dtype="bfloat16"), tmp_path / "int8", ("a fox", "The quick", "model")
    data, asked = str(write_texts(tmp_path / "texts.jsonl")), tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ["--data", data, "--rows", "3", "--length", "32", "--prompts", str(asked), "--tokens", "12"]
    figures = weight_formats.measure(weight_formats.parser().parse_args(["--model", str(folder), *options]))
    stored, half, int8, int4 = figures["formats"]
    assert (stored["weights"], stored["states"], half["states"]) == ("bfloat16", "float32", "bfloat16")
    assert (stored["more_loss"], stored["equal_tokens"], stored["equal_texts"]) == (0, 36, 3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, held_out = load_tokenizer(describe(str(folder))), read_texts(data).held_out
    rows = token_rows(tokenizer, held_out, 32, model.config.vocab_size)
    losses = [model(row[None], labels=row[None]).loss.item() for row in (rows[len(rows) * n // 3] for n in range(3))]
    assert stored["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert figures["held_out_tokens"] == 96
    exact, ask = OrdinaryDecoding(folder, dtype="float32"), {"max_new_tokens": 12, "ignore_eos": True}
    for row in (int8, int4):
        decoding = OrdinaryDecoding(folder, weights=row["weights"])
        pairs = [[each.generate(prompt, **ask).token_ids for each in (exact, decoding)] for prompt in prompts]
        assert row["equal_at_the_start"] == [common_start(*pair) for pair in pairs]
        assert row["equal_tokens"] >= sum(row["equal_at_the_start"])
        assert row["more_loss"] != 0
    quantise_model(str(folder), out, "int8")
    assert int8["bytes"] == sum(tensor.nbytes for _, tensor in map_tensors(out / QUANTISED))
    assert int4["bytes"] < int8["bytes"] < stored["bytes"] == sum(p.numel() * 2 for p in model.parameters())
    assert weight_formats.table(figures).count("\n") == 5
    with pytest.raises(ValueError, match="has int8 weights; give the model that they were made of"):
        weight_formats.measure(weight_formats.parser().parse_args(["--model", str(out), *options]))
