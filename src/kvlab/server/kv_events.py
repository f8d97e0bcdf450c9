"""What a pool's prefix cache holds, told to routers over ZeroMQ as vLLM tells it (vllm/distributed/kv_events.py).

A message is three frames: the topic, the batch's number as 8 bytes, big endian, and a batch of events in
MessagePack. Whoever misses numbers sends the first of them to the replay socket, and gets the batches from there on
as far as they are kept, then one of number -1.
"""

import queue
import time
from array import array
from collections import deque
from threading import Event, Thread
from typing import Any

import msgspec
import zmq

from kvlab.errors import ConfigError
from kvlab.kv.content_log import Cleared, ContentEvent, ContentLog, Removed
from kvlab.kv.tiers.base import Key

_MEDIUM = "GPU"  # what vLLM calls the pool that its steps read
_MOST_WAITING = 10_000  # batches between the engine and the thread that sends
_MOST_REPLAYED = 10_000  # batches that are kept, as vLLM's buffer_steps
_MOST_UNSENT = 100_000  # messages for a subscriber that reads too slowly, as vLLM's hwm
_LOOK_S = 0.05  # between two looks for requests of replay
_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks behind each other that can be found."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The prefix cache is empty."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one step."""

    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Sends the events of a `log`, a batch for each `flush` that has any, from a thread of its own.

    The engine never waits for it. A batch that finds the queue full is dropped, which its missing number shows.
    Raises ConfigError for an address that cannot be had.
    """

    def __init__(
        self, log: ContentLog, block_size: int, endpoint: str, replay: str | None = None, topic: str = ""
    ) -> None:
        self.dropped = self.published = 0  # batches
        self._log, self._block_size, self._topic = log, block_size, topic.encode()
        self._number = 0
        self._waiting: queue.Queue[tuple[int, float, list[ContentEvent]]] = queue.Queue(_MOST_WAITING)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_MOST_REPLAYED)
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = Event()
        self._context = zmq.Context()
        self._context.linger = 0
        self._pub = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        try:
            self._pub.sndhwm = _MOST_UNSENT
            self.endpoint = _open(self._pub, "server.kv_events", endpoint)
            if replay is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.sndhwm = _MOST_REPLAYED + 1  # a whole replay: it drops what is more
                self.replay_endpoint = _open(self._router, "server.kv_events_replay", replay)
        except ConfigError:
            self._context.destroy()
            raise
        self._thread = Thread(target=self._send_all, name="kvlab-kv-events", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Hand over the events since the last call. Called by the thread that steps."""
        if not (events := self._log.take()):
            return
        number, self._number = self._number, self._number + 1
        try:
            self._waiting.put_nowait((number, time.time(), events))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        self._closing.set()
        self._thread.join(5)
        self._context.destroy()

    def _send_all(self) -> None:
        while True:
            if self._router is not None and self._router.poll(0):
                self._replay(self._router)
            try:
                number, when, events = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            batch = KVEventBatch(when, [_event(event, self._block_size) for event in events], 0)
            frames = number.to_bytes(8, "big"), self._encoder.encode(batch)
            self._pub.send_multipart((self._topic, *frames))
            self._kept.append(frames)
            self.published += 1

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request, [client, b"", first number]. Another one is nobody's mistake but the client's."""
        client, *rest = router.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            return
        for number, payload in self._kept:
            if number >= rest[1]:  # of 8 bytes each, big endian: in the order of the numbers
                router.send_multipart((client, b"", self._topic, number, payload))
        router.send_multipart((client, b"", b"", _END, b""))


def _open(socket: zmq.Socket[bytes], key: str, endpoint: str) -> str:
    """Listen at an address of this machine, connect to another's, as vLLM does; a replay is asked for here alone.
    Returns the address, with the port that was free for port 0.
    """
    try:
        if socket.type == zmq.PUB and not _is_here(endpoint):
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        advice = "write tcp://127.0.0.1:5557, tcp://*:5557, or another machine's address"
        raise ConfigError(key, endpoint, f"{zmq.strerror(error.errno or 0)}; {advice}") from error


def _is_here(endpoint: str) -> bool:
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    return scheme != "tcp" or host in ("*", "0.0.0.0", "::", "::1", "localhost") or host.startswith("127.")


def _event(event: ContentEvent, block_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, Cleared):
        return AllBlocksCleared()
    hashes = list(map(block_hash, event.keys))
    if isinstance(event, Removed):
        return BlockRemoved(hashes, _MEDIUM, group_idx=event.group)
    salted = [None] * (len(event.keys) - 1)
    return BlockStored(
        hashes,
        None if event.parent is None else block_hash(event.parent),
        array("q", b"".join(node.tokens for node in event.nodes)).tolist(),
        block_size,
        lora_id=None,
        medium=_MEDIUM,
        lora_name=None,
        extra_keys=None if event.salt is None else [(event.salt,), *salted],
        group_idx=event.group,
    )


def block_hash(key: Key) -> int:
    """A content's name in events: 64 bits of its key, which depends on its tokens, all before them and the salt."""
    return int.from_bytes(key[:8])
