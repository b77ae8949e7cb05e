"""`ppd generate`: continue a text."""

import io
import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.outputs import check_image, check_outputs, give_json
from ppd_runtime.imports import quick_imports

if TYPE_CHECKING:
    from ppd_runtime.methods.base import Generation, TextGenerator
    from ppd_runtime.results import GenerationResult


class Method(str, Enum):
    """Ways of decoding."""

    ppd = "ppd"
    autoregressive = "autoregressive"
    layerskip = "layerskip"
    adaspeed = "adaspeed"
    kangaroo = "kangaroo"
    swift = "swift"


class StoppingName(str, Enum):
    """When AdaSPEED stops drafting."""

    constant = "constant"
    confidence = "confidence"
    product = "product"
    probe = "probe"


class Acceptance(str, Enum):
    """How drafts are judged."""

    shared_noise = "shared-noise"
    rejection = "rejection"


_PPD, _DRAFTING = "Pipelined decoding", "Drafting (layerskip, adaspeed, kangaroo, swift)"
_SWIFT = "Swift"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; left out: --prompt-file or stdin.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: options.Model = "demo",
    method: Annotated[Method, typer.Option(help="autoregressive is ordinary decoding, the oracle.")] = Method.ppd,
    exit_layer: Annotated[int | None, typer.Option(help="Default: the trained part's, or the method's own.")] = None,
    k: Annotated[
        int | None, typer.Option(help="Early candidates for each token; default: 3.", rich_help_panel=_PPD)
    ] = None,
    exit_head: Annotated[
        str | None,
        typer.Option(help='"shared" (the default), or the folder of a trained one.', rich_help_panel=_PPD),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Sub-processes, at most k; default: k.", rich_help_panel=_PPD)
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="local (threads), unix, zeromq or collective (processes), or auto.", rich_help_panel=_PPD),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="processes (of this host), ray, or auto: Ray where there is one to join or several hosts are asked "
            "for, else processes.",
            rich_help_panel=_PPD,
        ),
    ] = None,
    ray_address: options.RayAddress = None,
    placement: Annotated[
        str | None,
        typer.Option(help="Of Ray's actors: auto, pack, spread, strict-pack, strict-spread.", rich_help_panel=_PPD),
    ] = None,
    bind_interface: Annotated[
        str | None,
        typer.Option(help="An IP address of this host: processes talk over TCP, encrypted.", rich_help_panel=_PPD),
    ] = None,
    no_run_ahead: Annotated[
        bool,
        typer.Option(
            "--no-run-ahead",
            help="Let a lone sub-process (k=1) wait for the main process' word, as Algorithm 2 has it.",
            rich_help_panel=_PPD,
        ),
    ] = False,
    max_restarts: Annotated[
        int | None, typer.Option(help="New lives for a lost worker, in a row; default: 3.", rich_help_panel=_PPD)
    ] = None,
    num_speculations: Annotated[
        int | None, typer.Option(help="Tokens in a draft (at the most).", rich_help_panel=_DRAFTING)
    ] = None,
    stopping: Annotated[
        StoppingName | None,
        typer.Option(help="When to stop drafting; default: the method's own.", rich_help_panel=_DRAFTING),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Stop drafting below this confidence.", rich_help_panel=_DRAFTING)
    ] = None,
    adaptive: Annotated[
        bool | None,
        typer.Option(
            help="Let the threshold follow the acceptance rate; default: the method's own.", rich_help_panel=_DRAFTING
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(help="A folder of `ppd train probe`, for --stopping probe.", rich_help_panel=_DRAFTING),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="A folder of `ppd train adapter`, for kangaroo.", rich_help_panel=_DRAFTING)
    ] = None,
    acceptance: Annotated[
        Acceptance | None,
        typer.Option(help="rejection: speculative sampling, as the papers.", rich_help_panel=_DRAFTING),
    ] = None,
    layer_set: Annotated[
        Path | None,
        typer.Option(help="A file of `ppd search-layers`; default: search while decoding.", rich_help_panel=_SWIFT),
    ] = None,
    skip_ratio: Annotated[
        float | None, typer.Option(help="Share of attentions and MLPs; default: 0.45.", rich_help_panel=_SWIFT)
    ] = None,
    search_steps: Annotated[
        int | None, typer.Option(help="Sets to try at the most; default: 1000.", rich_help_panel=_SWIFT)
    ] = None,
    bayes_interval: Annotated[
        int | None,
        typer.Option(help="Choose each so manieth by Bayesian optimisation; default: 25.", rich_help_panel=_SWIFT),
    ] = None,
    context_window: Annotated[
        int | None, typer.Option(help="Generated tokens by which sets are scored; default: 32.", rich_help_panel=_SWIFT)
    ] = None,
    search_seed: Annotated[
        int | None, typer.Option(help="Which random sets; default: 0.", rich_help_panel=_SWIFT)
    ] = None,
    widest: Annotated[
        int | None,
        typer.Option(help="Candidates for a doubtful place; default: 10; 1: chains.", rich_help_panel=_SWIFT),
    ] = None,
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
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    timeout_s: Annotated[float | None, typer.Option(help="End after so many seconds with what there is.")] = None,
    add_special_tokens: Annotated[
        bool, typer.Option(help="Whether the prompt gets the tokenizer's special tokens.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
    out: options.Out = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line of figures behind the text.")] = False,
    trace: options.TraceFile = None,
    timeline: options.TimelineFile = None,
) -> None:
    """Continue a text; the tokens are the same whatever the method and its options."""
    own = _given(
        exit_layer=exit_layer,
        k=k,
        exit_head=exit_head,
        workers=workers,
        transport=transport,
        launcher=launcher,
        ray_address=ray_address,
        run_ahead=False if no_run_ahead else None,
        max_restarts=max_restarts,
        placement=placement,
        bind_interface=bind_interface,
        num_speculations=num_speculations,
        stopping=stopping,
        threshold=threshold,
        adaptive=adaptive,
        probe=probe,
        adapter=adapter,
        acceptance=acceptance,
        layer_set=layer_set,
        skip_ratio=skip_ratio,
        search_steps=search_steps,
        bayes_interval=bayes_interval,
        context_window=context_window,
        search_seed=search_seed,
        widest=widest,
    )
    with one_line_errors(generate):
        with quick_imports():
            from ppd_runtime.config import SamplingParams
            from ppd_runtime.methods.registry import open_method

        traced = _check_outputs(out, trace, timeline)
        text = _read_prompt(prompt, prompt_file)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_ids or ()),
            ignore_eos=ignore_eos,
            timeout_s=timeout_s,
        )
        shared = {"dtype": dtype, "device": device, "threads": threads, "compile": compile_, "trace": traced}
        if method is Method.ppd:
            shared["progress"] = show_progress
        generator = open_method(model, method.value, **own, **shared)
        generation = generator.request(text, params, add_special_tokens=add_special_tokens)
        result = _show(generation, generator, text, as_json, quiet)
        give_json(_as_dict(result, method, generator.dtype), as_json, out)
        _write_trace(result, generator, trace, timeline)


