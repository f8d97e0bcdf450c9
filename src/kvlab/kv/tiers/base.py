"""What a tier is made of: keys of contents, a store for their pages, and the link that they come and go by.

A page is what a pool's block holds, K and V of all its layers in one piece of memory: a row of uint8. Its key names
the content whatever process computed it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlab.kv.prefix import Prefix

KEY_BYTES = 32
Key = bytes  # KEY_BYTES long
Page = NDArray[np.uint8]  # [page_bytes]


def key_behind(parent: Key, tokens: bytes) -> Key:
    """The key of a block's tokens, packed, behind the content of key `parent`; of a root, its salt behind b"".

    BLAKE2b (RFC 7693): two contents of one key cannot be made, so that a key stands for all its tokens
    and its salt.
    """
    return blake2b(tokens, digest_size=KEY_BYTES, key=parent).digest()


def keys_behind(root: Iterable[bytes], parts: Iterable[bytes]) -> list[Key]:
    """The keys of these blocks of tokens behind a root, given what its nodes have for tokens."""
    keys, key = list[Key](), b""
    for tokens in root:
        key = key_behind(key, tokens)
    for tokens in parts:
        key = key_behind(key, tokens)
        keys.append(key)
    return keys


def key_of(node: Prefix) -> Key:
    """The key of a node's content, which the node keeps, as do all before it."""
    path: list[Prefix] = []
    at: Prefix | None = node
    while at is not None and not hasattr(at, "key"):
        path.append(at)
        at = at.parent
    key = b"" if at is None else at.key
    for content in reversed(path):
        key = content.key = key_behind(key, content.tokens)
    return key


class PageStore(Protocol):
    """Where a tier's pages are. The tier decides what is in it and in which of its places, from 0 on; a store only
    keeps bytes. It may be called by two threads at once, never for one place. Whatever it raises of OSError or
    TierError loses the page in question and nothing else: a page that cannot be read is a miss.
    """

    def kept(self) -> Iterable[Key]:
        """What it holds from an earlier process, least recently used first, in places 0, 1, ... in this order."""

    def write(self, place: int, key: Key, page: Page) -> None:
        """Keep a page at a place, over what was there. The page is the caller's again when this returns."""

    def read(self, place: int, key: Key, page: Page) -> None:
        """Fill `page` with what was written for this key at this place. Raises TierError unless it is that."""

    def remove(self, place: int, key: Key) -> None:
        """The page at a place is not wanted any more."""

    def close(self) -> None:
        """Give back what the store holds, but for what is to outlive the process."""


class Link(Protocol):
    """How long a modelled copy takes. Each direction of a tier has a link of its own."""

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        """When so many bytes, which can leave at `ready_s`, have arrived, in seconds on the engine's clock. Later
        transfers queue behind this one.
        """

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes take with nothing before them."""


@dataclass(slots=True)
class SimulatedLink(Link):
    """One direction of a link of `bytes_per_s`: what is sent waits for what was sent before, and is there
    `latency_s` after its last byte has left. Latencies overlap with other transfers, as with commands in a queue.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    free_s: float = 0.0  # when it has sent all that it was given

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"a link of {self.bytes_per_s} bytes per second and {self.latency_s} s of latency")

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        self.free_s = max(ready_s, self.free_s) + num_bytes / self.bytes_per_s
        return self.free_s + self.latency_s

    def seconds(self, num_bytes: int) -> float:
        return num_bytes / self.bytes_per_s + self.latency_s
