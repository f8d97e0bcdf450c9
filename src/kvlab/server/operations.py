"""Routes for those who run servers and put gateways in front of them, as vLLM's servers have them."""

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from kvlab.server.document import Health, Responses
from kvlab.server.errors import ApiError
from kvlab.server.serving import Serving

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
