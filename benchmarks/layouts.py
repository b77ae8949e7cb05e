"""Layouts beside ordinary decoding on one core, in turn, on the same prompts, with default settings.

    python -m benchmarks.layouts --model smollm2 --json figures.json
    python -m benchmarks.layouts --eager --layouts "k=1;speculation=always,stages=2,threads=2"
    python -m benchmarks.layouts --model random:300m --weights int8 --layouts stages=2 --never-right
    python -m benchmarks.layouts --model smollm2:Q8_0 --prompts edits --tokens 400 --layouts stages=1
    python -m benchmarks.layouts --layouts "k=3,stages=4;rows=8,threads=4" --emulate-layer-ms 3 --hop-ms 5

A layout is settings of `PPDRuntime`, with semicolons between them. threads=N is ordinary decoding with N threads, which
is tensor parallelism on CPUs. Prompts are chats where the model has a template. Times are for a token after the first,
ratios are medians over the pairs, below 1 where the layout is faster. Of a pair the two take turns in going first. A
layout's first request has a column of its own; nothing is known of earlier starts then. "Theorem 4.1" is the ratio that
the paper predicts for the measured match rate (of stages, E[J]/N for the boundaries that named tokens first). Realised
saving is the measured saving over the predicted one, as in the paper's Table 3. --match-rate has exit heads that are
right with this probability.

With --emulate-layer-ms devices are EMULATED: a stage computes its real result and then sleeps until a layer's time has
passed, in ordinary decoding too. Protocol and scheduling are real, the devices are not. Of N devices threads=N has
layers of 1/N of the time and two all-reduces each. --hop-ms delays every message from worker to worker.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.edits import edit_prompts, quoted
from benchmarks.emulated import cores_awake, slow_links, socket_folder, woken_at_once
from benchmarks.models import MODEL_HELP, model_folder, untrained_drafter
from benchmarks.recording import Figures, new_parser, positive, run, share, table_of
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.cost_model.staged import GPT_FAST_ALL_REDUCE_MS
from ppd_runtime.launch import guessing_times
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.results import Stats
from ppd_runtime.settings.config import without_earlier_texts
from ppd_runtime.training.corpus import read_standard_library
from ppd_runtime.tune.compare import Comparison, Pair
from ppd_runtime.tune.figures import figures, saving_share
from ppd_runtime.tune.prompt_files import read_prompts
from ppd_runtime.tune.rows import BASELINE
from ppd_runtime.tune.subject import message_ids
from ppd_runtime.tune.tables import markdown_table
from ppd_runtime.tune.ways import Generator, beside_ordinary

EDITS, REPEATING, HELD_OUT = "edits", "repeating", "held-out"
_REPEATING_FILE = Path(__file__).with_name("repeating_prompts.jsonl")
_CHARACTERS = 600  # of a held-out passage


def measure(options: argparse.Namespace) -> Figures:
    """Run each layout beside ordinary decoding; a row a layout."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    if options.match_rate is not None and options.temperature:
        raise ValueError(f"--match-rate {options.match_rate} with a temperature: its texts are greedy, drop one")
    place = {"weights": options.weights, "dtype": options.dtype, "compile": False if options.eager else None}
    with contextlib.ExitStack() as stack:
        if options.emulate_layer_ms is not None:
            place["emulate"] = EmulatedDevice(options.emulate_layer_ms, row_cost=options.row_cost)
            stack.enter_context(woken_at_once())
            stack.enter_context(cores_awake())
        model = stack.enter_context(model_folder(options.model))
        ordinary = stack.enter_context(OrdinaryDecoding(model, threads=options.threads, **place))
        prompts = _prompts(ordinary, options)
        rows = [_row(layout, model, place, ordinary, prompts, options) for layout in options.layouts.split(",")]
    about = {name: getattr(options, name) for name in ("model", "weights", "emulate_layer_ms", "hop_ms", "tokens")}
    return {**about, "compiled": ordinary.config.compile, "prompts": len(prompts), "rows": rows}


def settings_of(layout: str) -> dict[str, Any]:
    """Settings by name of a text such as "stages=2;rows=4;repetitions=no"; cuts=7+15 are two cuts."""
    found: dict[str, Any] = {}
    for part in layout.split(";"):
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise ValueError(f"--layouts {layout}: give settings such as stages=2 or k=3;workers=1")
        found[name] = {"yes": True, "no": False}.get(value, int(value) if value.isdecimal() else value)
    if "cuts" in found:
        found["cuts"] = str(found["cuts"]).replace("+", ",")
    return found


