"""Ours beside llama.cpp and transformers: the same weights, prompts and greedy tokens.

    python -m benchmarks.peers --rounds 5 --json figures.json
    python -m benchmarks.peers --model random:1024x24 --tokens 32 --limit 1
    python -m benchmarks.peers --model smollm2:Q4_K_M --prompts prompts.jsonl

Every engine is a process of its own for each format and number of threads, on as many cores as threads, and all
continue a prompt before the next one comes; a first turn is dropped. Times are for a token after the first. The floor
is the time in which as many bytes as the weights have in that format, embeddings apart, can be read here by so many
threads. Texts are compared with those of our eager passes where the weights are the same numbers. An engine that is not
installed, or does not take the model, has the reason in its row. The model is one that is stored in bfloat16, which
every engine can hold exactly, or a GGUF file, which ours and llama.cpp read as it is.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import torch

from benchmarks.engines import AUTO, COMPILED, EAGER, ENGINES, FILE, LLAMA_CPP, LOOKUP, STAGES, EngineProcess, Task
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, names, new_parser, positive, run, table_of, whole_numbers
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.methods.chat import chat_text, has_template
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of
from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.checkpoint.packages import packaged_file
from ppd_runtime.models.checkpoint.quantisable import HEAD, quantised_linears
from ppd_runtime.models.native.products import LargePages
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tune.compare import Comparison, Text, Way, compare
from ppd_runtime.tune.prompt_files import read_prompts

FORMATS: Mapping[str, tuple[float, float, str]] = {
    "float32": (32, 32, "stored"),
    "bfloat16": (16, 16, "stored"),
    "int8": (8.5, 8.5, "int8"),
    "int4": (4.5, 8.5, "int4"),
    FILE: (0, 0, FILE),
}
"""By name: bits of a layer's weight and of the head's, with their shares of a scale; and the numbers, by a name that
formats of the same numbers share."""
_OF_ENGINE: Mapping[str, Sequence[str]] = {
    EAGER: ("float32", "int8", "int4"),
    COMPILED: ("bfloat16", "int8", "int4"),
    STAGES: ("bfloat16", "int8", "int4"),
    AUTO: ("bfloat16", "int8", "int4"),
    "transformers": ("float32",),
    LLAMA_CPP: ("bfloat16", "int8", "int4"),
    LOOKUP: ("bfloat16", "int8", "int4"),
}
_OF_FILES: Mapping[str, Sequence[str]] = dict.fromkeys((EAGER, COMPILED, STAGES, AUTO, LLAMA_CPP, LOOKUP), (FILE,))
"""Which engines read a GGUF file."""
PROMPTS = ("def read_lines(path):", "class Reader:", "    def __init__(self, name, value=None):")
_PAUSE_S = 0.25
"""Between two engines' turns: threads that wait spin for as long as 0.2 s."""


