"""Ours beside llama.cpp, OpenVINO GenAI, CTranslate2 and transformers: the same weights, prompts and greedy tokens.

    python -m benchmarks.peers --rounds 5 --json figures.json
    python -m benchmarks.peers --model random:1024x24 --tokens 32 --limit 1
    python -m benchmarks.peers --model smollm2:Q4_K_M --prompts prompts.jsonl

Every engine is a process of its own for each format and number of threads, on as many cores as threads, and all are
asked in turn; the first round is dropped. Times are for a token after the first. The floor is the time in which as
many bytes as the weights have in that format, embeddings apart, can be read here by so many threads. Texts are compared
with those of our eager passes where the weights are the same numbers. An engine that is not installed, or does not take
the model, has the reason in its row. The model is one that is stored in bfloat16, which every engine can hold exactly,
or a GGUF file, which ours and llama.cpp read as it is.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.engine_process import EngineProcess
from benchmarks.engines import BY_ROWS, COMPILED, EAGER, ENGINES, FILE, STAGES, Task
from benchmarks.floor import Reading
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.pipeline import PROMPTS
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread, whole_numbers
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.packages import packaged_file
from ppd_runtime.models.checkpoint.quantisable import HEAD, quantised_linears
from ppd_runtime.tune.comparison.methods import common_start
from ppd_runtime.tune.prompt_files import read_prompts
from ppd_runtime.tune.quartiles import quartiles


@dataclass(frozen=True)
class Format:
    """How weights are held."""

    bits: float
    """Of a layer's weight, with its share of a scale."""
    head_bits: float
    numbers: str | None
    """Formats of one name hold the same numbers."""


FORMATS: Mapping[str, Format] = {
    "float32": Format(32, 32, "stored"),
    "bfloat16": Format(16, 16, "stored"),
    "float16": Format(16, 16, None),  # the smallest numbers are rounded
    "int8": Format(8.5, 8.5, "int8"),
    "int4": Format(4.5, 8.5, "int4"),
    f"int8{BY_ROWS}": Format(8, 8, None),
    FILE: Format(0, 0, FILE),
}
_OF_ENGINE: Mapping[str, Sequence[str]] = {
    EAGER: ("float32", "int8", "int4"),
    COMPILED: ("bfloat16", "int8", "int4"),
    STAGES: ("bfloat16", "int8", "int4"),
    "transformers": ("float32",),
    "llama.cpp": ("bfloat16", "int8", "int4"),
    "OpenVINO": ("float16", "int8", "int4"),
    "CTranslate2": ("float32", f"int8{BY_ROWS}"),
}
_OF_FILES: Mapping[str, Sequence[str]] = dict.fromkeys((EAGER, COMPILED, STAGES, "llama.cpp"), (FILE,))
"""Which engines read a GGUF file."""
_MOST_PROMPT = 256  # tokens
_PAUSE_S = 0.25
"""Between two engines' turns: threads that wait spin for as long as 0.2 s."""


@dataclass
class Row:
    """One engine with one format and so many threads, and what it has answered."""

    process: EngineProcess
    num_bytes: int
    times: list[float] = field(default_factory=list)
    texts: dict[int, list[list[int]]] = field(default_factory=dict)
    floors: list[float] = field(default_factory=list)

    @property
    def numbers(self) -> str | None:
        """Which numbers its weights are."""
        return FORMATS[self.process.task.weights].numbers

    def figures(self, expected: Mapping[int, list[int]] | None) -> Figures:
        """What is reported of it; `expected` are the texts of the same numbers, by the prompts' places."""
        task, floor_ms = self.process.task, statistics.median(self.floors) * 1000
        found: Figures = {"engine": task.engine, "weights": task.weights, "threads": task.threads}
        found |= {"floor_ms": floor_ms, "reason": self.process.reason}
        if self.process.reason:
            return found
        ms = [1000 * seconds for seconds in self.times]
        found |= {"times_ms": ms, "ms": statistics.median(ms), "share_of_bandwidth": floor_ms / statistics.median(ms)}
        if len(ms) > 1:
            found["quartiles_ms"] = quartiles(ms)
        if expected:
            pairs = [(text, expected[place]) for place, texts in self.texts.items() for text in texts]
            starts = [common_start(text, right) for text, right in pairs]
            found["texts"] = len(pairs)
            found["equal_texts"] = sum(text == right for text, right in pairs)
            found["equal_start"] = sum(starts) / sum(len(right) for _, right in pairs)
        return found


