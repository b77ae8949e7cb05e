"""The staged layout beside ordinary decoding, in turn, on texts that the demo model has not seen.

    python -m benchmarks.stages --stages 4 --k 3 --rows 8 --emulate-layer-ms 3 --compile --launcher processes
    python -m benchmarks.stages --stages 4 --k 3 --rows 8 --emulate-layer-ms 3 --compile --hop-ms 5
    python -m benchmarks.stages --stages 4 --k 3 --rows 8 --emulate-layer-ms 3 --compile --match-rate 0 --no-repetitions
    python -m benchmarks.stages --stages 4 --k 3 --rows 8 --emulate-layer-ms 3 --compile --prompts repeating
    python -m benchmarks.stages --stages 2 --k 3 --compile --beside --contention

Times are for a token after the first; the first round is dropped, and serves the heads' calibration.
Below the row stands where the time went: by ordinary decoding's and the last stage's ledgers, and by stage in further
runs of three of the texts, in the same turns, that record what each does, which costs some time of its own.
With --emulate-layer-ms every stage computes its real result and then sleeps until that time per layer has passed, as a
device would take it for all rows of a pass. --hop-ms hands every message from worker to worker on so much later.
--match-rate has heads that are right with this probability, and say so; at 0 no candidate is right.
--beside runs the paper's layout, with k = 1 and with k = 3 on one sub-process, and two threads in the same turns.
--contention says what `benchmarks.contention` leaves of the saving on two cores, for boundary 1's share of the tokens.
--prompts repeating: prompts of code that repeats itself (repeating_prompts.jsonl), for boundary 0.
"""

import argparse
import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks import contention
from benchmarks.keep_cores_awake import keep_cores_awake
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.pipeline import exit_head, woken_at_once
from benchmarks.recording import Figures, ledger_table, markdown, mean_ledger_ms, new_parser, positive, run
from benchmarks.slow_links import found_sockets, slow_links
from benchmarks.stage_ledgers import StageLedgers
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.cost_model import staged
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.results import GenerationResult
from ppd_runtime.tune.comparison.in_turn import on_core_of
from ppd_runtime.tune.prompt_files import read_prompts
from ppd_runtime.tune.quartiles import quartiles

