"""The library's messages in the command line's words: `exit_layer=9` becomes `--exit-layer 9`."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable
from typing import Any

from typer.models import OptionInfo

from ppd_runtime.cli.options import PARAMETERS
from ppd_runtime.settings.fields import UnknownSettingError

_OTHER_NAMES = {
    **PARAMETERS,
    "num_layers": "layers",
    "num_new_tokens": "tokens",
    "max_devices": "devices",
    "search_seed": "seed",
    "layer": "layer_ms",
    "head": "head_ms",
    "exit_head": "exit_head_ms",
    "hop": "hop_ms",
    "all_reduce": "all_reduce_ms",
}
"""Settings whose options are called otherwise, where the command has no option of the setting's own name."""
_NEGATION = "--no-"
_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s:,;]+"""


def in_its_words(error: Exception, command: Callable[..., Any]) -> str:
    """What `error` says, for somebody who gave options of `command`, a function with typer's annotations."""
    options = _options(command)
    if isinstance(error, UnknownSettingError):
        known = sorted({options[name] for name in error.known if name in options})
        return f"{options.get(error.name, error.name)} is not for {error.owner}: it has {', '.join(known)}"
    if not options:
        return str(error)
    names = "|".join(sorted(map(re.escape, {*options, *options.values()}), key=len, reverse=True))
    named = rf"(?<![\w.:;-])(?<!: )({names})=({_VALUE})"  # behind a colon are a file's fields, and a row's settings
    return re.sub(named, lambda found: _given(options, *found.groups()), str(error))


def _options(command: Callable[..., Any]) -> dict[str, str]:
    """The command's options by the names of its settings."""
    options = {}
    for name, parameter in inspect.signature(command).parameters.items():
        for about in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(about, OptionInfo):
                declared = (str(about.default), *(about.param_decls or ()))  # typer: the first may stand in its place
                chosen = (text.partition("/")[0] for text in declared if text.startswith("--"))
                options[name] = next(chosen, _option(name))
    others = {name: options[own] for name, own in _OTHER_NAMES.items() if own in options and name not in options}
    negated = {name.removeprefix("no_"): option for name, option in options.items() if option.startswith(_NEGATION)}
    return {**negated, **options, **others}


def _option(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")


def _given(options: dict[str, str], name: str, value: str) -> str:
    option = options.get(name, name)
    if value in ("True", "False"):
        says_so = (value == "False") == option.startswith(_NEGATION)
        return option if says_so else option.replace("--", _NEGATION, 1)
    try:
        meant = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return f"{option} {value}"
    return f"{option} {shlex.quote(meant) if isinstance(meant, str) else value}"
