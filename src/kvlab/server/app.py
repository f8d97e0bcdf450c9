"""The server's routes: OpenAI's protocol, what operators ask, and the live page."""

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

import kvlab
from kvlab.errors import shown
from kvlab.server.answers import ChatAnswer, CompletionAnswer
from kvlab.server.bodies import ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesRequest, TokenizeRequest
from kvlab.server.document import (
    Chat,
    Completion,
    Error,
    Health,
    Model,
    Models,
    Responses,
    Text,
    Tokens,
    Version,
    errors,
    generated,
)
from kvlab.server.errors import ApiError, invalid_body
from kvlab.server.limits import Limits
from kvlab.server.live import ServerStats, pace
from kvlab.server.metrics import CONTENT_TYPE
from kvlab.server.page import HEADERS, PAGE, headers, reference
from kvlab.server.parameters import chat_request, completion_requests, tokens_answer
from kvlab.server.responses import ResponsesAnswer, chat_of
from kvlab.server.serving import Serving

_ERRORS = errors(400, 401, 403, 404, 408, 413, 415, 503)


def build_app(serving: Serving) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="kvlab", version=kvlab.__version__, responses=_ERRORS, docs_url=None, redoc_url=None)
    model, engine = serving.model, serving.engine

    @app.post("/v1/completions", responses=generated(Completion))
    async def completions(body: CompletionRequest, client: Request) -> Response:
        name = f"cmpl-{uuid4().hex}"
        make, is_slow = partial(completion_requests, body, name, model), bool(body.structured_outputs)
        requests = await serving.prepared(make, client, is_slow=is_slow or body.response_format is not None)
        return await serving.generate(CompletionAnswer, name, body, requests, client)

    @app.post("/v1/chat/completions", responses=generated(Chat))
    async def chat_completions(body: ChatRequest, client: Request) -> Response:
        name = f"chatcmpl-{uuid4().hex}"
        request = await serving.prepared(partial(chat_request, body, name, model), client, is_slow=True)
        return await serving.generate(ChatAnswer, name, body, [request], client)

    @app.post("/v1/responses", responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}})
    async def responses(body: ResponsesRequest, client: Request) -> Response:
        name, chat = f"resp_{uuid4().hex}", chat_of(body)
        request = await serving.prepared(partial(chat_request, chat, name, model), client, is_slow=True)
        return await serving.generate(ResponsesAnswer, name, chat, [request], client)

    @app.get("/v1/models", response_model=Models)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.card()]}

    @app.get("/v1/models/{name:path}", response_model=Model)
    async def one_model(name: str) -> dict[str, Any]:
        if name != model.name:
            raise ApiError(404, f"model={shown(name, repr)}: there is {model.name!r}", "model")
        return model.card()

    @app.post("/tokenize", responses={200: {"model": Tokens}})
    async def tokenize(body: TokenizeRequest, client: Request) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "needs either prompt or messages", "prompt")
        make, renders = partial(tokens_answer, body, model), body.messages is not None
        answer = await serving.prepared(make, client, is_slow=renders)
        return Response(answer, media_type="application/json")

    @app.post("/detokenize", response_model=Text)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        wrong = next((token for token in body.tokens if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"tokens: {shown(wrong)} is outside the vocabulary of {model.vocab_size}", "tokens")
        if model.tokenizer is None:
            raise ApiError(400, f"{model.name} has no tokenizer", "tokens")
        return {"prompt": model.decode(body.tokens)}

    @app.get("/health", responses={200: {"model": Health}, 503: {"model": Health | Error}})
    async def health(audit: bool = False) -> Response:
        """With ?audit=true every invariant of the pool is checked, between two steps. That needs the key."""
        status = serving.status
        body: dict[str, Any] = {"status": status}
        if audit:
            body["audit"] = await serving.audits.findings()
        return JSONResponse(body, status_code=200 if status == "ready" and not body.get("audit") else 503)

    @app.get("/stats")
    async def stats() -> ServerStats:
        figures: dict[str, Any] = asdict(engine.stats())
        figures |= serving.metrics.history.rates(engine.clock.now()) | pace(engine.clock)
        return ServerStats(**figures)

    @app.get("/live")
    async def live() -> Response:
        """What the live page shows, at most four times per second anew."""
        body, no_store = await serving.live.body(), {"Cache-Control": "no-store"}
        return Response(body, media_type="application/json", headers=no_store)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(PAGE, media_type="text/html", headers=HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        body = reference(app.openapi())
        return Response(body, media_type="text/html", headers=headers(body))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version", response_model=Version)
    async def version() -> dict[str, str]:
        return {"version": kvlab.__version__}

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(client: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_body(error.errors(), client.headers.get("content-type", "")).response()

    @app.exception_handler(HTTPException)
    async def http_error(client: Request, error: HTTPException) -> JSONResponse:
        text = f"{client.method} {shown(client.url.path)}: {error.detail}"
        if isinstance(error.__cause__, UnicodeDecodeError):
            text = "the body is no JSON object: it is not UTF-8"
        response = ApiError(error.status_code, text).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()  # the log has the rest

    def document() -> dict[str, Any]:
        schema = FastAPI.openapi(app)
        for path in schema["paths"].values():
            for route in path.values():
                route["responses"].pop("422", None)  # which FastAPI adds: invalid bodies get 400 here
        return schema

    app.openapi = document  # type: ignore[method-assign]
    add_operations(app, serving)
    app.add_middleware(Limits, serving=serving)
    if serving.config.cors_origins:  # outside of the limits: a browser asks without a key whether it may
        app.add_middleware(
            CORSMiddleware, allow_origins=serving.config.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


_READY: Responses = {200: {"model": Health}, 503: {"model": Health}}


def add_operations(app: FastAPI, serving: Serving) -> None:
    """Add them to the application."""

    @app.get("/ping", responses=_READY)
    async def ping() -> Response:
        """Whether the server takes requests, as /health says it."""
        return JSONResponse({"status": serving.status}, status_code=200 if serving.status == "ready" else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Requests that wait or run."""
        stats = serving.engine.stats()
        return {"server_load": stats.waiting + stats.running}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Version, model and settings."""
        return serving.about

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """The chat template and the special tokens that it may name."""
        if serving.model.tokenizer is None:
            raise ApiError(404, f"{serving.model.name} has no tokenizer; model.tokenizer lends it one")
        return serving.model.tokenizer.info()

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, int]:
        """Give up all cached content that no request uses. Returns the number of blocks."""
        return {"dropped_blocks": await asyncio.wrap_future(serving.reset_prefix_cache())}
