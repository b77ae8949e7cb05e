"""`ppd generate`: continue a text."""

import io
import os
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.drafting import DRAFTING, SWIFT
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.form import FORM, Form, read_text
from ppd_runtime.cli.options import Method, Settings, takes
from ppd_runtime.cli.outputs import check_image, check_outputs, give_json
from ppd_runtime.imports import quick_imports
from ppd_runtime.sampling.params import BY_CHANCE, SamplingParams
from ppd_runtime.settings.config import IN_PROCESS_SETTINGS, RuntimeConfig

if TYPE_CHECKING:
    from rich.text import Text

    from ppd_runtime.methods.base import TextGenerator
    from ppd_runtime.methods.generation import Generation
    from ppd_runtime.results import GenerationResult, TokenEvent


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue")
"""Colours of the tokens that boundaries 0, 1, … were the first to name; later boundaries share the last colour."""
_MOST_HELD = 2  # tokens, until it is known who named the first of them


@dataclass(frozen=True)
class Outputs:
    """What becomes of the text and of what is known about it."""

    as_json: bool = field(default=False, metadata={"option": "--json"})
    """Print one JSON object instead of streaming."""
    out: Path | None = None
    """Write the same JSON into this file."""
    quiet: bool = False
    """No line of figures after the text."""
    trace: Path | None = None
    """Write what every process did and when into this JSON file, for ui.perfetto.dev."""
    timeline: Path | None = None
    """Draw the first tokens on the clock into this image."""

    def check(self) -> None:
        """Raise ValueError for files that could not be written afterwards."""
        check_outputs(self.out, self.trace, self.timeline)
        check_image(self.timeline)

    @property
    def traced(self) -> bool:
        """Whether there is anything to record."""
        return self.trace is not None or self.timeline is not None


LAYOUT_PANEL = "Pipelined decoding"
LAYOUT_SETTINGS = options.runtime_but(
    *IN_PROCESS_SETTINGS.values(),  # options of every command
    "exit_layer",  # of other methods too
    "max_requests",
    "max_cache_tokens",
    "prefix_cache_tokens",
    "draft_memory_mb",
    "placement_timeout_s",
    "gpus_per_worker",
)
"""All that one request on this host can be told."""
LAYOUT = options.group(RuntimeConfig, LAYOUT_SETTINGS, panel=LAYOUT_PANEL, given_only=True)
"""The options of pipelined decoding."""


@takes(
    layout=LAYOUT,
    drafting=DRAFTING,
    swift=SWIFT,
    place=options.COMPILED,
    sampling=options.sampling(*options.SAMPLING, "timeout_s"),
    form=FORM,
    outputs=options.group(Outputs, make=Outputs),
)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; left out: --prompt-file or stdin.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: options.Model = "demo",
    method: options.ChosenMethod = options.PPD,
    exit_layer: options.ExitLayer = None,
    *,
    layout: Settings,
    drafting: Settings,
    swift: Settings,
    place: Settings,
    sampling: Settings,
    form: Form,
    add_special_tokens: Annotated[
        bool, typer.Option(help="Whether the prompt gets the tokenizer's special tokens.")
    ] = True,
    outputs: Outputs,
) -> None:
    """Continue a text; the tokens are the same whatever the method and its options."""
    own = own_settings(method, exit_layer, layout, drafting, swift)
    with one_line_errors(generate):
        with quick_imports():
            from ppd_runtime.results import Live

        outputs.check()
        text = _read_prompt(prompt, prompt_file)
        params = SamplingParams(**sampling, **form.settings())
        generator = opened(model, method, **own, **place, trace=outputs.traced)
        live = Live.TOKENS if outputs.as_json else Live.BOUNDARIES
        generation = generator.request(text, params, live, add_special_tokens)
        result = _show(generation, generator, text, outputs, by_chance=params.seed == BY_CHANCE)
        give_json(_as_dict(result, method, generator.dtype), outputs.as_json, outputs.out)
        _write_trace(result, generator, outputs)


def own_settings(method: Method, exit_layer: int | None, *groups: Settings) -> Settings:
    """What `open_method` gets for a method from its options, and who shows the start's progress."""
    own = {name: value for group in groups for name, value in group.items()}
    if exit_layer is not None:
        own["exit_layer"] = exit_layer
    return own | ({"progress": show_progress} if method is options.PPD else {})


def opened(model: str, method: Method, **settings: Any) -> "TextGenerator":
    """The method, not started yet; a line on stderr tells the layout that --layout auto came to."""
    with quick_imports():
        from ppd_runtime.methods.registry import open_method

    generator = open_method(model, method.value, **settings)
    if told := getattr(generator, "layout_found", ""):
        show_progress("")
        sys.stderr.write(f"{told}\n")
    return generator


