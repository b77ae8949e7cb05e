"""The answer to a request that cannot be met: OpenAI's error object, with field, value and way out."""

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

KINDS: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""OpenAI's types by status; all others are "invalid_request_error"."""
MESSAGES_PATH = "/v1/messages"
"""Anthropic's API."""
GONE = 499
"""The log's status of a request whose client has gone, as in nginx."""
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_LINE_ENDS = "\x85\u2028\u2029"
_FIELDS = {"max_new_tokens": "max_tokens"}
"""What requests call the library's settings."""
_NO_FIELDS = ("body", "str", "list[str]", "list[dict[str,any]]")
"""In pydantic's paths: the body, and the forms that a field may have."""
_OTHER_FORMS = ("string_type", "list_type")
"""Pydantic's words for a field that has several forms, and was given in none of them."""
_USUAL_NAME = re.compile(r"[\w.\-]{1,100}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: HTTP's.
        message: what was wrong, and the way out.
        param: the field.
        code: OpenAI's word for it, if there is one.
        retry_after_s: when to come again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {"retry-after": str(retry_after_s)} if retry_after_s else {}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """This error as an HTTP response; for `path` of Anthropic's API in its form, too."""
        kind = {"type": "error"} if path.startswith(MESSAGES_PATH) else {}
        return JsonResponse({**kind, **self.body}, self.status, self.headers)


class JsonResponse(Response):
    """JSON; what is no character, like a lone surrogate, becomes a question mark."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a JSON value."""
        return as_json(content)


def as_json(content: Any) -> bytes:
    """A JSON value in UTF-8, one line even for clients that break lines at Unicode's other line ends."""
    text = _ENCODE(content)
    for character in _LINE_ENDS:  # JSON escapes all others; here they stand in strings alone
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace")


def shown(value: object) -> str:
    """A value as refusals name it: its beginning, whatever its size."""
    return f"{_SHORT.repr(value):.100}"


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals within name fields as another path calls them."""
    try:
        yield
    except ApiError as error:
        rename(error, names)
        raise


def rename(error: ApiError, names: Mapping[str, str]) -> None:
    """Name fields in a refusal as another path calls them."""
    for name, other in names.items():
        error.message = re.sub(rf"\b{name}\b(?=[=:])", other, error.message)
    error.param = names.get(error.param or "", error.param)


def refused(error: ValueError | str, field: str | None = None) -> ApiError:
    """A library's `ValueError` in the words of a request; about `field` if it names none.

    A conversation's prompt is a text that its client has not seen, so the message names `messages` instead.
    """
    message = str(error)
    if field == "messages":
        message = re.sub(r"(?s)^prompt=.*?: (?=holds )", "messages: ", message)
    for name, asked in _FIELDS.items():
        message = re.sub(rf"\b{name}\b(?=[=:])", asked, message)
    found = re.match(r"([a-z_]+)[=:]", message)
    if " positions:" in message:
        return ApiError(400, message, field or "prompt", "context_length_exceeded")
    return ApiError(400, message, found.group(1) if found else field)


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors, with the field's name."""
    first = errors[0]
    place = [_name(part) for part in _place(first)]
    field = ".".join(place)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}; send an object")
    given = f"={shown(first['input'])}" if first["type"] != "missing" else ""
    if first["type"] == "extra_forbidden":
        message = f"{field}{given}: this server does not support it, leave it out"
        return ApiError(400, message, field, "unsupported_parameter")
    forms = [error["msg"] for error in errors if error["type"] in _OTHER_FORMS and _place(error) == _place(first)]
    words = (text.removeprefix("Value error, ") for text in dict.fromkeys(forms or [first["msg"]]))
    what = ", or ".join(text[:1].lower() + text[1:] for text in words)
    if not field and first["type"] == "value_error":
        return refused(what)
    if not field:
        return ApiError(400, "the body is missing or is no object: send a JSON object")
    return ApiError(400, f"{field}{given}: {what}", place[0])


def _name(part: object) -> str:
    """A field's name in refusals: what no client would write is shortened, in quotes."""
    text = str(part)
    return text if _USUAL_NAME.fullmatch(text) else shown(text)


def _place(error: Mapping[str, Any]) -> list[object]:
    """The field's names and positions, from outside."""
    return [part for part in error["loc"] if part not in _NO_FIELDS]
