"""Hears what a server's prefix cache has: its KV events over ZeroMQ, as vLLM 0.32 and kvlab publish them."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import zmq

from kvlab.core import Salt
from kvlab.errors import ConfigError, KvlabError, shown
from kvlab.kv.content_log import Cleared, ContentEvent, Removed, Stored
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.tiers.base import Key, key_behind

Name = int | bytes  # what a server calls a block's content
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size")  # fields of BlockStored, in order
_END = (-1).to_bytes(8, "big", signed=True)  # behind the last batch of a replay
_MOST_S = 5.0  # for an answer


class EventError(KvlabError):
    """A KV event that is not as vLLM's are."""


class EventTaker(Protocol):
    """What is told of the events."""

    @property
    def expected(self) -> int | None:
        """The number of the next batch; None: of any."""

    def take(self, number: int, payload: Sequence[Any]) -> None:
        """Take a batch, whose `number` should be the expected one. Raises EventError."""

    def reconnected(self) -> None:
        """The connection was lost, and is there again: the next batch may be another process's."""


class EventListener:
    """Subscribes to a server's KV events; with `replay`, asks for those that it missed, and for earlier ones that
    the server still has. Raises ConfigError for an address that is none.
    """

    def __init__(self, taker: EventTaker, events: str, replay: str | None = None) -> None:
        self._taker, self._context = taker, zmq.Context()
        self._context.linger = 0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.rcvhwm = 0
        self._replay: zmq.Socket[bytes] | None = None
        self._reached, self._handshakes = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED), 0
        self.unanswered = 0  # times that `replay` was asked, and did not answer in full
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
            self._greet()
            expected, at = self._taker.expected, int.from_bytes(number, "big")
            if expected is not None and at > expected:
                self._ask(expected)
            self._taker.take(at, _decoded(at, payload))

    @property
    def has_reached(self) -> bool:
        """Whether a publisher was there, at any time."""
        self._greet()
        return self._handshakes > 0

    def close(self) -> None:
        """Hear nothing more."""
        self._context.destroy()

    def _greet(self) -> None:
        """Note that a publisher is there; of one that is there again ask for all that it has."""
        while self._reached.poll(0):
            self._reached.recv_multipart()
            self._handshakes += 1
            if self._handshakes > 1:
                self._taker.reconnected()
                self._ask(0)

    def _ask(self, first: int) -> None:
        """Take the batches from this number on that the server still has."""
        if self._replay is None:
            return
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        while self._replay.poll(int(1000 * _MOST_S)):
            *_, number, payload = self._replay.recv_multipart()
            if number == _END:
                return
            at = int.from_bytes(number, "big")
            self._taker.take(at, _decoded(at, payload))
        self.unanswered += 1


class HeardContents:
    """A server's events as those of a ContentLog: contents have the keys that kvlab gives them, by their tokens.

    What was there before anybody listened is not known, nor what stands behind it. Where a batch is missing, and
    where a server begins again, all that was known is gone. `error`: why the last batch that was no use was none.
    """

    def __init__(self, events: str, block_size: int) -> None:
        self.error = ""
        self._contents = _Contents(block_size)
        self._listener = EventListener(self._contents, events)

    def take(self) -> list[ContentEvent]:
        """The events that have come since the last call."""
        try:
            self._listener.hear(0)
        except EventError as error:
            self.error = str(error)
        found, self._contents.events = self._contents.events, []
        return found

    def forget(self) -> None:
        """The server has ended: nothing that was heard of it holds, also what has not been taken."""
        self.take()
        self._contents.clear()

    def close(self) -> None:
        """Hear nothing more."""
        self._listener.close()


class _Contents:
    """What a server has, by its names; an EventTaker."""

    def __init__(self, block_size: int) -> None:
        self.expected: int | None = None
        self._may_be_new = False
        self.events: list[ContentEvent] = []
        self._size = block_size
        self._keys: dict[Name, Key] = {}

    def take(self, number: int, payload: Sequence[Any]) -> None:
        if self.expected not in (None, number) or self._may_be_new:
            self.clear()
        self.expected, self._may_be_new = number + 1, False
        for event in batch_events(number, payload)[1]:
            kind, values = event_fields(event)
            if values.get("group_idx"):  # of the first group of layers alone
                continue
            try:
                if kind == "BlockStored":
                    self._store(values)
                elif kind == "BlockRemoved":
                    gone = [self._keys.pop(name) for name in values["block_hashes"] if name in self._keys]
                    self.events.append(Removed(gone, 0))
                elif kind == "AllBlocksCleared":
                    self.clear()
            except (OverflowError, TypeError) as error:
                raise EventError(f"{shown(event)}: no KV event as vLLM 0.32 has them") from error

    def reconnected(self) -> None:
        self._may_be_new = True

    def clear(self) -> None:
        """Know nothing of it."""
        self._keys.clear()
        self.events = [Cleared()]

    def _store(self, values: Mapping[str, Any]) -> None:
        parent, tokens, size = values["parent_block_hash"], values["token_ids"], values["block_size"]
        if size != self._size:
            raise EventError(f"its blocks have {size} tokens, and by its metrics {self._size}")
        salt = _salt(values["extra_keys"])
        root = key_behind(b"", PrefixIndex.root_tokens(salt)[0])
        before = root if parent is None else self._keys.get(parent)
        if before is None:
            return
        keys = []
        for number, name in enumerate(values["block_hashes"]):
            before = self._keys[name] = key_behind(before, array("q", tokens[number * size :][:size]).tobytes())
            keys.append(before)
        self.events.append(Stored(keys, None, [], 0, salt))


def _salt(extra_keys: Sequence[Any] | None) -> Salt:
    """What the first block has beside its tokens: the salt of a request, or what no other request has."""
    first = extra_keys[0] if extra_keys else None
    if not first:
        return None
    return first[0] if len(first) == 1 and isinstance(first[0], str) else repr(first)


def _connect(socket: zmq.Socket[bytes], key: str, address: str) -> None:
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        text = f"{zmq.strerror(error.errno or 0)}; write tcp://127.0.0.1:5557"
        raise ConfigError(key, address, text) from error


def _decoded(number: int, payload: bytes) -> Sequence[Any]:
    try:
        batch: Sequence[Any] = msgspec.msgpack.decode(payload)
    except msgspec.MsgspecError as error:
        raise EventError(f"batch {number}: {shown(error)}: no KV events as vLLM 0.32 has them") from error
    return batch


def batch_events(number: int, payload: Sequence[Any]) -> tuple[float, Sequence[Any]]:
    """When a batch was made, in seconds since 1970, and its events. Raises EventError."""
    try:
        return float(payload[0]), payload[1]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EventError(f"batch {number}: {shown(payload)}: no KV events as vLLM 0.32 has them") from error


def event_fields(event: Any) -> tuple[str, dict[str, Any]]:
    """An event's kind and fields: a mapping with its type, or its type and fields in order. Raises EventError."""
    try:
        if isinstance(event, Mapping):
            kind, values = event["type"], dict(event)
        else:
            kind, values = event[0], dict(zip(_STORED, event[1:], strict=False))
        if kind == "BlockStored":
            others = {name: values.get(name) for name in ("group_idx", "extra_keys")}
            values = {name: values[name] for name in _STORED} | others
        elif kind == "BlockRemoved":
            values = {"block_hashes": values["block_hashes"], "group_idx": values.get("group_idx")}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EventError(f"{shown(event)}: no KV event as vLLM 0.32 has them") from error
    return kind, values
