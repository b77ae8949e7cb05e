"""What a text has to look like: a JSON schema, a regular expression, choices or a grammar, checked without a model."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ppd_runtime.settings.checks import is_text

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MOST_CHARACTERS = 2**16
"""Characters that a schema, an expression, all choices together or a grammar have at most."""
MOST_DEPTH = 64
"""Levels of a schema's JSON."""
MOST_CHOICES = 1000
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"  # without an end, small models never leave it
MOST_MULTIPLE = 100_000
"""The largest `multipleOf`, without its point: a grammar has a state for each remainder."""
MOST_SHARED_STATES = 4000
"""States that a lexer which later requests use as well keeps at most, 1 to 2 kB each."""
_MOST_STATES = 50_000  # of one request's own lexer
_MOST_TRIALS = 200  # parts of a schema that are tried to find its fault
_MOST_KEPT = 64
_STACK_BYTES = 2**28  # of a thread that compiles; the memory is taken as it is needed
_STACKS = threading.Lock()
Done = TypeVar("Done")
_VALUES = {"const", "enum", "default", "examples"}  # of a schema, which hold no schemas
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_OF_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
"""Keywords of JSON Schema that hold further schemas: by name, in lists, and one alone."""


class Form(NamedTuple):
    """A checked form of texts."""

    setting: str
    """One of schema, regex, choice and grammar."""
    text: str
    """What was given; choices as a JSON list."""


def schema_text(given: Any) -> str:
    """A JSON schema as JSON text, from a text, a mapping, or a pydantic model class.

    Raises:
        ValueError: for anything else, and for what is too long or too deep.
    """
    if callable(described := getattr(given, "model_json_schema", None)):
        given = described()
    if isinstance(given, str):
        text = given
    else:
        try:
            text = json.dumps(given, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"schema={given!r:.200}: is no JSON ({error}), give a JSON schema") from error
    _check_size("schema", text)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema={text!r:.200}: is no JSON ({error}), give a JSON schema") from error
    if not isinstance(found, dict):
        raise ValueError(f"schema={given!r:.200}: give a JSON schema, an object")
    if _depth(found) > MOST_DEPTH:
        raise ValueError(f"schema={text!r:.100}…: has more than {MOST_DEPTH} levels, give a flatter one, as with $defs")
    check_multiples("schema", found)
    return text


def check_multiples(setting: str, schema: Any) -> None:
    """Raise ValueError for a `multipleOf` anywhere in a schema that takes seconds and more to compile."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            given = part.get("multipleOf")
            if isinstance(given, int | float) and _without_point(given) > MOST_MULTIPLE:
                most = f"at most {MOST_MULTIPLE} without its point"
                raise ValueError(f"{setting}: multipleOf={given} would take too long, give {most}, or leave it out")
            parts += [inner for name, inner in part.items() if name not in _VALUES]
        elif isinstance(part, list | tuple):
            parts += part


def _without_point(number: float) -> int:
    """A number's digits as a whole number, 125 for 1.25; 0 for what is no number."""
    decimal = Decimal(str(number)).normalize()
    return abs(int(decimal.scaleb(max(0, -int(decimal.as_tuple().exponent))))) if decimal.is_finite() else 0


def pattern_text(setting: str, given: object) -> str:
    """A regular expression or a grammar."""
    if not is_text(given, MOST_CHARACTERS):
        raise ValueError(f"{setting}={given!r:.200}: give a text of 1 to {MOST_CHARACTERS} Unicode characters")
    return str(given)


def choices(given: object) -> tuple[str, ...]:
    """Texts, one of which is to be the whole text."""
    found = (given,) if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(f"choice={given!r:.200}: give a list of texts")
    for text in found:
        if not is_text(text, MOST_CHARACTERS):
            raise ValueError(f"choice={text!r:.200}: give texts of 1 to {MOST_CHARACTERS} Unicode characters")
    if len(found) > MOST_CHOICES:
        raise ValueError(f"choice: {len(found)} texts, give at most {MOST_CHOICES}")
    _check_size("choice", "".join(found))
    return tuple(found)


def check_form(form: Form) -> None:
    """Raise ValueError for what cannot be compiled, with the place in it; takes milliseconds, once for each form."""
    if fault := _fault(form):
        raise ValueError(f"{form.setting}: {fault}; mend it")


