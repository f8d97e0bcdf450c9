"""A proxy before several servers of OpenAI's protocol: a router of kvlab.fleet chooses one for each request.

An answer goes to the client as it comes. Until its first byte has come the request may go to another server, then
never again.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import Metric, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvlab.errors import KvlabError, shown
from kvlab.plugins import reason_of
from kvlab.server.decisions import DecisionLog
from kvlab.server.lookout import ANSWER_S, CONNECT_S, Lookout, RouteSettings
from kvlab.server.passing import application, begun, called, client_session, refusal, unreached
from kvlab.server.routed_call import RoutedCall, asked_of, prompt_of
from kvlab.server.tracing import UPSTREAM, to_tokenize
from kvlab.server.upstreams import Sent, Upstream, families
from kvlab.workloads.prompt_blocks import text_encoder

_log = logging.getLogger(__name__)


class Proxy(Collector):
    """Serves what its upstreams serve: first `start`, then `app`. Raises ConfigError, as a Lookout does."""

    def __init__(self, settings: RouteSettings) -> None:
        self._settings, self._router, self._lookout = settings, settings.router(), Lookout(settings)
        self.upstreams = self._lookout.upstreams
        self._begin = time.perf_counter()
        self._encode = text_encoder(settings.tokenizer) if settings.tokenizer != UPSTREAM else None
        self._log: DecisionLog | None = None
        self.untokenized = 0  # calls whose tokens could not be had

    async def start(self) -> None:
        """Look at all upstreams. Raises ConfigError, as Lookout.start and a DecisionLog do."""
        await self._lookout.start()
        if self._settings.record is not None:
            self._log = DecisionLog(self._settings)

    def app(self) -> web.Application:
        """The application."""
        app = application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/undrain", self._drain)
        app.router.add_route("*", "/{path:.*}", self._pass)
        app.cleanup_ctx.append(self._life)
        return app

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        yield from families(self.upstreams)
        text = "Requests whose tokens could not be had: by what they begin with is not known for them."
        yield CounterMetricFamily("kvlab:route_untokenized", text, self.untokenized)

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        async with client_session(CONNECT_S) as self._client:
            tasks = [asyncio.create_task(watching) for watching in self._lookout.tasks(self._client)]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in self.upstreams:
            if upstream.heard is not None:
                upstream.heard.close()
        if self._log is not None:
            self._log.close()

    async def _health(self, request: web.Request) -> web.Response:
        """Which upstreams are up."""
        is_ready = any(upstream.takes for upstream in self.upstreams)
        status = "ready" if is_ready else "no upstream takes requests"
        about: dict[str, Any] = {"status": status, "upstreams": [upstream.about() for upstream in self.upstreams]}
        if self._log is not None:
            about["record"] = self._log.about()
        return web.json_response(about, status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _drain(self, request: web.Request) -> web.Response:
        """Give an upstream no new requests, or again some."""
        if "Origin" in request.headers:
            return refusal(403, "a page in a browser may not say this")
        number = request.query.get("upstream", "")
        if not (number.isdecimal() and int(number) < len(self.upstreams)):
            most = len(self.upstreams) - 1
            return refusal(400, f"upstream={shown(number)}: write {request.path}?upstream=N, 0 to {most}")
        upstream = self.upstreams[int(number)]
        upstream.draining = request.path == "/drain"
        return web.json_response(upstream.about())

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = asked_of(body) if request.method == "POST" else None
        call = await self._call(asked, request) if asked is not None else None
        tried: set[int] = set()
        reason = ""
        while open_ones := [
            candidate for candidate in self.upstreams if candidate.takes and candidate.index not in tried
        ]:
            try:
                upstream = open_ones[0] if call is None else self._chosen(call, open_ones)
            except KvlabError as error:
                return refusal(500, str(error))
            except Exception as error:  # of a plugin's router
                text = f"fleet.router={self._settings.fleet.router}: {reason_of(error)}"
                _log.exception("%s", text)
                return refusal(500, text)
            tried.add(upstream.index)
            is_last = call is None or len(open_ones) == 1
            with upstream.serving(call) as sent:
                found = await self._attempt(request, body, upstream, sent, is_last)
            if not isinstance(found, str):
                return found
            reason = f"{upstream.url}: {found}"
            if call is None and upstream.takes:  # it may have done what was asked, which may not be done twice
                break
        if tried:
            return refusal(502, f"no upstream answered; the last one, {reason}")
        return refusal(503, "no upstream takes requests; /health says why")

    async def _call(self, asked: Mapping[str, Any], request: web.Request) -> RoutedCall:
        headers = request.headers
        tokens = await self._tokens(asked, request) if self._lookout.prefixes != "none" else None
        return RoutedCall(asked, headers.get("X-Request-Id"), headers.get("X-Session-Id"), tokens)

    def _chosen(self, call: RoutedCall, open_ones: Sequence[Upstream]) -> Upstream:
        now = time.perf_counter() - self._begin
        choice = self._router.choose(call, list(open_ones), now)  # a router of a plugin may change its list
        choice = self._router.checked(choice, call, [upstream.index for upstream in open_ones])
        if self._log is not None:
            self._log.put(call, now, open_ones, choice)
        return self.upstreams[choice.replica]

    async def _attempt(
        self, request: web.Request, body: bytes, upstream: Upstream, sent: Sent, is_last: bool
    ) -> web.StreamResponse | str:
        """What an upstream answers, passed on; or why another one has to: nothing of an answer has come."""
        has_begun = False
        try:
            async with (
                asyncio.timeout(None) as sent.waits,
                called(self._client, upstream.url, request, body) as answer,
            ):
                part: bytes | None = await answer.content.readany()
                if answer.status == 503 and not is_last:
                    upstream.retried += 1
                    return "it says 503"
                has_begun, sent.prefill_tokens, sent.waits = True, 0, None
                response = await begun(request, answer)
                while part:
                    await response.write(part)
                    part = await _next(answer)
                if part is None:
                    upstream.broken += 1
                    if request.transport is not None:
                        request.transport.abort()  # so that the client sees that the answer is cut
                return response
        except (aiohttp.ClientError, ConnectionError) as error:
            if has_begun:  # the client has left
                return web.Response()
            upstream.retried += 1
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                upstream.leave_out(unreached(error), error)
            return unreached(error)
        except TimeoutError:
            upstream.retried += 1
            return "it does not answer"

    async def _tokens(self, asked: Mapping[str, Any], request: web.Request) -> Sequence[int] | None:
        """A prompt's tokens; None where nobody makes any, or they are there already."""
        prompt = prompt_of(asked)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return None
        try:
            if self._encode is not None:
                return await asyncio.to_thread(self._encode, prompt)
            return await self._tokens_of_upstream(asked, prompt, request) if self._settings.tokenizer else None
        except (aiohttp.ClientError, TimeoutError, KvlabError, KeyError, TypeError, ValueError):
            self.untokenized += 1
            return None

    async def _tokens_of_upstream(
        self, asked: Mapping[str, Any], prompt: Any, request: web.Request
    ) -> Sequence[int] | None:
        upstream = next((candidate for candidate in self.upstreams if candidate.takes), None)
        if upstream is None:
            return None
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        url = f"{upstream.url}/tokenize"
        async with self._client.post(
            url, json=to_tokenize(asked, prompt), headers=headers, timeout=ANSWER_S
        ) as answer:
            tokens: list[int] = json.loads(await answer.read())["tokens"]
            return tokens


async def _next(answer: aiohttp.ClientResponse) -> bytes | None:
    """The next part of an answer; b"": it has ended; None: it broke off."""
    try:
        return await answer.content.readany()
    except aiohttp.ClientError:
        return None
