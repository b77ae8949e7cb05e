"""What a text has to look like is checked before anything starts: bounds, one form, and the place of a fault."""

import json
import time

import pytest
from pydantic import BaseModel

from ppd_runtime.sampling.grammar import Form
from ppd_runtime.sampling.params import SamplingParams

STRING = {"type": "string"}


class Person(BaseModel):
    name: str
    age: int


def nested(levels: int) -> object:
    found: object = STRING
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"schema": "[1"}, r"schema='\[1': is no JSON"),
        ({"schema": 5}, "schema=5: give a JSON schema, an object"),
        ({"schema": False}, "schema=False: give a JSON schema, an object"),
        ({"schema": {1, 2}}, "schema={1, 2}: is no JSON"),
        ({"schema": "x" * (2**16 + 1)}, "schema='xxxxxx"),
        ({"schema": nested(64)}, "schema=.*: has more than 64 levels"),
        (
            {"schema": {"items": [{"multipleOf": 999_999}]}},
            "schema: multipleOf=999999 would take too long, give at most",
        ),
        ({"schema": {"properties": {"a": {"multipleOf": 1.00001}}}}, "schema: multipleOf=1.00001 would take too long"),
        ({"schema": "[" * 30_000}, "schema=.*: is no JSON"),
        ({"regex": ""}, "regex='': give a text of 1 to 65536"),
        ({"regex": 5}, "regex=5: give a text"),
        ({"regex": "a\ud800"}, "regex=.*: give a text"),
        ({"grammar": "x" * (2**16 + 1)}, "grammar='xxx"),
        ({"choice": []}, r"choice=\[\]: give a list of texts"),
        ({"choice": ["a", ""]}, "choice='': give texts"),
        ({"choice": ["a"] * 1001}, "choice: 1001 texts, give at most 1000"),
        ({"choice": ["a" * 2**15] * 3}, "choice='aaa.*: 98304 characters"),
        ({"schema": STRING, "regex": "a"}, "regex: schema is given as well, give one of them"),
        ({"choice": ["a"], "grammar": 'start: "a"'}, "grammar: choice is given as well"),
        ({"choice": ["a"], "ignore_eos": True}, "ignore_eos=True: a text with a choice ends when it is complete"),
    ],
)
def test_what_is_no_form_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}") as error:
        SamplingParams(**settings)
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"schema": {"type": "strin"}}, "schema: Invalid type: strin; mend it"),
        (
            {"schema": {"type": "object", "properties": {"a": STRING, "b": {"type": "array", "items": {"type": "x"}}}}},
            "schema: at properties.b.items: Invalid type: x; mend it",
        ),
        (
            {"schema": {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [STRING, {"not": STRING}]}}}},
            r'schema: at \$defs.A.anyOf.1: Unimplemented keys: \["not"\]; mend it',
        ),
        ({"schema": {"$ref": "#/nowhere"}}, "schema: Pointer '/nowhere' does not exist"),
        ({"schema": {"enum": []}}, "schema: Unsatisfiable schema"),
        ({"schema": {"type": "string", "pattern": "(a"}}, "schema: at character 1 of '.a': unclosed group"),
        ({"regex": "ab(c"}, r"regex: at character 3 of 'ab\(c': unclosed group; mend it"),
        ({"regex": "a(?=b)"}, "regex: at character 2 of '.*': look-around"),
        ({"grammar": 'start: "a" b'}, 'grammar: at line 1, column 8: unknown name: "b"; mend it'),
        ({"grammar": "start: ("}, "grammar: at line 1"),
    ],
)
def test_a_fault_is_named_with_its_place(form: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}") as error:
        SamplingParams(**form)
    assert "\n" not in str(error.value)


def test_a_schema_may_come_in_several_ways() -> None:
    mapping = Person.model_json_schema()
    forms = [SamplingParams(schema=given) for given in (Person, mapping, json.dumps(mapping, ensure_ascii=False))]
    assert len({params.form for params in forms}) == 1
    assert SamplingParams(choice="yes").form == Form("choice", '["yes"]')
    assert SamplingParams().form is None
    assert hash(forms[0]) == hash(forms[1])


@pytest.mark.parametrize(
    "form",
    [
        {"schema": {"type": "string", "minLength": 10**9}},
        {"schema": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}}},
        {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
        {"regex": "(.*a.{100}){50}"},
        {"schema": {"anyOf": [{"type": "string", "pattern": f"(.*{n}.*){{40}}"} for n in range(50)]}},
        {"grammar": "start: " + " ".join(f"a{n}" for n in range(2000)) + "\n"
         + "\n".join(f'a{n}: "x" a{n}? | "y"' for n in range(2000))},
    ],
)  # fmt: skip
def test_what_would_take_long_is_taken_or_refused_soon(form: dict[str, object]) -> None:
    began = time.process_time()
    try:
        SamplingParams(**form)
    except ValueError as error:
        assert str(error).startswith(f"{next(iter(form))}: ")
    assert time.process_time() - began < 20  # a hang would take minutes; usual are milliseconds


def test_multiples_that_are_quick_are_taken() -> None:
    for given in (0.01, 2.5, 100_000, 50_000.0, 1e-9):
        SamplingParams(schema={"type": "number", "multipleOf": given})
    SamplingParams(schema={"const": {"multipleOf": 999_999}})