STAGES, THREADS, _RECORDED = "stages", "2 threads", "stages, recorded"
REPEATING = "repeating"
_REPEATING_FILE = Path(__file__).with_name("repeating_prompts.jsonl")
_NUM_RECORDED = 3  # texts
_PAPERS = {"PPD, k=1": {"k": 1}, "PPD, k=3 on 1 sub-process": {"k": 3, "workers": 1}}
Pair = tuple[GenerationResult, GenerationResult]
"""Ordinary decoding's and another way's result for one prompt."""


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    _check(options)
    source = str(_REPEATING_FILE) if options.prompts == REPEATING else options.prompts
    texts = [prompt.text for prompt in read_prompts(source, options.limit)]
    params = SamplingParams(options.tokens, options.temperature, seed=1, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(model_folder(options.model))
        device = None
        if options.emulate_layer_ms is not None:
            device = EmulatedDevice(options.emulate_layer_ms, row_cost=options.row_cost)
            stack.enter_context(woken_at_once())
            stack.enter_context(keep_cores_awake())
        place = {"dtype": options.dtype, "compile": options.compile, "emulate": device}
        ordinary = OrdinaryDecoding(model, **place)
        prompts = [ordinary.tokenizer.encode(text) for text in texts]
        head = exit_head(options, ordinary, prompts)
        runtime, traced = (
            stack.enter_context(_opened(options, model, exit_head=head, trace=trace, **place))
            for trace in (False, True)
        )
        with contextlib.ExitStack() as beside:
            others = _others(options, model, head, beside) if options.beside else {}
            ways = {STAGES: runtime, _RECORDED: traced} | others
            pairs = _paired_runs(options.rounds, ordinary, ways, prompts, params)
        ledgers = StageLedgers.of([got for _, got in pairs.pop(_RECORDED)], options.tokens)
        figures = _figures(options, runtime, pairs) | asdict(ledgers)
        figures["contention"] = _contention(options, model, figures) if options.contention else None
        bound = figures["bound"]
        saving = (1 - 1 / figures["speedup"]) / (1 - 1 / bound) if bound > 1 else None
        return figures | {"realised_saving": saving}


def table(figures: Figures) -> str:
    """The figures in Markdown, as an emulation's where they are."""
    emulated = figures["emulated_layer_ms"]
    columns = ["layout", "ordinary, ms a token", "stages", "speed-up", "quartiles", "N/E[J]"]
    columns += ["realised saving", "tokens first named at boundary 1, 2, …, never", "tokens identical", "texts"]
    layout = f"{figures['stages']} stages, k={figures['k']}, rows={figures['rows']}, T={figures['temperature']:g}"
    layout += "" if figures["repetitions"] else ", without repetitions"
    layout += "" if figures["match_rate"] is None else f", match rate {figures['match_rate']:g}"
    conditions = f", EMULATED devices of {emulated:g} ms a layer" if emulated is not None else ""
    conditions += f", {figures['hop_ms']:g} ms more a hop" if figures["hop_ms"] else ""
    row = [
        layout + ", compiled" * figures["compiled"] + conditions,
        *(figures[name] for name in ("autoregressive_ms", "staged_ms", "speedup")),
        f"{figures['speedup_quartiles'][0]:.2f} to {figures['speedup_quartiles'][2]:.2f}",
        *(figures[name] for name in ("bound", "realised_saving")),
        ", ".join(map(str, figures["first_boundary"])),
        figures["identical_tokens"],
        figures["texts"],
    ]
    tables = [markdown(columns, [row]), *_ledgers(figures)]
    if figures["beside"]:
        names = ("way", "ms", "speedup", "identical")
        rows = [[way[name] for name in names] for way in figures["beside"]]
        tables.append(markdown(["in the same turns", "ms a token", "speed-up", "tokens identical to ordinary"], rows))
    if told := figures["contention"]:
        columns = [
            "boundary 1's share",
            "step / floor",
            "ratio that contention leaves",
            "measured",
            "share of its saving",
        ]
        names = ("match_rate", "step_to_floor", "ratio", "measured_ratio", "realised")
        tables.append(markdown(columns, [[told[name] for name in names]]))
    return "\n\n".join(tables)


def _ledgers(figures: Figures) -> list[str]:
    is_emulated = figures["emulated_layer_ms"] is not None
    path = {"ordinary decoding": figures["ordinary_ledger_ms"], "stages, the tokens' path": figures["ledger_ms"]}
    return [ledger_table(rows, is_emulated) for rows in (path, figures["by_stage_ms"])]


@contextlib.contextmanager
def _opened(options: argparse.Namespace, model: str, **settings: object) -> Iterator[PPDRuntime]:
    """The staged layout, on links as slow as they are asked for."""
    asked = {name: getattr(options, name) for name in ("stages", "cuts", "k", "rows", "launcher")}
    asked["repetitions"] = not options.no_repetitions
    with found_sockets() as folder, PPDRuntime(model, **asked, **settings) as runtime:
        slow = slow_links(folder, options.hop_ms / 1000) if options.hop_ms else contextlib.nullcontext()
        with slow:
            yield runtime


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    if not 0 <= options.hop_ms < float("inf"):
        raise ValueError(f"--hop-ms {options.hop_ms}: give 0 or more")
    if options.match_rate is not None and options.temperature:
        raise ValueError(f"--match-rate {options.match_rate} with a temperature: its texts are greedy, drop one")
    for name in ("beside", "contention"):
        if getattr(options, name) and options.emulate_layer_ms is not None:
            raise ValueError(
                f"--{name} with --emulate-layer-ms {options.emulate_layer_ms}: is for real cores, drop one"
            )


def _others(
    options: argparse.Namespace, model: str, head: str | OracleHead, stack: contextlib.ExitStack
) -> dict[str, TextGenerator]:
    """Other ways to use two cores."""
    place = {"dtype": options.dtype, "compile": options.compile}
    found: dict[str, TextGenerator] = {THREADS: OrdinaryDecoding(model, threads=2, **place)}
    for name, layout in _PAPERS.items():
        paper = PPDRuntime(model, launcher=options.launcher, exit_head=head, **layout, **place)
        found[name] = stack.enter_context(paper)
    return found


def _paired_runs(
    rounds: int,
    ordinary: OrdinaryDecoding,
    ways: Mapping[str, TextGenerator],
    prompts: Sequence[list[int]],
    params: SamplingParams,
) -> dict[str, list[Pair]]:
    """Every prompt in every way, in turn, with ordinary decoding on the last stage's core."""
    pairs: defaultdict[str, list[Pair]] = defaultdict(list)
    for turn, prompt in itertools.product(range(rounds + 1), prompts):
        with on_core_of(ways[STAGES]):
            expected = ordinary.generate(prompt, params)
        for name, way in ways.items():
            if name == _RECORDED and prompt not in prompts[:_NUM_RECORDED]:
                continue
            got = way.generate(prompt, params)
            pairs[name] += [(expected, got)] if turn else []
    return pairs


def _figures(options: argparse.Namespace, runtime: PPDRuntime, by_way: Mapping[str, list[Pair]]) -> Figures:
    pairs = by_way[STAGES]
    ratios = _speedups(pairs)
    first = np.sum([got.stats.first_boundary for _, got in pairs], axis=0)
    same = [ours == theirs for a, b in pairs for ours, theirs in zip(a.token_ids, b.token_ids, strict=False)]
    return {
        "model": options.model,
        "stages": runtime.config.stages,
        "num_layers": runtime.info.num_layers,
        "cuts": options.cuts,
        "k": options.k,
        "rows": options.rows,
        "repetitions": not options.no_repetitions,
        "temperature": options.temperature,
        "match_rate": options.match_rate,
        "launcher": runtime.launcher,
        "compiled": options.compile,
        "emulated_layer_ms": options.emulate_layer_ms,
        "row_cost": options.row_cost,
        "hop_ms": options.hop_ms,
        "autoregressive_ms": statistics.median(a.stats.time_per_token_s for a, _ in pairs) * 1000,
        "staged_ms": _ms(pairs),
        "speedup": statistics.median(ratios),
        "speedup_quartiles": quartiles(ratios),
        "first_boundary": first.tolist(),
        "bound": staged.speedup_bound((first / first.sum()).tolist()),
        "identical": all(a.token_ids == b.token_ids for a, b in pairs),
        "identical_tokens": "all" if all(same) else f"{np.mean(same):.4f}",
        "texts": len(pairs),
        "ledger_ms": mean_ledger_ms([b.stats.ledger_per_token for _, b in pairs]),
        "ordinary_ledger_ms": mean_ledger_ms([a.stats.ledger_per_token for a, _ in pairs]),
        "beside": [
            {
                "way": way,
                "ms": _ms(others),
                "speedup": statistics.median(_speedups(others)),
                "identical": all(a.token_ids == b.token_ids for a, b in others),
            }
            for way, others in by_way.items()
            if way != STAGES
        ],
    }


def _ms(pairs: Sequence[Pair]) -> float:
    return statistics.median(got.stats.time_per_token_s for _, got in pairs) * 1000


def _speedups(pairs: Sequence[Pair]) -> list[float]:
    return [expected.stats.time_per_token_s / got.stats.time_per_token_s for expected, got in pairs]


def _contention(options: argparse.Namespace, model: str, figures: Figures) -> Figures:
    """What two cores' contention leaves of the time, and how much of that saving was measured."""
    named = figures["first_boundary"]
    match_rate = named[0] / sum(named)
    settings = ["--model", model, "--dtype", options.dtype, "--match-rate", str(match_rate), "--seconds", "0.2"]
    found = contention.measure(contention.parser().parse_args([*settings, "--rounds", "5"]))
    every = found["rows"][2]
    floor_ms = statistics.median(every["alone_ms"])
    step, theorem = max(1.0, figures["autoregressive_ms"] / floor_ms), found["bounds"]["theorem"]
    left = contention.for_step(statistics.median(found["bounds"]["rows"][0]["ratio"]), theorem, step)
    return {
        "match_rate": match_rate,
        "step_to_floor": step,
        "ratio": left,
        "measured_ratio": 1 / figures["speedup"],
        "realised": (1 - 1 / figures["speedup"]) / (1 - left) if left < 1 else None,
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo", help=MODEL_HELP)
    found.add_argument("--prompts", default="demo", help="JSON Lines, demo, or repeating")
    found.add_argument("--limit", type=positive, default=6, help="prompts")
    found.add_argument("--stages", type=positive)
    found.add_argument("--cuts")
    found.add_argument("--k", type=positive, default=3)
    found.add_argument("--rows", type=positive, default=1)
    found.add_argument("--row-cost", type=float, default=0.0, help="of a further row on an emulated device, as a share")
    found.add_argument("--no-repetitions", action="store_true", help="without boundary 0")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--tokens", type=positive, default=64)
    found.add_argument("--rounds", type=positive, default=3)
    found.add_argument("--dtype", default="float32")
    found.add_argument("--launcher", default="processes")
    found.add_argument("--compile", action="store_true")
    found.add_argument("--emulate-layer-ms", type=float)
    found.add_argument("--hop-ms", type=float, default=0.0, help="what each message from worker to worker takes longer")
    found.add_argument("--match-rate", type=float, help="heads that are right with this probability")
    found.add_argument("--beside", action="store_true", help="the paper's layout and two threads in the same turns")
    found.add_argument("--contention", action="store_true", help="what two cores' contention leaves of the saving")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