def _prompts(ordinary: OrdinaryDecoding, options: argparse.Namespace) -> list[list[int]]:
    if options.prompts == EDITS:
        return edit_prompts(ordinary)[: options.limit]
    if options.prompts == HELD_OUT:
        texts = held_out(options.limit)
    else:
        source = str(_REPEATING_FILE) if options.prompts == REPEATING else options.prompts
        texts = [prompt.text for prompt in read_prompts(source, options.limit)]
    return message_ids(ordinary, texts, options.tokens)


def held_out(count: int) -> list[str]:
    """Passages of code that the demo model has not seen: whole lines of its corpus' held-out files, always the same."""
    documents = read_standard_library()
    files = [d.text for d in documents if d.held_out and d.path.endswith(".py") and len(d.text) > 2 * _CHARACTERS]
    draws, found = np.random.default_rng(0), []
    for number in range(count):
        text = files[number % len(files)]
        first = text.rfind("\n", 0, int(draws.integers(1, len(text) - _CHARACTERS))) + 1
        found.append(text[first : text.find("\n", first + _CHARACTERS) + 1 or len(text)])
    return found


def _row(
    layout: str,
    model: str,
    place: Mapping[str, Any],
    ordinary: OrdinaryDecoding,
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> Figures:
    params = SamplingParams(options.tokens, temperature=options.temperature, seed=1, ignore_eos=True)
    settings = settings_of(layout) | place
    with contextlib.ExitStack() as stack:
        if options.match_rate is not None and settings.get("stages") != 1:
            texts = tuple((*ids, *ordinary.generate(ids, params).token_ids) for ids in prompts)
            settings["exit_head"] = OracleHead(texts, options.match_rate, ordinary.info.vocab_size)
        if options.match_rate is not None and settings.keys() & {"stages", "cuts"}:
            settings["drafter"] = stack.enter_context(untrained_drafter(ordinary.info))
        way = stack.enter_context(_opened(model, settings, ordinary, options.hop_ms))
        found = beside_ordinary(layout, way, ordinary, prompts, params, rounds=options.rounds)
    is_edit = options.prompts == EDITS
    shares = [quoted(prompts[place], texts[BASELINE].token_ids) for place, texts in found.turns if is_edit]
    return {"layout": layout, "quoted": shares, **_figures(layout, found, len(prompts))}


@contextlib.contextmanager
def _opened(model: str, settings: dict[str, Any], ordinary: OrdinaryDecoding, hop_ms: float) -> Iterator[Generator]:
    """A layout that has been started, which knows no findings of earlier starts; compiled code and weights are kept."""
    if threads := settings.pop("threads", None):
        settings.pop("exit_head", None)
        if device := settings.get("emulate"):
            settings["emulate"] = EmulatedDevice(device.layer_ms / threads + 2 * GPT_FAST_ALL_REDUCE_MS[-1])
            threads = 1
        with OrdinaryDecoding(model, threads=threads, **settings | {"dtype": ordinary.dtype}) as parallel:
            yield parallel
        return
    own = without_earlier_texts(settings)  # each prompt comes several times
    if "layout" not in own:
        own = {"launcher": "processes"} | own
    known, guessing_times.noted = guessing_times.noted, lambda *_: ()
    try:
        with socket_folder() as folder, PPDRuntime(model, **own) as runtime:
            if hop_ms:
                slow_links(folder, hop_ms / 1000)
            yield runtime
    finally:
        guessing_times.noted = known


def _figures(layout: str, found: Comparison, num_prompts: int) -> Figures:
    pairs = found.pairs(layout, BASELINE)
    by_prompt = [_ratios(found.pairs(layout, BASELINE, [place])) for place in range(num_prompts)]
    summary = figures(pairs)
    stats = [[text.stats for text in texts if text.stats] for texts in zip(*pairs, strict=True)]
    speedup, allowed = summary.step_speedup, summary.allowed_speedup
    return {
        "ms": [summary.ordinary_ms_per_token, summary.ms_per_token],
        "ratios": _ratios(pairs),
        "slowest_prompt": max(map(statistics.median, by_prompt)),
        "first_request": _ratios([Pair(found.first[BASELINE], found.first[layout])])[0],
        "match_rate": _match_rate(stats[1]),
        "first_boundary": _first_boundary(stats[1]),
        "predicted": 1 / allowed if allowed else None,
        "realised_saving": saving_share(speedup.median, allowed) if speedup else None,
        "identical": summary.equal_texts == 1,
        "ledgers_ms": [mean_ledger_ms(of_way) for of_way in stats],
    }


def _ratios(pairs: Sequence[Pair]) -> list[float]:
    """Of the times of a token after the first; every text has two at least."""
    return [(pair.text.step_s or 0.0) / (pair.ordinary.step_s or 1.0) for pair in pairs]


def _match_rate(stats: Sequence[Stats]) -> float | None:
    """The share of tokens that were guessed right."""
    if first := _first_boundary(stats):
        return 1 - first[-1]
    rates = [one.match_rate for one in stats if one.asked and one.match_rate is not None]
    return statistics.mean(rates) if rates else None


def _first_boundary(stats: Sequence[Stats]) -> list[float]:
    """The shares of tokens that each boundary was the first to name, and last of those that none named."""
    counts = [sum(of) for of in zip(*(one.first_boundary for one in stats if one.first_boundary), strict=True)]
    return [count / sum(counts) for count in counts] if sum(counts) else []


def mean_ledger_ms(stats: Sequence[Stats]) -> dict[str, float]:
    """Mean milliseconds of each part of a token's time; means, so that they still sum to the whole."""
    ledgers = [asdict(one.ledger_per_token) for one in stats]
    return {name.removesuffix("_s"): 1000 * statistics.mean(one[name] for one in ledgers) for name in ledgers[0]}


def table(figures: Figures) -> str:
    """A row a layout, and where a token's time went."""
    emulated = figures["emulate_layer_ms"]
    devices = f", EMULATED devices of {emulated:g} ms a layer" if emulated is not None else ""
    devices += f", {figures['hop_ms']:g} ms more a hop" if figures["hop_ms"] else ""
    rows = [{**row, "ordinary": row["ms"][0], "own": row["ms"][1]} for row in figures["rows"]]
    for row in rows:
        row["named"] = ", ".join(f"{named:.2f}" for named in row["first_boundary"])
    heads = {"layout": f"layout, {figures['model']}{devices}", "ordinary": "ordinary, ms a token"}
    heads |= {"own": "layout, ms a token", "ratios": "ratio (quartiles)", "slowest_prompt": "slowest prompt"}
    heads |= {"first_request": "first request", "match_rate": "match rate", "named": "first named by boundary"}
    heads |= {"quoted": "of the answer in the prompt"}
    heads |= {"predicted": "Theorem 4.1", "realised_saving": "realised saving", "identical": "tokens identical"}
    ledgers = {"ordinary decoding": figures["rows"][0]["ledgers_ms"][0]}
    ledgers |= {row["layout"]: row["ledgers_ms"][1] for row in figures["rows"]}
    columns = ["where a token's time went, ms, mean" + ", EMULATED devices" * (emulated is not None)]
    columns += [*ledgers["ordinary decoding"], "whole"]
    went = [[way, *ledger.values(), sum(ledger.values())] for way, ledger in ledgers.items()]
    return f"{table_of(rows, **heads)}\n\n{markdown_table(columns, went)}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo", help=MODEL_HELP)
    found.add_argument("--layouts", default="stages=2,k=1,k=3", help="with commas, settings of one with semicolons")
    found.add_argument("--weights", choices=["int8", "int4"])
    found.add_argument("--dtype", default="auto")
    found.add_argument("--threads", type=positive, default=1, help="of ordinary decoding beside the layouts")
    found.add_argument("--eager", action="store_true", help="without compiled code, in ordinary decoding too")
    found.add_argument(
        "--prompts", default="demo", help=f"JSON lines with a prompt each, demo, {EDITS}, {REPEATING}, {HELD_OUT}"
    )
    found.add_argument("--limit", type=positive, default=12, help="prompts")
    found.add_argument("--tokens", type=positive, default=64, help="new tokens for each prompt")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--rounds", type=positive, default=1, help="of all prompts, behind the first request")
    found.add_argument("--match-rate", type=share, help="heads that are right with this probability, no drafter")
    found.add_argument("--never-right", dest="match_rate", action="store_const", const=0.0, help="--match-rate 0")
    found.add_argument("--emulate-layer-ms", type=float, help="devices that take so long for a layer")
    found.add_argument("--row-cost", type=float, default=0.0, help="of a further row on such a device, as a share")
    found.add_argument("--hop-ms", type=float, default=0.0, help="what each message from worker to worker takes longer")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
