"""Sending answers: whole ones and server-sent events, to clients that may leave or read slowly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvlab.server.answers import Answer
from kvlab.server.calls import ClientCall
from kvlab.server.errors import ApiError

T = TypeVar("T")


async def whole_answer(call: ClientCall, answer: Answer, client: Request) -> Response:
    """Wait for all events. A client that leaves gives its memory back. Raises ApiError."""

    async def collect() -> None:
        async for events in call.events():
            for event in events:
                answer.add(event)

    try:
        if not await _unless_gone(collect(), client.receive):
            return Response(status_code=499)  # nobody reads it
    finally:
        call.leave()
    return JSONResponse(answer.body())


class TokenStream(Response):
    """Server-sent events: one for each token; an error on the way is an event too."""

    media_type = "text/event-stream"

    def __init__(self, call: ClientCall, answer: Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._call = call
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See Response."""

        async def run() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._data():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _unless_gone(run(), receive)
        finally:
            self._call.leave()

    async def _data(self) -> AsyncIterator[bytes]:
        answer = self._answer
        if begin := answer.stream_begin():
            yield begin
        try:
            async for events in self._call.events():
                yield b"".join([answer.stream_event(event) for event in events])
        except ApiError as error:
            yield answer.stream_error(error)
        else:
            yield answer.stream_end()


async def _unless_gone(work: Awaitable[None], receive: Receive) -> bool:
    """Do the work unless the client leaves before it is done. Returns whether it was done."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
