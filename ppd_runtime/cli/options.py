"""Options that several commands have: single ones, and groups that are read off the dataclasses of settings."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from ppd_runtime.methods.choices import METHODS
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import IN_PROCESS_SETTINGS, RUNTIME_SETTINGS, RuntimeConfig
from ppd_runtime.settings.fields import default_of, summary

Settings = dict[str, Any]
"""What a group hands its command: values by the names of their settings."""

PARAMETERS: Mapping[str, str] = {own: name for name, own in IN_PROCESS_SETTINGS.items()}
"""What settings are called on the command line, where that is not their own name."""
_ONE_BY_ONE: Mapping[str, str] = {"stop_token_ids": "--stop-token-id"}
"""Options that give one value of several, whose names are singular."""

Model = Annotated[str, typer.Option(help=summary(RuntimeConfig, "model"))]
Prompts = Annotated[
    str, typer.Option(help='A JSON Lines file with a "prompt" in each line, or "demo" for the shipped prompts.')
]
Limit = Annotated[int | None, typer.Option(help="Take so many prompts from the file; default: all.")]
ExitHead = Annotated[str, typer.Option(help="shared (the model's own norm and head), or a trained one's folder.")]
MaxNewTokens = Annotated[int, typer.Option(help=summary(SamplingParams, "max_new_tokens"))]
Device = Annotated[str, typer.Option(help=summary(RuntimeConfig, "device"))]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Write the same JSON into this file.")]
Method = Enum("Method", {name: name for name in ("ppd", *METHODS)}, type=str)  # type: ignore[misc]
"""The methods' names, the usual one first."""
PPD = Method("ppd")
ChosenMethod = Annotated[Method, typer.Option(help="autoregressive is ordinary decoding, the oracle.")]
ExitLayer = Annotated[int | None, typer.Option(help="Default: the trained part's, or the method's own.")]


@dataclass(frozen=True)
class LayerTimes:
    """Times of the cost model; None: not given."""

    layer_ms: float | None = None
    """Time of a layer."""
    head_ms: float | None = None
    """Time of the final head."""
    exit_head_ms: float | None = None
    """Time of an exit head."""
    hop_ms: float | None = None
    """Time of a message between two processes."""


@dataclass(frozen=True)
class Group:
    """Options that a command takes together."""

    options: tuple["Option", ...]
    make: Callable[..., Any] = dict
    """What the command is handed, from the values by name."""

    def read(self, given: Mapping[str, Any]) -> Any:
        """What the command is handed, out of the values of all its options; those that were not given are left out."""
        values = {option.setting: option.read(given[option.parameter.name]) for option in self.options}
        return self.make(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class Option:
    """One option of a group."""

    setting: str
    parameter: inspect.Parameter
    """The parameter that typer reads."""
    means: bool | None = None
    """What a flag stands for where it is given; None: the option has a value."""

    def read(self, value: Any) -> Any:
        """The setting's value; None where nothing was said."""
        if self.means is not None:
            return self.means if value else None
        if isinstance(value, list):
            return tuple(value)
        return value.value if isinstance(value, Enum) else value


def group(
    settings: type,
    names: Sequence[str] | Mapping[str, str] = (),
    *,
    panel: str | None = None,
    given_only: bool = False,
    make: Callable[..., Any] = dict,
    **defaults: Any,
) -> Group:
    """Fields of a dataclass as options: name, type and default are the field's, help is its docstring's first sentence.

    Args:
        settings: the dataclass.
        names: its fields, in the order in which help lists them, or what the command calls each; none is all of them.
        panel: help's heading above them.
        given_only: hand on those alone that were given, so that who has them decides on the others.
        make: makes what the command is handed from the values by name.
        defaults: of this command, where they are not the field's.
    """
    by_name = {setting.name: setting for setting in fields(settings)}
    names = names or tuple(by_name)
    chosen = names.items() if isinstance(names, Mapping) else [(name, name) for name in names]
    options = [
        _option(settings, name, by_name[own], panel, given_only, defaults.get(own, default_of(by_name[own])))
        for name, own in chosen
    ]
    return Group(tuple(options), make)


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of groups, in the places of its parameters of these names, which get what they make.

    Typer, and all else that asks for the command's signature, sees the single options.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given[name] for name in own if name not in groups}
            command(**values, **{name: options.read(given) for name, options in groups.items()})

        shown: list[inspect.Parameter] = []
        for name, parameter in own.items():
            parameters = [option.parameter for option in groups[name].options] if name in groups else [parameter]
            shown.extend(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters)
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorate


def _option(
    settings: type, setting: str, own: "Field[Any]", panel: str | None, given_only: bool, default: Any
) -> Option:
    name, about = PARAMETERS.get(own.name, own.name), summary(settings, own.name)
    if own.type is bool:
        return _flag(setting, name, about, panel, own.metadata.get("option"), default)
    declared, kind = _ONE_BY_ONE.get(own.name), _kind(own.type)
    shown: str | bool = True
    if get_origin(kind) is list:
        kind, default = kind | None, None
    elif given_only and default is not None:
        kind, default, shown = kind | None, None, str(default)
    return Option(setting, _parameter(name, kind, default, declared, about, panel, shown))


def _flag(setting: str, name: str, about: str, panel: str | None, declared: str | None, default: bool) -> Option:
    """An option for what is not so anyway, without a counterpart."""
    if default:
        name, about = f"no_{name}", f"Do not {about[0].lower()}{about[1:]}"
    declared = declared or f"--{name.replace('_', '-')}"
    return Option(setting, _parameter(name, bool, False, declared, about, panel, True), means=not default)


def _parameter(
    name: str, kind: Any, default: Any, declared: str | None, about: str, panel: str | None, shown: str | bool
) -> inspect.Parameter:
    option = typer.Option(*filter(None, [declared]), help=about, show_default=shown, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _kind(declared: Any) -> Any:
    """A field's type as typer has it: several values come as a list, and what only a type checker knows is a text."""
    if isinstance(declared, str):
        return str
    return list[get_args(declared)[0]] if get_origin(declared) is tuple else declared  # type: ignore[misc]


def runtime_but(*names: str) -> tuple[str, ...]:
    """The settings of `RuntimeConfig` in its order, without those of these names: a new one is an option everywhere."""
    return tuple(name for name in RUNTIME_SETTINGS if name not in names)


PLACE = {name: own for name, own in IN_PROCESS_SETTINGS.items() if name not in ("model", "compile", "trace")}
"""Settings of all that runs a model, by the names that decoding in one process has for them."""
IN_PROCESS = group(RuntimeConfig, PLACE)
ON_ALL_CORES = group(RuntimeConfig, PLACE, given_only=True, threads_per_worker="all cores")
COMPILED = group(RuntimeConfig, {**PLACE, "compile": "compile"})


def sampling(*names: str, **defaults: Any) -> Group:
    """Settings of `SamplingParams` by name."""
    return group(SamplingParams, names, **defaults)


USUAL_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
"""What measurements can be told of the sampling."""
SAMPLING = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
"""What can be said of it on a command line, where a request's time is no matter."""
