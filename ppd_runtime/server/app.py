"""The application: every path that the server answers."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from ppd_runtime import __version__
from ppd_runtime.request_error import RequestError
from ppd_runtime.server.completions import Service
from ppd_runtime.server.errors import ApiError, JsonResponse, invalid, refused, renamed
from ppd_runtime.server.gate import Gate
from ppd_runtime.server.message_answers import MessageAnswer
from ppd_runtime.server.messages import MESSAGES_FIELDS, CountRequest, MessagesRequest
from ppd_runtime.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ppd_runtime.server.response_answers import ResponseAnswer
from ppd_runtime.server.responses import RESPONSES_FIELDS, ResponsesRequest
from ppd_runtime.server.schema import describe_refusals
from ppd_runtime.server.settings import ServerSettings

logger = logging.getLogger(__name__)
_PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def application(service: Service, settings: ServerSettings, key: bytes | None) -> ASGIApp:
    """The ASGI application of a server."""
    app = FastAPI(title="ppd_runtime", version=__version__, docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_openai(app, service)
    _add_other_chats(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    describe_refusals(app, has_key=key is not None, knows_its_names=key is None and settings.is_loopback)
    if settings.page:
        app.add_api_route("/", _page, include_in_schema=False)
    gated: ASGIApp = Gate(app, settings, key, service.metrics.note_refused)
    if settings.cors_origin:
        headers = ["authorization", "content-type", "x-request-id"]
        gated = CORSMiddleware(
            gated, settings.cors_origin, ("GET", "POST"), headers, expose_headers=["x-request-id", "retry-after"]
        )
    return gated


async def _page() -> Response:
    headers = {
        "content-security-policy": _PAGE_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers=headers)


def _add_errors(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.url.path)

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return invalid(error.errors()).response(request.url.path)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = {
            400: "the body is no JSON in UTF-8, or has too many levels or digits: send an object",  # FastAPI's own
            404: f"{request.url.path:.200}: there is no such path",
            405: f"{request.method}: not for this path",
        }
        answer = ApiError(error.status_code, told.get(error.status_code, str(error.detail))).response(request.url.path)
        answer.headers.update(error.headers or {})
        if answer.headers.get("allow") == "GET":
            answer.headers["allow"] = "GET, HEAD"  # which the gate answers
        return answer

    async def request_error(request: Request, error: Exception) -> Response:
        logger.error("request %s failed: %s", request.state.request_id, error)
        return ApiError(500, str(error)).response(request.url.path)

    async def failure(request: Request, error: Exception) -> Response:
        logger.error("request %s failed", request.state.request_id, exc_info=error)
        return ApiError(500, f"the server failed: {type(error).__name__}; its log says more").response(request.url.path)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(RuntimeError, failure)
    app.add_exception_handler(Exception, failure)


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.complete(asked, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        return await service.chat(asked, request)

    def model_card() -> dict[str, Any]:
        most = service.generator.info.max_positions
        card = {"id": service.model, "object": "model", "created": 0, "owned_by": "ppd_runtime", "max_model_len": most}
        return {**card, "chat": service.can_chat}

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return JsonResponse(model_card())


def _add_other_chats(app: FastAPI, service: Service) -> None:
    """Chats in the forms of OpenAI's responses and of Anthropic's messages."""

    def as_chat(asked: ResponsesRequest | CountRequest) -> ChatRequest:
        try:
            return asked.as_chat()
        except ValidationError as error:
            raise invalid(error.errors()) from error

    @app.post("/v1/responses")
    async def responses(asked: ResponsesRequest, request: Request) -> Response:
        with renamed(RESPONSES_FIELDS):
            return await service.chat(as_chat(asked), request, partial(ResponseAnswer, asked))

    @app.post("/v1/messages")
    async def messages(asked: MessagesRequest, request: Request) -> Response:
        with renamed(MESSAGES_FIELDS):
            return await service.chat(as_chat(asked), request, partial(MessageAnswer, asked))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(asked: CountRequest) -> Response:
        service.check_model(asked.model)
        chat = as_chat(asked)
        return JsonResponse({"input_tokens": len(await service.tokens_of(chat, chat.messages))})


def _add_tokens(app: FastAPI, service: Service) -> None:
    generator = service.generator

    def encoded(asked: TokenizeRequest) -> list[int]:
        return generator.prompt_ids(asked.prompt, asked.add_special_tokens) if asked.prompt else []

    def decoded(tokens: list[int]) -> str:
        return str(generator.tokenizer.decode(generator.prompt_ids(tokens) if tokens else []))

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> Response:
        service.check_model(asked.model)
        if asked.messages is not None:
            tokens = await service.tokens_of(asked, asked.messages)
        else:
            try:
                tokens = await service.in_thread(lambda: encoded(asked))
            except ValueError as error:
                raise refused(error, "prompt") from error
        return JsonResponse({"count": len(tokens), "max_model_len": generator.info.max_positions, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> Response:
        service.check_model(asked.model)
        try:
            text = await service.in_thread(lambda: decoded(asked.tokens))
        except ValueError as error:
            raise refused(error, "tokens") from error
        return JsonResponse({"prompt": text})


def _add_state(app: FastAPI, service: Service) -> None:
    admission = service.admission

    @app.get("/health")
    async def health() -> Response:
        unwell = await asyncio.to_thread(service.generator.unwell)
        if unwell:
            return JsonResponse({"status": "unwell", "lost": unwell}, 503)
        return JsonResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if not admission.is_open:
            return JsonResponse({"status": "not ready"}, 503, {"retry-after": "1"})
        return JsonResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})
