"""Knows the proxy's upstreams: which are up, what they serve, and what a router may see of them."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvlab.config.fleet import FleetConfig
from kvlab.errors import ConfigError, KvlabError, shown
from kvlab.extras import need_events
from kvlab.fleet.base import Router
from kvlab.fleet.prefixes import HeldPrefixes, SentPrefixes
from kvlab.fleet.routers import ROUTERS
from kvlab.peers.prometheus import block_tokens, kept_lines, read_series
from kvlab.plugins import reason_of
from kvlab.server.passing import client_session, unreached
from kvlab.server.routed_call import RoutedCall
from kvlab.server.upstreams import BLOCK_TOKENS, UnseenError, Upstream

ANSWER_S = aiohttp.ClientTimeout(total=5)  # of what is asked beside requests
CONNECT_S = 2.0
_PROBE = RoutedCall({"prompt": "Is it there?"})


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """What a proxy stands before, and how it chooses."""

    upstreams: Sequence[str]
    fleet: FleetConfig = field(default_factory=FleetConfig)
    events: Sequence[str] = ()  # where each publishes its KV events
    tokenizer: str | None = None  # a folder, `upstream`, or None: bytes of text stand for tokens
    api_key: str | None = None  # of the upstreams, for what is asked beside requests
    record: str | None = None  # a file for the decisions
    health_s: float = 1.0
    seed: int = 0

    def router(self) -> Router:
        """A router that has chosen nothing yet."""
        return ROUTERS.get(self.fleet.router)(self.fleet, self.seed)


class _Down(KvlabError):
    """A server does not answer as it should."""


class _Silent(_Down):
    """It does not answer at all."""


class Lookout:
    """Keeps views of the upstreams. Raises ConfigError for a view that no proxy has."""

    def __init__(self, settings: RouteSettings) -> None:
        self._settings, self._router = settings, settings.router()
        self._key = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        config = settings.fleet
        self.upstreams = [Upstream(index, url) for index, url in enumerate(settings.upstreams)]
        self.prefixes, self._is_polled = config.fed_by("prefixes"), config.fed_by("load") == "polled"
        if config.load == "exact" or self.prefixes == "exact":
            text = "with an exact view sees what no proxy can; there are load=polled, prefixes=events and memory"
            raise ConfigError("fleet.router", config.router, text)
        has_events = len(settings.events) == len(settings.upstreams) and settings.tokenizer is not None
        if self.prefixes == "events" and not has_events:
            text = "needs events=[tcp://...], one for each of upstreams, and tokenizer=, as events are of tokens"
            raise ConfigError("fleet.router", config.router, f"{text}; fleet.prefixes=memory does without")
        if self.prefixes == "events":
            need_events("events", ",".join(settings.events))
        elif settings.events:
            text = f"are not read by fleet.router={config.router} with fleet.prefixes={self.prefixes}"
            raise ConfigError("events", ",".join(settings.events), text)

    async def start(self) -> None:
        """Look at all. Raises ConfigError where none is up, where they serve different models, and for a router
        that asks for what is not known of one.
        """
        async with client_session(CONNECT_S) as self._client:
            for upstream in self.upstreams:
                with suppress(_Down):
                    await self._come_up(upstream)
        if all(upstream.reason for upstream in self.upstreams):
            text = "; ".join(f"{each.url}: {each.reason}" for each in self.upstreams)
            raise ConfigError("upstreams", ",".join(self._settings.upstreams), f"none is up: {text}")

    def tasks(self, client: aiohttp.ClientSession) -> list[Coroutine[Any, Any, None]]:
        """What has to run while the proxy does."""
        self._client = client
        polls = [self._poll(upstream) for upstream in self.upstreams if self._is_polled]
        return [*polls, *map(self._watch, self.upstreams)]

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._settings.health_s)
            was_up = not upstream.reason
            try:
                await self._come_up(upstream)
            except _Silent:
                # Twice in turn: it hangs, or its machine is gone, and its requests would wait for ever.
                if not was_up and any(other.takes for other in self.upstreams):
                    upstream.give_up()
            except KvlabError:
                pass  # it is why this one is left out

    async def _poll(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self._settings.fleet.load_s)
            if not upstream.reason:
                with suppress(_Down):  # whether it is up, its health tells
                    await self._read_metrics(upstream)

    async def _come_up(self, upstream: Upstream) -> None:
        """Ask for its health, and of one that was not up for all that has to be known."""
        try:
            if (status := (await self._get(upstream, "/health"))[0]) >= 500:
                raise _Down(f"its /health says {status}")
            if upstream.reason:
                await self._compare_models(upstream)
                await self._read_metrics(upstream)
                if upstream.heard is None:  # else its events tell whether it began again, with an empty cache
                    self._forget(upstream)
                self._try_out(upstream)
                upstream.reason = ""
            upstream.prefixes.cached_tokens(_PROBE, 0.0)  # takes its events, which pile up while nobody asks
        except KvlabError as error:
            upstream.leave_out(str(error), error.__cause__)
            raise

    async def _get(self, upstream: Upstream, path: str) -> tuple[int, bytes]:
        try:
            async with self._client.get(upstream.url + path, headers=self._key, timeout=ANSWER_S) as answer:
                return answer.status, await answer.read()
        except TimeoutError as error:
            raise _Silent(f"it does not answer {path} within {ANSWER_S.total:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise _Silent(unreached(error)) from error

    async def _compare_models(self, upstream: Upstream) -> None:
        status, page = await self._get(upstream, "/v1/models")
        upstream.models = None
        if status != 200:
            return  # it does not tell
        try:
            models = sorted((str(card["id"]), card.get("max_model_len")) for card in json.loads(page)["data"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _Down(f"its /v1/models: {shown(error)}") from error
        for other in self.upstreams:
            if not other.reason and other.models is not None and other.models != models:
                theirs = f"{other.url} {_named(other.models)}"
                text = f"serves {_named(models)}, and {theirs}; one router is for equal models"
                raise ConfigError("upstreams", upstream.url, text)
        upstream.models = models

    async def _read_metrics(self, upstream: Upstream) -> None:
        sent = upstream.sent
        status, page = await self._get(upstream, "/metrics")
        if self._is_polled and status != 200:
            router = self._settings.fleet.router
            key = "; name its key: api_key='${oc.env:NAME}'" if status in (401, 403) else ""
            raise _Down(f"its /metrics, which fleet.router={router} reads, says {status}{key}")
        lines = kept_lines(page) if status == 200 else b""
        upstream.block_size = block_tokens(lines) or BLOCK_TOKENS
        if self._is_polled:
            told = read_series([(0.0, lines)]).columns
            upstream.told = {name: float(told[name][0]) for name in told} | {"sent": sent}

    def _forget(self, upstream: Upstream) -> None:
        """Know nothing of its prefix cache, from now on as the router's view says."""
        if self.prefixes == "events":
            from kvlab.peers.kv_events import HeardContents

            size = upstream.block_size
            upstream.heard = HeardContents(self._settings.events[upstream.index], size)
            upstream.prefixes = HeldPrefixes(upstream.heard, size)
        elif self.prefixes == "memory":
            upstream.prefixes.restarted()
            upstream.prefixes = SentPrefixes.of(self._router)

    def _try_out(self, upstream: Upstream) -> None:
        """Raise ConfigError where the router does not choose this one alone, as it asks for what is not known."""
        router, name = self._settings.router(), self._settings.fleet.router
        try:
            choice = router.choose(_PROBE, [upstream], 0.0)
        except UnseenError as error:
            text = f"asks for what is not known behind a proxy: {error}"
            raise ConfigError("fleet.router", name, text) from error
        except KvlabError:
            raise
        except Exception as error:  # of a plugin's router
            raise ConfigError("fleet.router", name, reason_of(error)) from error
        router.checked(choice, _PROBE, [upstream.index])


def _named(models: Sequence[tuple[str, Any]]) -> str:
    """Models, and the longest sequences that they take."""
    return ", ".join(f"{name} ({length} tokens)" if length else name for name, length in models) or "no model"