def in_library_form(form: Form) -> str:
    """The grammar in the form that llguidance compiles."""
    from llguidance import LLMatcher

    if form.setting == "schema":
        return LLMatcher.grammar_from_json_schema(form.text, defaults={"whitespace_pattern": WHITESPACE})
    if form.setting == "regex":
        return LLMatcher.grammar_from_regex(form.text)
    if form.setting == "choice":
        texts = json.loads(form.text)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in texts))
    return LLMatcher.grammar_from_lark(form.text)


def limits(most_states: int = _MOST_STATES) -> "LLParserLimits":
    """Bounds on the time and the memory that a grammar takes; a matcher that passes them fails for good."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=most_states, verbose_errors=False)


def in_deep_thread(compiling: Callable[[], Done]) -> Done:
    """What `compiling` gives. llguidance calls itself for a rule within a rule: long chains would end the process."""
    with ThreadPoolExecutor(1, "ppd-form") as pool:
        with _STACKS:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                found = pool.submit(compiling)
            finally:
                threading.stack_size(usual)
        return found.result()


def one_line_fault(text: str) -> str:
    """What is wrong and where, in one line, from llguidance's message."""
    lines = text.strip().splitlines()
    if (what := re.search(r"^error: (.+)$", text, re.MULTILINE)) is not None:  # of a regular expression
        marks = [line for line in lines if line.strip() and not line.strip(" ^")]
        shown = lines[lines.index(marks[0]) - 1][4:] if marks else ""
        return f"at character {marks[0].index('^') - 3} of {shown!r:.100}: {what[1]}" if marks else what[1]
    first = lines[0] if lines else ""
    return re.sub(r"^(?:at )?(\d+)\((\d+)\)", r"at line \1, column \2", first)[:500]


@lru_cache(_MOST_KEPT)
def _fault(form: Form) -> str:
    found = _library_fault(form)
    if not found:
        return ""
    place = _faulty_part(json.loads(form.text), found) if form.setting == "schema" else ""
    return f"at {place}: {one_line_fault(found)}" if place else one_line_fault(found)


def _library_fault(form: Form) -> str:
    from llguidance import LLMatcher

    try:
        grammar = in_library_form(form)
    except ValueError as error:  # a schema that is not JSON, or no object
        return str(error)
    is_error, found = in_deep_thread(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=limits()))
    return (found[0] or "cannot be compiled") if is_error else ""


def _faulty_part(schema: Any, fault: str) -> str:
    """The place of the smallest part of a schema that alone has the same fault; empty if that is the whole."""
    trials, place, part = 0, list[str](), schema
    own = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    while True:
        for names, child in _parts(part):
            trials += 1
            if trials > _MOST_TRIALS:
                return ".".join(place)
            alone = {**own, **child} if isinstance(child, dict) else child
            if _library_fault(Form("schema", json.dumps(alone))) == fault:
                place, part = [*place, *names], child
                own = {} if names[0] in own else own  # a fault in a definition is found in it alone
                break
        else:
            return ".".join(place)


def _parts(schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas right within a schema, with their places."""
    if not isinstance(schema, dict):
        return
    for keyword in _OF_NAMES:
        if isinstance(named := schema.get(keyword), dict):
            yield from (((keyword, name), child) for name, child in named.items())
    for keyword in _OF_LISTS:
        if isinstance(listed := schema.get(keyword), list):
            yield from (((keyword, str(number)), child) for number, child in enumerate(listed))
    yield from (((keyword,), schema[keyword]) for keyword in _OF_ONE if isinstance(schema.get(keyword), dict))


def _check_size(setting: str, text: str) -> None:
    if not is_text(text, MOST_CHARACTERS):
        raise ValueError(
            f"{setting}={text!r:.100}…: {len(text)} characters, give 1 to {MOST_CHARACTERS} Unicode characters"
        )


def _depth(found: Any) -> int:
    """Levels of JSON's lists and objects, counted without recursion."""
    level, depth = [found], 0
    while level := [one for one in level if isinstance(one, Mapping | list)]:
        depth += 1
        level = [child for one in level for child in (one.values() if isinstance(one, Mapping) else one)]
    return depth
