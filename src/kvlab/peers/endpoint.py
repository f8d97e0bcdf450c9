"""An engine behind an address: any server of OpenAI's protocol."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import aiohttp

from kvlab.config import RunConfig
from kvlab.config.values import server_root
from kvlab.core import UNKNOWN_TOKEN, Request, SamplingParams
from kvlab.engine.protocol import EngineReport, EngineSeries
from kvlab.errors import PeerError, shown
from kvlab.peers.prometheus import cache_slots, kept_lines, read_series
from kvlab.peers.remote import Exchange, RemoteEngine, Sample
from kvlab.peers.streams import EventReader, Json, check_request, error_text, finish_reason, request_body
from kvlab.secrets import redact

_ASK_S = 10.0  # for an answer that needs no model
_KEEP_S = 2.0  # an idle connection: less than servers keep it, so that none is used that they just closed
_LONGEST_LINE = 2**24  # bytes of an event


class Refusal(Exception):
    """The server answered a request with an error."""


class EndpointEngine(RemoteEngine):
    """Sends each request when it is submitted, and notes tokens when they come. There are no retries."""

    def __init__(
        self, config: RunConfig, *, longest: int, needs_ids: bool, should_stop: Callable[[], bool]
    ) -> None:
        super().__init__(is_open=config.workload.concurrency is None and config.engine.max_in_flight is None)
        self._settings = settings = config.engine
        self._root = server_root(settings.url or "")
        self._where = f"engine.url={redact(self._root)}"
        self._salt = uuid4().hex  # no request finds what an earlier run has left in the prefix cache
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pages: list[tuple[float, bytes]] = []
        self._watching: asyncio.Task[None] | None = None
        self._has_metrics = self._tells_ids = False
        self._facts: dict[str, str] = {}
        self._slots: int | None = None
        self._closing = AsyncExitStack()
        try:
            self.clock.run(self._connect(longest, needs_ids), should_stop)
        except BaseException:
            self.close()
            raise

    def report(self) -> EngineReport:
        report = super().report()
        slots = {} if self._slots is None else {"capacity/token_slots": self._slots}
        unreported = report.unreported if self._tells_ids else report.unreported | {"output_token_ids"}
        return replace(report, facts=self._facts, metrics={**report.metrics, **slots}, unreported=unreported)

    def _check(self, request: Request) -> None:
        check_request(request, extensions=self._settings.extensions)

    def _send(self, exchange: Exchange) -> None:
        if self._watching is None and self._has_metrics:
            self._watching = self.clock.loop.create_task(self._watch())
        self._tasks[self._id(exchange)] = self.clock.loop.create_task(self._serve(exchange))

    def _cancel(self, exchange: Exchange) -> None:
        task = self._tasks.pop(self._id(exchange), None)
        if task is not None:
            task.cancel()

    async def _shut(self) -> None:
        await self._closing.aclose()

    def _series(self) -> EngineSeries:
        if self._watching is not None and not self.clock.loop.is_closed():
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                self.clock.run(self._look())  # the counters at the end
        return read_series(self._pages)

    async def _connect(self, longest: int, needs_ids: bool) -> None:
        """Find out what the server is and has, and make it warm. Raises PeerError."""
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(self._on_sent)
        key = self._settings.api_key
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s),
            read_bufsize=_LONGEST_LINE,
            trace_configs=[trace],
        )
        self._http = await self._closing.enter_async_context(session)
        self._gate = asyncio.Semaphore(self._settings.max_in_flight or 2**31)
        card = await self._model_card()
        self._model = str(card["id"])
        self._facts = {"model": shown(self._model), "address": redact(self._root)}
        await self._check_version()
        limit = card.get("max_model_len")
        if isinstance(limit, int) and longest > limit:
            raise PeerError(
                f"{self._where}: the server takes up to {limit} tokens, prompt and output together, and the "
                f"workload has requests of {longest}; take shorter ones, or start the server with a longer context"
            )
        status, page = await self._get("/metrics")
        self._has_metrics = status == 200 and bool(kept_lines(page))
        if self._has_metrics:
            self._slots = cache_slots(page)
        await self._warm_up()
        if needs_ids and not self._tells_ids:
            raise PeerError(
                f"{self._where}: the server does not tell token ids (return_token_ids), and the later turns of a "
                "conversation are made of them; take a workload without turns"
            )

    async def _model_card(self) -> Json:
        """The served model, as /v1/models lists it."""
        status, page = await self._get("/v1/models")
        if status in (401, 403):
            raise PeerError(f"{self._where}: the server wants a key; give it as engine.api_key='${{oc.env:NAME}}'")
        try:
            cards = [card for card in json.loads(page)["data"] if isinstance(card, dict) and "id" in card]
        except (ValueError, LookupError, TypeError):
            cards = []
        if not cards:
            text = f"{self._where}: answers {status} to /v1/models, which is not OpenAI's protocol"
            raise PeerError(f"{text}; give the address that clients of the server use")
        wanted, names = self._settings.model, [str(card["id"]) for card in cards]
        if wanted is None and len(cards) == 1:
            return dict(cards[0])
        if wanted not in names:
            listed = ", ".join(map(shown, names[:10]))
            text = "the server has several models" if wanted is None else f"the server has no model {shown(wanted)}"
            raise PeerError(f"{self._where}: {text}; give one as engine.model, of: {listed}")
        return dict(cards[names.index(wanted)])

    async def _check_version(self) -> None:
        version = None
        with suppress(ValueError, LookupError, TypeError):
            status, page = await self._get("/version")
            version = str(json.loads(page)["version"]) if status == 200 else None
        if version is not None:
            self._facts["version"] = shown(version, most=80)
        wanted = self._settings.version
        if wanted is not None and wanted != version:
            said = "does not say its version" if version is None else f"is version {shown(version, most=80)}"
            raise PeerError(f"{self._where}: the server {said}, and engine.version={wanted} asks for another")

    async def _warm_up(self) -> None:
        """A short request, which also shows what the server can tell. Raises PeerError."""
        request = Request("warm-up", (1, 2, 3), SamplingParams(4, ignore_eos=True))
        sample = Sample()
        exchange = Exchange(request, None, None, [sample])
        began = time.perf_counter()
        try:
            await self._answer(exchange)
        except Refusal as error:
            advice = "; engine.extensions=false asks in OpenAI's terms alone" if self._settings.extensions else ""
            raise PeerError(f"{self._where}: the server refused the first request: {error}{advice}") from error
        except TimeoutError as error:
            text = f"the first request had no answer within engine.timeout_s={self._settings.timeout_s:g} seconds"
            raise PeerError(f"{self._where}: {text}") from error
        except aiohttp.ClientError as error:
            raise PeerError(f"{self._where}: the first request was cut off ({_reason(error)})") from error
        self._tells_ids = bool(sample.token_ids) and UNKNOWN_TOKEN not in sample.token_ids
        self._facts["first request"] = f"{time.perf_counter() - began:.2f} s"

    async def _serve(self, exchange: Exchange) -> None:
        """One request, from its sending to its end."""
        async with self._gate:
            try:
                await self._answer(exchange)
            except Refusal as error:
                self._fail(exchange, f"the server refused it: {error}")
            except TimeoutError:
                text = f"no complete answer within engine.timeout_s={self._settings.timeout_s:g} seconds"
                self._fail(exchange, text)
            except (aiohttp.ClientError, OSError) as error:
                await self._check_alive()
                self._fail(exchange, f"the connection broke off ({_reason(error)})")
            else:
                self._finish(exchange)
        self._tasks.pop(self._id(exchange), None)

    async def _answer(self, exchange: Exchange) -> None:
        """Send a request and take its tokens. Raises Refusal, TimeoutError, aiohttp.ClientError."""
        settings = self._settings
        body = request_body(
            exchange.request, self._model, self._salt, extensions=settings.extensions, options=settings.options
        )
        context = SimpleNamespace(request=exchange.request)
        data = json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{self._root}/v1/completions"
        async with self._http.post(url, data=data, headers=headers, trace_request_ctx=context) as response:
            if response.status != 200:
                raise Refusal(f"{response.status}: {_said(await response.read())}")
            reader, tally = EventReader(), _Tally()
            async for chunk in response.content.iter_any():
                now = self.clock.now()
                try:
                    events = reader.feed(chunk)
                    for event in events:
                        self._take(exchange, event, now, tally)
                except (ValueError, LookupError, TypeError) as error:
                    raise Refusal("its answer is not a stream of OpenAI's completions") from error
        self._spread(exchange, tally)
        if any(sample.reason is None for sample in exchange.samples):
            raise Refusal("the answer broke off before its end")

    def _take(self, exchange: Exchange, event: Json, now: float, tally: _Tally) -> None:
        """An event of a request's answer."""
        if "error" in event:
            raise Refusal(error_text(event))
        usage = event.get("usage") or {}
        for choice in event.get("choices") or ():
            index = int(choice.get("index") or 0)
            sample, ids, text = exchange.samples[index], choice.get("token_ids"), str(choice.get("text") or "")
            if ids is None and len(exchange.samples) == 1 and "completion_tokens" in usage:
                ids = [UNKNOWN_TOKEN] * (int(usage["completion_tokens"]) - len(sample.token_ids))
                tally.is_counted = True
            elif ids is None:
                ids = [UNKNOWN_TOKEN] if text else []
            self._add(exchange, index, [int(token) for token in ids], now, text)
            reason = choice.get("finish_reason")
            if reason is not None:
                sample.end(finish_reason(str(reason)), now)
        if "completion_tokens" in usage:
            tally.tokens = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            exchange.cached_tokens = int(details["cached_tokens"])

    def _spread(self, exchange: Exchange, tally: _Tally) -> None:
        """Where the server counts its tokens at the end alone, each event had as many as the others."""
        sample = exchange.samples[0]
        chunks = len(sample.token_ids)
        if len(exchange.samples) > 1 or tally.is_counted or tally.tokens <= chunks or not chunks:
            return
        if UNKNOWN_TOKEN in sample.token_ids:
            sample.times_s = [sample.times_s[number * chunks // tally.tokens] for number in range(tally.tokens)]
            sample.token_ids = [UNKNOWN_TOKEN] * tally.tokens

    async def _check_alive(self) -> None:
        """Find out whether the server is gone, which ends the run."""
        try:
            await self._get("/v1/models")
        except PeerError as error:
            self._break(PeerError(f"{error}; it ended while it had requests to answer"))

    async def _watch(self) -> None:
        """Keep what the server says of itself."""
        while True:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                await self._look()
            await asyncio.sleep(self._settings.metrics_s)

    async def _look(self) -> None:
        async with self._http.get(f"{self._root}/metrics", timeout=aiohttp.ClientTimeout(_ASK_S)) as response:
            page = await response.read()
        if response.status == 200:
            self._pages.append((self.clock.now(), kept_lines(page)))

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises PeerError where nothing answers."""
        try:
            timeout = aiohttp.ClientTimeout(_ASK_S)
            async with self._http.get(self._root + path, timeout=timeout) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise PeerError(f"{self._where}: no answer within {_ASK_S:g} seconds") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerError(f"{self._where}: no server answers there ({_reason(error)})") from error

    async def _on_sent(self, _session: Any, context: Any, _sent: Any) -> None:
        asked = getattr(context, "trace_request_ctx", None)
        if asked is not None:
            self._was_sent(asked.request, self.clock.now())


def _reason(error: Exception) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return " ".join(str(error).split())[:200] or type(error).__name__


def _said(data: bytes) -> str:
    """What an error's body says."""
    try:
        return error_text(json.loads(data))
    except ValueError:
        return error_text(data.decode(errors="replace"))


@dataclass(slots=True)
class _Tally:
    """How many tokens a server says that an answer has."""

    tokens: int = 0
    is_counted: bool = False  # event by event