def measure(options: argparse.Namespace) -> Figures:
    """Run everything in turn; the figures by name."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    cores = len(os.sched_getaffinity(0))
    if (most := max(options.threads)) > cores:
        raise ValueError(f"--threads {most}: there are {cores} cores")
    with (
        cpu_threads(1),
        model_folder(options.model) as model,
        tempfile.TemporaryDirectory(prefix="ppd-peers-") as folder,
    ):
        info, file = describe(model), packaged_file(model) or Path(model)
        if file.is_file():
            return _measure(options, file, info, [name for name in options.engines if name in _OF_FILES], folder)
        if (dtype := model_config(info.folder).dtype) != torch.bfloat16:
            raise ValueError(f"--model {options.model}: is stored in {dtype}, give one in bfloat16")
        return _measure(options, info.folder, info, options.engines, folder)


def _measure(options: argparse.Namespace, model: Path, info: ModelInfo, engines: Sequence[str], folder: str) -> Figures:
    tokenizer, formats = load_tokenizer(info), _OF_FILES if model.is_file() else _OF_ENGINE
    texts = [one.text for one in read_prompts(options.prompts, options.limit)] if options.prompts else PROMPTS
    is_chat = bool(options.prompts) and has_template(tokenizer, None)
    if is_chat:
        texts = [chat_text([{"role": "user", "content": text}], tokenizer, None, {}) for text in texts]
    prompts = [list(tokenizer.encode(text, add_special_tokens=not is_chat)) for text in texts[: options.limit]]
    context = max(map(len, prompts)) + options.tokens
    tasks = [
        Task(engine, weights, threads, str(model), folder, context)
        for threads in options.threads
        for engine in engines
        for weights in formats[engine]
        if threads > 1 or engine not in (STAGES, AUTO)
    ]
    with contextlib.ExitStack() as stack:
        ways, sizes = {}, {}
        for task in tasks:  # one after the other: one compiles or writes what the next one finds
            process = stack.enter_context(contextlib.closing(EngineProcess(task)))
            of_file = file_bytes(model) if model.is_file() else None
            sizes[task] = (of_file or stored_bytes(info, *FORMATS[task.weights][:2]), task.threads)
            ways[task] = Way(_name(task), partial(_ask, process))
        floors = {size: Way(str(size), partial(_read, size)) for size in sizes.values()}
        params = SamplingParams(options.tokens)
        found = compare([*ways.values(), *floors.values()], prompts, params, rounds=options.rounds)
    expected = {
        FORMATS[task.weights][2]: _name(task)
        for task in reversed(tasks)
        if task.engine == EAGER and _name(task) not in found.failures
    }
    rows = [_row(task, found, str(sizes[task]), expected.get(FORMATS[task.weights][2])) for task in tasks]
    shape = {name: getattr(options, name) for name in ("model", "tokens", "rounds")}
    return {**shape, "prompts": len(prompts), "rows": rows}


def _name(task: Task) -> str:
    return f"{task.engine} {task.weights} {task.threads}"


def _ask(process: EngineProcess, prompt: Sequence[int], params: SamplingParams) -> Text:
    time.sleep(_PAUSE_S)
    tokens, step_s = process.generate(list(prompt), params.max_new_tokens)
    return Text(tuple(tokens), step_s * len(tokens), step_s)


def _read(size: tuple[int, int], prompt: Sequence[int], params: SamplingParams) -> Text:
    """The floor as a text of so many tokens that cost a reading each; the memory is there meanwhile alone."""
    step_s = reading_s(*size, params.max_new_tokens)
    return Text((0,) * params.max_new_tokens, step_s * params.max_new_tokens, step_s)


def _row(task: Task, found: Comparison, floor: str, expected: str | None) -> Figures:
    """What is reported of an engine; `expected` names the way whose texts have the same numbers."""
    name = _name(task)
    floor_ms = statistics.median(1000 * (pair.text.step_s or 0.0) for pair in found.pairs(floor, floor))
    row: Figures = {"engine": task.engine, "weights": task.weights, "threads": task.threads, "floor_ms": floor_ms}
    row["reason"] = found.failures.get(name)
    if row["reason"]:
        return row
    pairs = found.pairs(name, expected or name)
    times = [1000 * (pair.text.step_s or 0.0) for pair in pairs]
    ms = statistics.median(times)
    row |= {"times_ms": times, "ms": ms, "share_of_bandwidth": floor_ms / ms}
    if expected:
        row["equal_texts"] = sum(pair.identical for pair in pairs) / len(pairs)
        row["equal_start"] = sum(pair.equal for pair in pairs) / sum(len(pair.ordinary.token_ids) for pair in pairs)
    return row


def reading_s(num_bytes: int, threads: int, times: int) -> float:
    """Seconds to read so many bytes as fast as this machine can, as scalar products of two halves of them.

    Several threads, each on a core of its own, read a share each, so many times, and do not wait for each other between
    two readings.
    """
    memory, ones = LargePages(num_bytes), torch.ones(num_bytes // 4 // (2 * threads))
    shares = [(memory.copy(ones), memory.copy(ones)) for _ in range(threads)]
    cores, ready = sorted(os.sched_getaffinity(0))[-threads:], Barrier(threads)

    def read(share: tuple[torch.Tensor, torch.Tensor], core: int) -> tuple[float, float]:
        torch.set_num_threads(1)  # a new thread has as many as there are cores
        with on_cores([core]):
            torch.dot(*share)
            ready.wait()
            began = time.perf_counter()
            for _ in range(times):
                torch.dot(*share)
            return began, time.perf_counter()

    with ThreadPoolExecutor(threads) as pool:
        began, ended = zip(*pool.map(read, shares, cores), strict=True)
    return (max(ended) - min(began)) / times


def stored_bytes(info: ModelInfo, layer_bits: float, head_bits: float) -> int:
    """Of the weights that a token's pass reads: the linear layers' and the head's."""
    linears = quantised_linears(skeleton_of(model_config(info.folder), info.num_layers))
    bits = (linear.weight.numel() * (head_bits if name == HEAD else layer_bits) for name, linear in linears.items())
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
    rows = sorted(figures["rows"], key=lambda row: (row["threads"], list(FORMATS).index(row["weights"])))
    lacking = {"share_of_bandwidth": None, "equal_texts": None, "equal_start": None}
    rows = [{**lacking, "times_ms": row["reason"], "model": figures["model"], **row} for row in rows]
    heads = {"model": "model", "threads": "threads", "weights": "weights", "engine": "engine"}
    heads |= {"times_ms": "ms a token (quartiles)", "floor_ms": "floor, ms"}
    heads["share_of_bandwidth"] = "share of the bandwidth"
    return table_of(rows, **heads, equal_texts="texts equal", equal_start="tokens before another one")


def parser(doc: str | None = __doc__) -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(doc)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument(
        "--engines", type=names(ENGINES), default=list(ENGINES), help=f"some of: {', '.join(ENGINES)}; default: all"
    )
    options.add_argument("--threads", type=whole_numbers, default=[1, 2], help="of each engine, with commas")
    options.add_argument("--tokens", type=positive, default=64, help="new tokens for each prompt, two at least")
    options.add_argument("--prompts", help="JSON lines with a prompt each, for chats; default: three of code")
    options.add_argument("--limit", type=positive, default=3, help="prompts")
    options.add_argument("--rounds", type=positive, default=5)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
