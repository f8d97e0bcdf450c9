"""A router that listens to a server's KV events, with structs of the shape that vLLM's have."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec
import zmq

from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import key_of
from kvlab.server.kv_events import block_hash

END = (-1).to_bytes(8, "big", signed=True)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As in vllm/distributed/kv_events.py, like those below."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """Subscribes to events, and asks again for those that it missed."""

    def __init__(self, endpoint: str, replay: str | None) -> None:
        self.known: set[bytes | int] = set()
        self.tokens: dict[bytes | int, list[int]] = {}  # of each block that it ever heard of
        self.heard: Counter[str] = Counter()
        self.numbers: list[int] = []
        self.batches: list[KVEventBatch] = []
        self.topics: set[bytes] = set()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._context.linger = 0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe(b"")
        self._replay = replay

    def close(self) -> None:
        self._context.destroy()

    def listen(self, milliseconds: int = 300) -> None:
        """What comes until it is quiet for so long."""
        while self._sub.poll(milliseconds):
            topic, number, payload = self._sub.recv_multipart()
            self.topics.add(topic)
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        """A batch, after those that were missed before it."""
        next_number = len(self.numbers)
        if number > next_number and self._replay is not None:
            for missed, earlier in self.replayed(next_number):
                if missed == len(self.numbers):
                    self._apply(missed, earlier)
        if number >= len(self.numbers):
            self._apply(number, payload)

    def replayed(self, first: int, seconds: float = 10) -> list[tuple[int, bytes]]:
        """The batches from a number on that the server still has."""
        assert self._replay is not None
        with self._context.socket(zmq.DEALER) as asking:
            asking.connect(self._replay)
            asking.send_multipart((b"", first.to_bytes(8, "big")))
            found: list[tuple[int, bytes]] = []
            latest = time.monotonic() + seconds
            while time.monotonic() < latest:
                if asking.poll(100):
                    _, _, number, payload = asking.recv_multipart()
                    if number == END:
                        return found
                    found.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("the replay has no end")

    def _apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        batch = self._decoder.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            self.heard[type(event).__name__] += 1
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockRemoved):
                self.known.difference_update(event.block_hashes)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, before = event.block_size, event.parent_block_hash
        tokens = [] if before is None else self.tokens[before]
        assert len(event.token_ids) == size * len(event.block_hashes)
        for number, block in enumerate(event.block_hashes):
            tokens = self.tokens[block] = tokens + event.token_ids[number * size : (number + 1) * size]
            self.known.add(block)


def cached_hashes(pool: BlockPool) -> set[bytes | int]:
    """The names of the blocks that a pool's index can find."""
    return {block_hash(key_of(node)) for node in pool.index.nodes() if node.block is not None}
