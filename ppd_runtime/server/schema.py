"""What the server's schema says of refusals: for each path the statuses that it can answer with, and no others."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from ppd_runtime.server.gate import OPEN_PATHS

_EVERYWHERE = (408, 413, 431, 500)
_OF_A_BODY = (400, 415)
_ALSO: Mapping[str, tuple[int, ...]] = {
    "/v1/completions": (404, 429, 503),
    "/v1/chat/completions": (404, 429, 503),
    "/v1/responses": (404, 429, 503),
    "/v1/messages": (404, 429, 503),
    "/v1/messages/count_tokens": (404,),
    "/v1/models/{model}": (404,),
    "/tokenize": (404,),
    "/detokenize": (404,),
}
_STATES = ("/health", "/ready")
"""Their status 503 is an answer, not an error object."""
_WORDS: Mapping[int, str] = {
    400: "What is asked for cannot be, or is not understood.",
    401: "No valid API key.",
    404: "Another model than the one that is served.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The content type is not application/json.",
    421: "The Host header names another host.",
    429: "No room: come again after the seconds of Retry-After.",
    431: "Too many or too large headers.",
    500: "The server failed.",
    503: "The server is shutting down, or not ready.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_refusals(app: FastAPI, has_key: bool, knows_its_names: bool) -> None:
    """List refusals in an application's schema. FastAPI's own 422 is sent as 400 here, as OpenAI does.

    Args:
        app: with all of its paths.
        has_key: whether clients need a key.
        knows_its_names: whether requests to other host names are refused.
    """
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    answers = operation["responses"]
                    answers.pop("422", None)
                    answers |= {str(status): _refusal(status, path) for status in _statuses(path, method)}
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            schema["components"]["schemas"]["Error"] = _ERROR
        return app.openapi_schema or {}

    def _statuses(path: str, method: str) -> list[int]:
        found = {*_EVERYWHERE, *_ALSO.get(path, ())}
        found |= {503} if path in _STATES else set()
        found |= set(_OF_A_BODY) if method == "post" else set()
        found |= {401} if has_key and path not in OPEN_PATHS else set()
        return sorted(found | ({421} if knows_its_names else set()))

    app.openapi = openapi  # type: ignore[method-assign]


def _refusal(status: int, path: str) -> dict[str, Any]:
    told: dict[str, Any] = {"description": _WORDS[status]}
    if not (status == 503 and path in _STATES):
        told["content"] = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return told