def _show(
    generation: "Generation", generator: "TextGenerator", prompt: str, outputs: Outputs, by_chance: bool
) -> "GenerationResult":
    with generator:
        if outputs.as_json:
            for _ in generation:
                pass
            show_progress("")
        else:
            print_stream(generation, prompt, stages_of(generator), legend=not outputs.quiet)
    if not (outputs.as_json or outputs.quiet):
        seed = f", seed {generation.result.seed}" if by_chance else ""
        sys.stderr.write(f"{figures(generation.result)}{seed}\n")
    return generation.result


def figures(result: "GenerationResult") -> str:
    """A line on how it went."""
    stats = result.stats
    rate = "" if stats.match_rate is None else f", match rate {stats.match_rate:.2f}"
    if stats.measured_ratio is not None:
        rate += f", {stats.measured_ratio:.2f} of the time without guesses"
    if stats.one_process:
        rate += ", in one process"
    early = f", {result.finish_reason}" if result.finish_reason in ("timeout", "cancelled") else ""
    return f"{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{rate}{early}"


def stages_of(generator: "TextGenerator") -> int:
    """How many stages decode; 0 in other layouts."""
    return len(cuts) + 1 if (cuts := getattr(generator, "cuts", ())) else 0


def _as_dict(result: "GenerationResult", method: Method, dtype: str) -> dict[str, Any]:
    told = result.to_dict()
    stats = told.pop("stats")
    return {**told, "prompt_tokens": len(result.prompt_ids), "method": method.value, "dtype": dtype, "stats": stats}


def _write_trace(result: "GenerationResult", generator: "TextGenerator", outputs: Outputs) -> None:
    if result.trace is not None and outputs.trace is not None:
        result.trace.write(outputs.trace)
    if result.trace is not None and outputs.timeline is not None:
        from ppd_runtime.tracing.timeline import draw_timeline

        draw_timeline(result.trace, outputs.timeline, lambda token: str(generator.tokenizer.decode([token])))


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ValueError("give a prompt or --prompt-file, not both")
    if file is not None:
        return read_text("--prompt-file", file)
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


def show_progress(line: str) -> None:
    """A start-up's state, on stderr."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line} …" if line else "\r\033[K")
        sys.stderr.flush()


def print_stream(generation: "Generation", prompt: str, stages: int = 0, legend: bool = False) -> Mapping[int, int]:
    """Print the text while it comes; where the terminal has colours, they say what foresaw a token.

    Of stages that becomes known after the token itself: there each is printed with the next one or two. Given back are
    the boundaries that were the first to name a token, by the tokens' positions, as `News.boundaries` has them.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    most_held = _MOST_HELD if stages and console.color_system else 0
    held: deque[TokenEvent] = deque()
    boundaries: dict[int, int] = {}

    def release(most: int) -> None:
        while held and (len(held) > most or held[0].position in boundaries):
            event = held.popleft()
            named = boundaries.get(event.position, stages)
            style = _style(named) if named < stages else "green" if event.hit else None
            console.print(event.text, end="", style=style, markup=False)

    for number, event in enumerate(generation):
        if number == 0:
            show_progress("")
            console.print(prompt, end="", style="dim", markup=False)
        held.append(event)
        boundaries.update(event.news.boundaries)
        release(most_held)
    boundaries.update(generation.result.news.boundaries)
    release(0)
    console.print()
    if legend and most_held:
        _print_legend(stages)
    return boundaries


def _print_legend(stages: int) -> None:
    from rich.console import Console
    from rich.text import Text

    words = Text(", ").join(_namers(stages))
    Console(stderr=True, soft_wrap=True).print(Text("named first by ") + words + Text("; plain: by none"))


def foreseen(boundaries: Mapping[int, int], stages: int) -> "Text":
    """The shares of the tokens that each boundary was the first to name, in its colour; empty where none is known."""
    from rich.text import Text

    if not boundaries:
        return Text()
    counts = Counter(boundaries.values())
    shares = [
        Text.assemble(name, f" {counts[number] / len(boundaries):.0%}")
        for number, name in enumerate([*_namers(stages), Text("none")])
    ]
    return Text("named first by ") + Text(", ").join(shares)


def _namers(stages: int) -> list["Text"]:
    """What may name a token first, each in its colour."""
    from rich.text import Text

    names = ["guesses before layer 1", *(f"boundary {number}" for number in range(1, stages))]
    return [Text(name, _style(number)) for number, name in enumerate(names)]


def _style(boundary: int) -> str:
    return _COLOURS[min(boundary, len(_COLOURS) - 1)]
