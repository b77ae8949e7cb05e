"""Random JSON schemas whose texts all end: strings, numbers and lists are bounded."""

import json
import random
from typing import Any

WORDS = ("name", "age", "the fox", "tags", "é", "a b", "id", "next", "$ref", 'quo"te', "x")


def random_schema(rng: random.Random, levels: int = 3) -> dict[str, Any]:
    """A schema of at most so many levels of objects and lists."""
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "null"]
    kinds += ["object", "object", "array", "anyOf", "ref"] if levels else []
    kind = rng.choice(kinds)
    if kind in ("object", "array", "anyOf", "ref"):
        return _COMPOSED[kind](rng, levels - 1)
    if kind == "string":
        return _string(rng)
    if kind == "integer":
        low = rng.randint(-300, 300)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": rng.choice([0.5, 0.25, 1])}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, [1, "a"], {"a": 1}], rng.randint(1, 5))}
    return {"const": rng.choice([*WORDS, 5])} if kind == "const" else {"type": kind}


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(3)
    if kind == 0:
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-f]{1,5}$", "^(the|a) (fox|dog)s?$", "^[0-9]{2}-[0-9]{2}$"]),
        }
    if kind == 1:
        return {"type": "string", "format": rng.choice(["date", "time", "uuid"])}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _object(rng: random.Random, levels: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 3))
    found = {"type": "object", "properties": {name: random_schema(rng, levels) for name in names}}
    found |= {"required": [name for name in names if rng.random() < 0.7], "additionalProperties": False}
    return found


def _array(rng: random.Random, levels: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, levels),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
        **({"prefixItems": [random_schema(rng, 0)]} if rng.random() < 0.3 and low else {}),
    }


def _any_of(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, levels) for _ in range(rng.randint(1, 3))]}


def _ref(rng: random.Random, levels: int) -> dict[str, Any]:
    """The definitions are lifted to the root by `whole_schema`."""
    return {"$ref": f"#/$defs/{rng.randrange(2)}"}


_COMPOSED = {"object": _object, "array": _array, "anyOf": _any_of, "ref": _ref}


def whole_schema(seed: int) -> dict[str, Any]:
    """A schema with its definitions."""
    rng = random.Random(seed)
    found = random_schema(rng)
    if "$ref" in json.dumps(found):
        found = {**found, "$defs": {str(number): random_schema(rng, 0) for number in range(2)}}
    return found
