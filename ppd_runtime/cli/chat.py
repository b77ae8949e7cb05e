"""`ppd chat`: a conversation with a model."""

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.conversation import Conversation, Turn, with_system
from ppd_runtime.cli.drafting import DRAFTING, SWIFT
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import (
    LAYOUT,
    figures,
    foreseen,
    opened,
    own_settings,
    print_stream,
    show_progress,
    stages_of,
)
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.typed import is_terminal, typed_at_terminal, typed_lines
from ppd_runtime.host import available_cores
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.fields import summary

if TYPE_CHECKING:
    from rich.text import Text

    from ppd_runtime.methods.generation import Generation

_SAMPLING = options.sampling(
    *options.SAMPLING,
    "timeout_s",
    given_only=True,
    max_new_tokens="as many as fit",
    temperature="the model's, or 0",
    seed="by chance",
)
_PLACE = options.group(
    RuntimeConfig,
    {**options.PLACE, "compile": "compile"},
    given_only=True,
    threads_per_worker="1; on one stage all cores, at most 4",
)
_MOST_THREADS = 4  # of one stage; more seldom read weights faster
_CHOOSE = {"layout", "k", "stages", "cuts", "guess_vocab", "guess_counts", "exit_head", "workers", "run_ahead"}
"""Options that choose another layout than one stage; the others say how it runs."""


@takes(
    layout=LAYOUT,
    drafting=DRAFTING,
    swift=SWIFT,
    place=_PLACE,
    sampling=_SAMPLING,
)
def chat(
    model: Annotated[str, typer.Argument(help=summary(RuntimeConfig, "model"))] = "smollm2",
    named: Annotated[str | None, typer.Option("--model", hidden=True)] = None,
    method: options.ChosenMethod = options.PPD,
    exit_layer: options.ExitLayer = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja template's file; default: the tokenizer's own.")
    ] = None,
    *,
    layout: Settings,
    drafting: Settings,
    swift: Settings,
    place: Settings,
    sampling: Settings,
) -> None:
    """Talk with a model: answers are streamed, and /help lists what else there is.

    It runs on one stage, unless options choose another layout or a method.
    """
    if method is options.PPD and exit_layer is None and not (_CHOOSE & layout.keys() or drafting or swift):
        layout, place = {"stages": 1, **layout}, {"threads": min(available_cores(), _MOST_THREADS), **place}
    own = own_settings(method, exit_layer, layout, drafting, swift)
    with one_line_errors(chat):
        SamplingParams(**sampling)
        model = named or model  # as all other commands have it
        check_template(model, place.get("weights"), chat_template, system)
        generator = opened(model, method, **own, **place)
        conversation = Conversation(generator, sampling, chat_template, system)
        with generator:
            show_progress("")
            if is_terminal():
                _say(f"{generator.info.name} listens; /help lists the commands, Ctrl-D leaves")
                talk(conversation, typed_at_terminal(), stages_of(generator), goes_on=True)
            else:
                with one_line_errors():  # of what was typed, not of options
                    talk(conversation, typed_lines(sys.stdin), stages_of(generator), goes_on=False)


def check_template(model: str, weights: str | None, template: Path | None, system: str | None) -> None:
    """Raise ValueError where a model has no template, or one that does not take a first message; reads no weights."""
    from ppd_runtime.methods.chat import chat_text, template_of
    from ppd_runtime.models.checkpoint.description import describe, load_tokenizer

    text, info = template_of(template), describe(model, weights)
    tokenizer = load_tokenizer(info)
    if text is None and tokenizer.chat_template is None:
        raise ValueError(f"model {model!r} has no chat template: give one with --chat-template FILE")
    chat_text(with_system([{"role": "user", "content": "Hello"}], system), tokenizer, text, {})


def talk(conversation: Conversation, typed: Iterable[str], stages: int, goes_on: bool) -> None:
    """Answer what is typed; where it `goes_on`, behind what is refused too, and Ctrl-C ends an answer alone."""
    for message in typed:
        try:
            outcome = conversation.take(message)
            if outcome is None:
                return
            if isinstance(outcome, Turn):
                _answer(conversation, outcome, stages, goes_on)
            elif outcome:
                print(outcome)
        except (ValueError, RuntimeError, OSError) as error:
            if not goes_on:
                raise
            _say(" ".join(str(error).split()), "yellow")


def _answer(conversation: Conversation, turn: Turn, stages: int, goes_on: bool) -> None:
    from rich.text import Text

    with _cancelled_by_ctrl_c(turn.generation) if goes_on else contextlib.nullcontext():
        boundaries = print_stream(turn.generation, "", stages)
    note, result = conversation.keep(turn), turn.generation.result
    parts = [Text(figures(result)), foreseen(boundaries, stages), Text(note)]
    _say(Text("; ").join(part for part in parts if part))


@contextlib.contextmanager
def _cancelled_by_ctrl_c(generation: "Generation") -> Iterator[None]:
    """Have Ctrl-C end the generation; a second one ends the program."""
    before = signal.getsignal(signal.SIGINT)

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        generation.cancel()

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: "str | Text", style: str = "dim") -> None:
    """A line beside the conversation."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(text, style=style, markup=False)