def _given(**values: Any) -> dict[str, Any]:
    """The options that were given, by the names of the settings."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}


def _show(
    generation: "Generation", generator: "TextGenerator", prompt: str, silent: bool, quiet: bool
) -> "GenerationResult":
    with generator:
        if silent:
            for _ in generation:
                pass
            show_progress("")
        else:
            print_stream(generation, prompt)
    if not (silent or quiet):
        sys.stderr.write(f"{_figures(generation.result)}\n")
    return generation.result


def _figures(result: "GenerationResult") -> str:
    """A line on how it went."""
    stats = result.stats
    rate = "" if stats.match_rate is None else f", hit rate {stats.match_rate:.2f}"
    early = f", {result.finish_reason}" if result.finish_reason in ("timeout", "cancelled") else ""
    return f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{rate}{early}"


def _as_dict(result: "GenerationResult", method: Method, dtype: str) -> dict[str, Any]:
    told = result.to_dict()
    stats = told.pop("stats")
    return {**told, "prompt_tokens": len(result.prompt_ids), "method": method.value, "dtype": dtype, "stats": stats}


def _check_outputs(out: Path | None, trace: Path | None, timeline: Path | None) -> bool:
    """Whether there is anything to record; raises ValueError for files that could not be written afterwards."""
    check_outputs(out, trace, timeline)
    check_image(timeline)
    return trace is not None or timeline is not None


def _write_trace(
    result: "GenerationResult", generator: "TextGenerator", trace: Path | None, timeline: Path | None
) -> None:
    if result.trace is not None and trace is not None:
        result.trace.write(trace)
    if result.trace is not None and timeline is not None:
        from ppd_runtime.tracing.timeline import draw_timeline

        draw_timeline(result.trace, timeline, lambda token: str(generator.tokenizer.decode([token])))


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("give a prompt or --prompt-file, not both")
    if file is not None:
        return _read_file(file)
    if prompt is not None:
        return _from_terminal(prompt)
    if sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, with --prompt-file, or on standard input")
    return _read_standard_input()


def _from_terminal(text: str) -> str:
    """An argument as UTF-8, also where Python took the terminal for one that knows ASCII only."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def _read_standard_input() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: no UTF-8 text at byte {error.start}; give a text") from error


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
