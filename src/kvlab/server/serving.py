"""What the routes of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

import kvlab
from kvlab.config.server import ServerConfig
from kvlab.core import Request as EngineRequest
from kvlab.engine.core import EngineCore
from kvlab.engine.protocol import FinishCallback
from kvlab.engine.service import Engine
from kvlab.errors import QueueFullError
from kvlab.kv.pool import BlockPool
from kvlab.kv.reset import drop_cached
from kvlab.server.answers import Answer
from kvlab.server.audits import Audits
from kvlab.server.bodies import Generation
from kvlab.server.calls import ClientCall, Mailbox
from kvlab.server.errors import ApiError
from kvlab.server.live import LiveView
from kvlab.server.metrics import ServerMetrics
from kvlab.server.model import ServedModel
from kvlab.server.reading import LARGE, LargeBodies
from kvlab.server.streams import TokenStream, whole_answer

if TYPE_CHECKING:
    from kvlab.server.kv_events import KVEventPublisher
    from kvlab.server.traces import Traces

T = TypeVar("T")


class Serving:
    """What the routes share, and how many calls are open. The live page names `settings`; each request is a span of
    the `traces`; `events` tell what the prefix cache holds.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        metrics: ServerMetrics,
        config: ServerConfig,
        settings: Mapping[str, Any] | None = None,
        traces: Traces | None = None,
        events: KVEventPublisher | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.metrics = metrics
        self.config = config
        self.traces = traces
        self.events = events
        self.audits = Audits(engine)
        self.large = LargeBodies(model.max_tokens)
        self.draining = False
        self.open_calls = 0
        self._mailbox: Mailbox | None = None
        card = model.card() | {"takes": model.takes}
        self.about: dict[str, Any] = {"version": kvlab.__version__, "model": card, "settings": dict(settings or {})}
        self.live = LiveView(engine, metrics.history, self.about, lambda: self.status)

    def reset_prefix_cache(self) -> Future[int]:
        """Give up all cached content that no request uses, between two steps, and publish it; how many blocks. From
        any thread.
        """

        def reset(core: EngineCore) -> int:
            dropped = drop_cached(core.pool) if isinstance(core.pool, BlockPool) else 0
            if self.events is not None:
                self.events.flush()
            return dropped

        return self.engine.inspect(reset)

    def close(self) -> None:
        """The server has ended."""
        if self.events is not None:
            self.events.close()

    @property
    def status(self) -> str:
        """`ready`; `draining` after a signal; `broken` after a step failed."""
        return "broken" if self.engine.broken else "draining" if self.draining else "ready"

    async def prepared(self, make: Callable[[], T], client: Request, *, is_slow: bool = False) -> T:
        """What `make` makes of a body, beside the event loop where it is large, or `is_slow`: a chat template is
        rendered, which another process does, or a grammar is compiled.
        """
        size = client.state.body_bytes
        if size > LARGE:
            return await self.large.work(make, size)
        return await asyncio.to_thread(make) if is_slow else make()

    async def generate(
        self, kind: type[Answer], name: str, body: Generation, requests: Sequence[EngineRequest], client: Request
    ) -> Response:
        """Serve a call. Raises ApiError."""
        if self.draining:
            raise ApiError(503, "the server is shutting down and takes no more requests")
        self._mailbox = self._mailbox or Mailbox(asyncio.get_running_loop())
        on_finish: FinishCallback = self.metrics.finish
        if self.traces is not None:
            on_finish = self.traces.follow(requests, client.headers, on_finish)
        call = ClientCall(
            self.engine,
            self._mailbox,
            requests,
            most_waiting=self.config.max_waiting_outputs,
            on_finish=on_finish,
            arrival_s=client.state.arrival_s,
        )
        try:
            await call.start()
        except ApiError as error:
            if isinstance(error.__cause__, QueueFullError):
                self.metrics.refuse()
            raise
        self.metrics.accept(requests)
        answer = kind(name, body, requests, self.model)
        if body.stream:
            return TokenStream(call, answer)
        return await whole_answer(call, answer, client)
