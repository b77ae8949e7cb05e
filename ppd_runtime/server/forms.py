"""What a client may ask an answer to look like: OpenAI's `response_format`, and vLLM's fields."""

import re
from typing import Any

from pydantic import Field

from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.grammar import MOST_CHOICES
from ppd_runtime.sampling.params import FORMS
from ppd_runtime.server.errors import ApiError, shown
from ppd_runtime.server.left_aside import Hints

_OF_OPENAI = "text", "json_object", "json_schema"
_OF_VLLM = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_ANY_OBJECT = {"type": "object"}


class Formed(Hints):
    """The fields that say what an answer looks like, of which a request may have one."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's, as are those below, by their older names."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=MOST_CHOICES, fail_fast=True)
    guided_grammar: str | None = None

    def form(self) -> dict[str, Any]:
        """The library's setting for it, by name; empty if answers may look like anything.

        Raises:
            ValueError: for two fields, and for what is in none of their forms.
        """
        given = self._given()
        if len(given) > 1:
            raise ValueError(f"{given[1]}: {given[0]} is given as well, leave one out")
        if not given:
            return {}
        if given[0] == "response_format":
            return _of_response_format(self.response_format or {})
        if given[0] == "structured_outputs":
            return _of_structured_outputs(self.structured_outputs or {})
        return {_OF_VLLM[given[0].removeprefix("guided_")]: getattr(self, given[0])}

    def in_own_words(self, error: ValueError) -> ValueError:
        """A library's error about the form with the name of the request's field."""
        return ValueError(re.sub(rf"^({'|'.join(FORMS)})(?=[=:])", self._field, str(error)))

    def form_failed(self, error: RequestError) -> ApiError:
        """The answer if the form that a request asked for cannot be followed to the end."""
        return ApiError(400, f"{self._field}: {error.fault_of_form}", self._field)

    @property
    def _field(self) -> str:
        """The field that gives the form; without one the tools do, of which one has to be called."""
        return next(iter(self._given()), "tools")

    def _given(self) -> list[str]:
        return [name for name in Formed.model_fields if name not in Hints.model_fields and getattr(self, name)]


def _of_response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in _OF_OPENAI:
        raise ValueError(f"response_format: type={shown(kind)}, choose one of {', '.join(_OF_OPENAI)}")
    _check_names("response_format", given, ("type", *(["json_schema"] if kind == "json_schema" else [])))
    if kind != "json_schema":
        return {} if kind == "text" else {"schema": _ANY_OBJECT}
    named = given.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise ValueError(f"response_format: json_schema={shown(named)}, give an object with a schema, an object")
    _check_names("response_format", named, ("name", "description", "schema", "strict"), "json_schema.")
    return {"schema": named["schema"]}


def _of_structured_outputs(given: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in given.items() if value is not None and value is not False}
    if found == {"json_object": True}:
        return {"schema": _ANY_OBJECT}
    _check_names("structured_outputs", found, tuple(_OF_VLLM))
    if len(found) != 1:
        raise ValueError(f"structured_outputs: {len(found)} forms, give one of {', '.join(_OF_VLLM)}")
    (name, value), *_ = found.items()
    return {_OF_VLLM[name]: value}


def _check_names(field: str, given: dict[str, Any], known: tuple[str, ...], within: str = "") -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{field}: this server does not support {shown(within + str(name))}, leave it out")
