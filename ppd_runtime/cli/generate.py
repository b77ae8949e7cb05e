"""`ppd generate`: continue a text."""

import json
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.outputs import check_outputs
from ppd_runtime.imports import quick_imports

if TYPE_CHECKING:
    from ppd_runtime.generation import Generation, TextGenerator
    from ppd_runtime.results import GenerationResult


class Method(str, Enum):
    """Ways of decoding."""

    ppd = "ppd"
    autoregressive = "autoregressive"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; left out: --prompt-file or stdin.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: options.Model = "demo",
    method: Annotated[Method, typer.Option(help="autoregressive is ordinary decoding, the oracle.")] = Method.ppd,
    k: Annotated[int, typer.Option(help="Early candidates for each token.")] = 3,
    exit_layer: Annotated[int | None, typer.Option(help="Default: the trained exit head's, or half depth.")] = None,
    exit_head: options.ExitHead = "shared",
    workers: Annotated[int | None, typer.Option(help="Sub-processes, at most k; default: k.")] = None,
    transport: Annotated[str, typer.Option(help="local (threads), unix or zeromq (Ray actors), or auto.")] = "auto",
    ray_address: Annotated[str | None, typer.Option(help="host:port of a running Ray cluster.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = 1,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Run one-token passes in compiled code; the first time takes a while.")
    ] = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less repetition.")] = 1.0,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    trace: options.TraceFile = None,
    timeline: options.TimelineFile = None,
) -> None:
    """Continue a text; the tokens are the same whatever the method, k, exit layer or transport."""
    with one_line_errors():
        with quick_imports():
            from ppd_runtime import OrdinaryDecoding, PPDRuntime
            from ppd_runtime.config import SamplingParams

        traced = _check_outputs(trace, timeline)
        text = _read_prompt(prompt, prompt_file)
        params = SamplingParams(
            max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed, tuple(stop or ()), ignore_eos
        )
        generator = (
            OrdinaryDecoding(model, dtype=dtype, device=device, threads=threads, compile=compile_, trace=traced)
            if method is Method.autoregressive
            else PPDRuntime(
                model,
                k=k,
                exit_layer=exit_layer,
                exit_head=exit_head,
                workers=workers,
                dtype=dtype,
                device=device,
                transport=transport,
                ray_address=ray_address,
                threads_per_worker=threads,
                compile=compile_,
                trace=traced,
                progress=show_progress,
            )
        )
        result = _show(generator.request(text, params), generator, text, method if as_json else None)
        _write_trace(result, generator, trace, timeline)


def _show(
    generation: "Generation", generator: "TextGenerator", prompt: str, json_method: Method | None
) -> "GenerationResult":
    with generator:
        if json_method:
            print_json(generation, json_method, generator.dtype)
        else:
            print_stream(generation, prompt)
    return generation.result


def _check_outputs(trace: Path | None, timeline: Path | None) -> bool:
    """Whether there is anything to record; raises ValueError for files that could not be written afterwards."""
    check_outputs(trace, timeline)
    if timeline is not None:
        from ppd_runtime.image_files import check_image_file

        check_image_file(timeline)
    return trace is not None or timeline is not None


def _write_trace(
    result: "GenerationResult", generator: "TextGenerator", trace: Path | None, timeline: Path | None
) -> None:
    if result.trace is not None and trace is not None:
        result.trace.write(trace)
    if result.trace is not None and timeline is not None:
        from ppd_runtime.timeline import draw_timeline

        draw_timeline(result.trace, timeline, lambda token: str(generator.tokenizer.decode([token])))


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("give a prompt or --prompt-file, not both")
    if file is not None:
        return _read_file(file)
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, with --prompt-file, or on standard input")
    return sys.stdin.read()


def _read_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--prompt-file {file}: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {file}: no UTF-8 text at byte {error.start}; give a text file") from error


def show_progress(line: str) -> None:
    """A start-up's state, on stderr."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line} …" if line else "\r\033[K")
        sys.stderr.flush()


def print_stream(generation: "Generation", prompt: str) -> None:
    """Print the text while it comes; hits stand out where the terminal has colours."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for number, event in enumerate(generation):
        if number == 0:
            show_progress("")
            console.print(prompt, end="", style="dim", markup=False)
        console.print(event.text, end="", style="green" if event.hit else None, markup=False)
    console.print()


def print_json(generation: "Generation", method: Method, dtype: str) -> None:
    """Print the finished generation as one JSON object."""
    for _ in generation:
        pass
    show_progress("")
    result = generation.result
    stats = asdict(result.stats) | {
        "match_rate": result.stats.match_rate,
        "tokens_per_second": result.stats.tokens_per_second,
        "time_per_token_s": result.stats.time_per_token_s,
        "ledger_per_token": asdict(result.stats.ledger_per_token),
    }
    output = {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": len(result.prompt_ids),
        "finish_reason": result.finish_reason,
        "method": method.value,
        "dtype": dtype,
        "stats": stats,
    }
    print(json.dumps(output))