def measure(options: argparse.Namespace) -> Figures:
    """Run everything in turn; the figures by name."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    cores = len(os.sched_getaffinity(0))
    if (most := max(options.threads)) > cores:
        raise ValueError(f"--threads {most}: there are {cores} cores")
    engines = _chosen(options.engines)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with model_folder(options.model) as model, tempfile.TemporaryDirectory(prefix="ppd-peers-") as folder:
            info, file = describe(model), packaged_file(model) or Path(model)
            if file.is_file():
                return _measure(options, file, info, [name for name in engines if name in _OF_FILES], folder)
            if (dtype := model_config(info.folder).dtype) != torch.bfloat16:
                raise ValueError(f"--model {options.model}: is stored in {dtype}, give one in bfloat16")
            return _measure(options, info.folder, info, engines, folder)
    finally:
        torch.set_num_threads(threads)


def _chosen(engines: str | None) -> list[str]:
    names = [name.strip() for name in engines.split(",")] if engines else list(ENGINES)
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"--engines {name}: choose from {', '.join(ENGINES)}")
    return names


def _measure(options: argparse.Namespace, model: Path, info: ModelInfo, engines: Sequence[str], folder: str) -> Figures:
    tokenizer, formats = load_tokenizer(info), _OF_FILES if model.is_file() else _OF_ENGINE
    texts = [one.text for one in read_prompts(options.prompts, options.limit)] if options.prompts else PROMPTS
    prompts = [list(tokenizer.encode(prompt))[:_MOST_PROMPT] for prompt in texts[: options.limit]]
    context = max(map(len, prompts)) + options.tokens
    tasks = [
        Task(engine, weights, threads, str(model), folder, context)
        for threads in options.threads
        for engine in engines
        for weights in formats[engine]
        if threads > 1 or engine != STAGES
    ]
    with _rows(tasks, model, info) as rows:
        for turn in range(options.rounds + 1):
            _round(rows, prompts, options.tokens, keep=turn > 0)
        expected = {
            row.numbers: {place: texts[0] for place, texts in row.texts.items()}
            for row in reversed(rows)
            if row.process.task.engine == EAGER and not row.process.reason
        }
        figures = [row.figures(expected.get(row.numbers)) for row in rows]
    shape = {name: getattr(options, name) for name in ("model", "tokens", "rounds")}
    return {**shape, "prompts": len(prompts), "rows": figures}


@contextlib.contextmanager
def _rows(tasks: Sequence[Task], model: Path, info: ModelInfo) -> Iterator[list[Row]]:
    """Each engine's process, started one after the other: one compiles or writes what the next one finds."""
    with contextlib.ExitStack() as stack:
        rows = []
        for task in tasks:
            of_file = file_bytes(model) if model.is_file() else None
            row = Row(EngineProcess(task), of_file or stored_bytes(info, FORMATS[task.weights]))
            stack.callback(row.process.close)
            rows.append(row)
        yield rows


def _round(rows: Sequence[Row], prompts: Sequence[list[int]], num_tokens: int, keep: bool) -> None:
    """Every engine once, then the floors."""
    for row in rows:
        time.sleep(_PAUSE_S)
        answers = [row.process.generate(prompt, num_tokens) for prompt in prompts]
        for place, answer in enumerate(answers):
            if answer and keep:
                row.texts.setdefault(place, []).append(answer[0])
                row.times.append(answer[1])
    sizes = {(row.num_bytes, row.process.task.threads) for row in rows}
    floors = {size: Reading(*size).seconds(num_tokens) for size in sorted(sizes)}
    for row in rows:
        row.floors += [floors[row.num_bytes, row.process.task.threads]] if keep else []


def stored_bytes(info: ModelInfo, form: Format) -> int:
    """Of the weights that a token's pass reads: the linear layers' and the head's."""
    linears = quantised_linears(skeleton_of(model_config(info.folder), info.num_layers))
    bits = (linear.weight.numel() * (form.head_bits if name == HEAD else form.bits) for name, linear in linears.items())
    return int(sum(bits)) // 8


def file_bytes(file: Path) -> int:
    """Of a GGUF file's matrices that a token's pass reads: all but an embedding that is not the head too."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())


def table(figures: Figures) -> str:
    """A row for each engine, format and number of threads, in Markdown."""
    columns = ["threads", "weights", "engine", "ms a token (quartiles)", "tokens/s", "floor, ms"]
    columns += ["share of the bandwidth", "texts equal", "tokens before another one"]
    rows = sorted(figures["rows"], key=lambda row: (row["threads"], list(FORMATS).index(row["weights"])))
    return markdown(["model", *columns], [[figures["model"], *_cells(row)] for row in rows])


def _cells(row: Figures) -> list[object]:
    cells: list[object] = [row["threads"], row["weights"], row["engine"]]
    if row["reason"]:
        return [*cells, row["reason"], None, row["floor_ms"], None, None, None]
    cells += [spread(row["times_ms"]), f"{1000 / row['ms']:.0f}", row["floor_ms"], row["share_of_bandwidth"]]
    if "texts" not in row:
        return [*cells, None, None]
    return [*cells, f"{row['equal_texts']} of {row['texts']}", row["equal_start"]]


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--engines", help=f"some of: {', '.join(ENGINES)}; default: all")
    options.add_argument("--threads", type=whole_numbers, default=[1, 2], help="of each engine, with commas")
    options.add_argument("--tokens", type=positive, default=64, help="new tokens for each prompt, two at least")
    options.add_argument("--prompts", help="JSON lines with a prompt each; default: three of code")
    options.add_argument("--limit", type=positive, default=3, help="prompts")
    options.add_argument("--rounds", type=positive, default=5)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
