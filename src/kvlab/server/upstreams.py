"""A server behind the proxy: what is known of it, and what it was sent."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from kvlab.errors import KvlabError
from kvlab.fleet.base import ReplicaView, RoutedRequest
from kvlab.fleet.prefixes import PrefixView

if TYPE_CHECKING:
    from kvlab.peers.kv_events import HeardContents

BLOCK_TOKENS = 16  # of a server that does not tell


class UnseenError(KvlabError):
    """A router asks for what a proxy does not know."""


@dataclass(slots=True)
class Sent:
    """A request that was sent and has not ended."""

    prefill_tokens: int  # believed to be computed before the first byte
    blocks: int
    waits: asyncio.Timeout | None = None  # while no byte has come


class Upstream(ReplicaView):
    """A server, and what a router may believe of it. What its metrics told last is in `told`, and how many requests
    had been `sent` then; without polling nothing is.
    """

    index: int = 0
    block_size: int = BLOCK_TOKENS

    def __init__(self, index: int, url: str) -> None:
        self.index, self.url = index, url
        self.reason = "not asked yet"  # why it is left out; "": it is up
        self.models: Sequence[tuple[str, Any]] | None = None  # with the longest sequences; None: it does not tell
        self.draining = False
        self.prefixes = PrefixView()
        self.heard: HeardContents | None = None  # what tells these, if KV events do
        self.told: Mapping[str, float] = {}
        self.sent = self.retried = self.broken = 0  # requests: broken after their first byte
        self._open: dict[int, Sent] = {}
        self._asked: tuple[RoutedRequest | None, int] = (None, 0)

    def leave_out(self, reason: str, cause: BaseException | None) -> None:
        """Give it nothing until it is up. Where nobody listens any more its cache is gone."""
        self.reason = reason
        refused = isinstance(cause, aiohttp.ClientConnectorError) and isinstance(
            cause.os_error, ConnectionRefusedError
        )
        if refused and self.heard is not None:
            self.heard.forget()

    @property
    def up(self) -> bool:
        """Whether it answers as it should."""
        return not self.reason

    @property
    def takes(self) -> bool:
        """Whether it gets requests."""
        return self.up and not self.draining

    def about(self) -> dict[str, Any]:
        """What is said of it at /health."""
        found = {"url": self.url, "up": self.up, "draining": self.draining, "in_flight": self.in_flight}
        why = {"reason": self.reason, "events": self.heard.error if self.heard is not None else ""}
        return found | {name: text for name, text in why.items() if text}

    @contextmanager
    def serving(self, call: RoutedRequest | None) -> Iterator[Sent]:
        """A request is there while the block lasts; None: one that has no prompt."""
        tokens = call.prompt_tokens if call else 0
        cached = self.cached_tokens(call) if call else 0
        sent = self._open[self.sent] = Sent(max(tokens - cached, 0), -(-tokens // self.block_size))
        number, self.sent = self.sent, self.sent + 1
        if call is not None:
            self.prefixes.sent(call)
        try:
            yield sent
        finally:
            del self._open[number]

    def give_up(self) -> None:
        """Have the requests of which no byte has come sent to other servers."""
        now = asyncio.get_running_loop().time()
        for sent in self._open.values():
            if sent.waits is not None:
                sent.waits.reschedule(now)
                sent.waits = None

    @property
    def in_flight(self) -> int:
        return len(self._open)

    @property
    def running(self) -> int:
        return int(self._metric("running"))

    @property
    def waiting(self) -> int:
        return int(self._metric("waiting"))

    @property
    def kv_usage(self) -> float:
        return self._metric("kv_usage")

    @property
    def sent_since(self) -> int:
        return self.sent - int(self._metric("sent"))

    @property
    def prefill_tokens(self) -> int:
        return sum(each.prefill_tokens for each in self._open.values())

    @property
    def work_tokens(self) -> int:
        raise UnseenError("work_tokens: how long outputs will be is known to no server")

    @property
    def blocks_in_use(self) -> int:
        return sum(each.blocks for each in self._open.values())

    @property
    def remembered(self) -> int:
        return self.prefixes.remembered

    def cached_tokens(self, request: RoutedRequest) -> int:
        if self._asked[0] is not request:  # one answer for one request, whatever is heard meanwhile
            self._asked = request, self.prefixes.cached_tokens(request, 0.0)
        return self._asked[1]

    def _metric(self, name: str) -> float:
        if name not in self.told:
            raise UnseenError(
                f"{name}: {self.url}/metrics is not asked, or does not tell it; see fleet.load=polled"
            )
        return self.told[name]


def families(upstreams: Sequence[Upstream]) -> Iterator[Metric]:
    """The proxy's metrics, of each server."""
    rows = (
        ("up", "up", "1: it gets requests, unless it is draining.", GaugeMetricFamily),
        ("draining", "draining", "1: it gets no new requests.", GaugeMetricFamily),
        ("in_flight", "in_flight", "Requests there that have not ended.", GaugeMetricFamily),
        ("requests", "sent", "Requests that were sent there.", CounterMetricFamily),
        ("retries", "retried", "Of them, those of which no byte came back.", CounterMetricFamily),
        ("broken", "broken", "Of them, those that broke off behind that.", CounterMetricFamily),
    )
    for name, attribute, text, kind in rows:
        family: GaugeMetricFamily | CounterMetricFamily = kind(f"kvlab:route_{name}", text, labels=["upstream"])
        for each in upstreams:
            family.add_metric([each.url], float(getattr(each, attribute)))
        yield family
