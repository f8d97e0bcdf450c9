"""Hears a server's KV events over ZeroMQ, and reads its metrics."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

import msgspec
import zmq

from kvlab.errors import ConfigError
from kvlab.lab.watch.view import ServerPool

_END = (-1).to_bytes(8, "big", signed=True)  # behind the last batch of a replay
_MOST_S = 5.0  # for an answer
_METRIC = re.compile(r"^vllm:(\w+?)(?:\{(.*?)\})? ([-+\d.eE]+|NaN)$", re.MULTILINE)
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What `/metrics` says; None: it does not."""

    running: float | None = None
    waiting: float | None = None
    prompt_tokens: float | None = None  # that were looked up
    hit_tokens: float | None = None
    blocks: int | None = None


def read_metrics(url: str) -> ServerMetrics | None:
    """The metrics of a server; None where it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_MOST_S) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError):
        return None
    found = {name: (labels or "", float(value)) for name, labels, value in _METRIC.findall(text)}

    def value(*names: str) -> float | None:
        return next((found[name][1] for name in names if name in found), None)

    blocks = _BLOCKS.search(found.get("cache_config_info", ("", 0.0))[0])
    return ServerMetrics(
        value("num_requests_running"),
        value("num_requests_waiting"),
        value("prefix_cache_queries_total", "prefix_cache_queries"),
        value("prefix_cache_hits_total", "prefix_cache_hits"),
        int(blocks[1]) if blocks else None,
    )


class EventListener:
    """Subscribes to a server's KV events; with `replay`, asks for those that it missed, and for earlier ones that
    the server still has. Raises ConfigError for an address that is none.
    """

    def __init__(self, pool: ServerPool, events: str, replay: str | None = None) -> None:
        self.pool, self._context = pool, zmq.Context()
        self._context.linger = 0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.rcvhwm = 0
        self._replay: zmq.Socket[bytes] | None = None
        _connect(self._sub, "events", events)
        if replay is not None:
            self._replay = self._context.socket(zmq.DEALER)
            _connect(self._replay, "replay", replay)
            self._ask(0)

    def hear(self, seconds: float) -> None:
        """Take what comes within so long. Raises EventError."""
        if not self._sub.poll(int(1000 * seconds)):
            return
        while self._sub.poll(0):
            *_, number, payload = self._sub.recv_multipart()
            expected, at = self.pool.expected, int.from_bytes(number, "big")
            if expected is not None and at > expected:
                self._ask(expected)
            self.pool.take(at, msgspec.msgpack.decode(payload))

    def close(self) -> None:
        """Hear nothing more."""
        self._context.destroy()

    def _ask(self, first: int) -> None:
        """Take the batches from this number on that the server still has."""
        if self._replay is None:
            return
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        while self._replay.poll(int(1000 * _MOST_S)):
            *_, number, payload = self._replay.recv_multipart()
            if number == _END:
                return
            self.pool.take(int.from_bytes(number, "big"), msgspec.msgpack.decode(payload))


def _connect(socket: zmq.Socket[bytes], key: str, address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        text = f"{zmq.strerror(error.errno or 0)}; write tcp://127.0.0.1:5557"
        raise ConfigError(key, address, text) from error
