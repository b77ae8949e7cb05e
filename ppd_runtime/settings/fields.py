"""Reads settings' names, types, defaults and documentation off their dataclasses, for signatures and options."""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")


@lru_cache
def documentation(settings: type) -> dict[str, str]:
    """The docstring below each field in a dataclass's source, in one line; empty without the source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[settings.__module__]))
    except OSError:
        return {}
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == settings.__name__]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def summary(settings: type, name: str) -> str:
    """The first sentence of a field's docstring."""
    text = documentation(settings).get(name, "")
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0]


def default_of(field: "Field[Any]") -> Any:
    """A field's default value."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def takes_settings(settings: type, names: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Make `help` and `inspect.signature` show a class' `**settings` as the fields behind it.

    Args:
        settings: the dataclass whose fields may be given by name.
        names: which of them, keyed by the class's names for them; None is all, by their own.
    """
    by_name = {field.name: field for field in fields(settings)}
    taken = {name: by_name[own] for name, own in (names or {name: name for name in by_name}).items()}

    def decorate(shown: type[T]) -> type[T]:
        own = inspect.signature(shown).parameters
        derived = {
            name: inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=field.type
            )
            for name, field in taken.items()
        }
        first = [
            parameter.replace(default=default_of(taken[parameter.name])) if parameter.name in taken else parameter
            for parameter in own.values()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        last = [parameter for parameter in own.values() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
        rest = [parameter for name, parameter in derived.items() if name not in own]
        shown.__signature__ = inspect.Signature([*first, *rest, *last])  # type: ignore[attr-defined]
        return shown

    return decorate


class UnknownSettingError(ValueError):
    """A setting that its owner does not have; `known` are those that it has."""

    def __init__(self, owner: str, name: str, known: Iterable[str]) -> None:
        self.owner, self.name, self.known = owner, name, tuple(sorted(known))
        super().__init__(f"{owner} has no setting {name!r}: it has {', '.join(self.known)}")


def check_known(owner: str, settings: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(settings) - set(known)):
        raise UnknownSettingError(owner, unknown[0], known)
