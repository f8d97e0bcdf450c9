"""What a router knows of the replicas' prefix caches, and when it learns it."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol, Self, overload

import numpy as np

from kvlab.core import Request, Salt
from kvlab.fleet.base import RoutedRequest, Router
from kvlab.fleet.memories import Memories
from kvlab.hashed_prompt import HashedPrompt
from kvlab.kv.content_log import Cleared, ContentEvent, ContentLog, Stored
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.tiers.base import Key, key_behind
from kvlab.splitmix import STEP, mix

TOKEN_BYTES = 8


class KeyedPrompt:
    """A prompt with the keys of its blocks, under a `salt`. `pack` gives its tokens, of `token_bytes` each."""

    def __init__(self, pack: Callable[[], bytes], salt: Salt, token_bytes: int = TOKEN_BYTES) -> None:
        self._pack, self._salt, self._token_bytes = pack, salt, token_bytes
        self._keys: dict[tuple[int, int, int], BlockKeys] = {}

    def keys(self, block_size: int, most: int = 2**31, group: int = 0) -> Sequence[Key]:
        """See RoutedRequest: the keys that a pool's contents have, those of a group of layers."""
        found = self._keys.get((block_size, most, group))
        if found is None:
            found = BlockKeys(self._pack(), block_size * self._token_bytes, self._salt, most, group)
            self._keys[block_size, most, group] = found
        return found


class RoutedPrompt(KeyedPrompt):
    """A request as routers see it."""

    def __init__(self, request: Request, session: str) -> None:
        self.request_id, self.session = request.request_id, session
        self.prompt_tokens = len(prompt := request.prompt_token_ids)
        self.output_tokens = request.sampling.max_tokens

        def pack() -> bytes:
            return (prompt.to_array() if isinstance(prompt, HashedPrompt) else array("q", prompt)).tobytes()

        super().__init__(pack, request.salt)


class BlockKeys(Sequence[Key]):
    """The keys of a prompt's first `most` whole blocks of `size` bytes. If its tokens have `TOKEN_BYTES` each, a
    pool's contents have the same keys in that group of layers.

    A key is made when it is first read: a search for the longest known prefix reads no further than that.
    """

    def __init__(self, packed: bytes, size: int, salt: Salt, most: int, group: int = 0) -> None:
        self._packed, self._size = packed, size
        self._count = min(len(packed) // size, most)
        self._made: list[Key] = []
        self._last: Key = b""
        for root in PrefixIndex.root_tokens(salt, group):
            self._last = key_behind(self._last, root)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        for place in range(self._count):
            if place == len(self._made):
                self._make(place + 1)
            yield self._made[place]

    @overload
    def __getitem__(self, index: int) -> Key: ...

    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...

    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        if isinstance(index, slice):
            self._make(self._count)
            return self._made[index]
        place = range(self._count)[index]  # of one counted from the end, too: those behind it may not be made
        self._make(place + 1)
        return self._made[place]

    def _make(self, count: int) -> None:
        """Make the first `count`, as far as they are not there."""
        key, size = self._last, self._size
        for start in range(len(self._made) * size, count * size, size):
            key = key_behind(key, self._packed[start : start + size])
            self._made.append(key)
        self._last = key
        if len(self._made) == self._count:
            self._packed = b""  # which nothing reads any more


class PrefixView:
    """What is known of one replica's prefix cache: nothing, unless a subclass says otherwise."""

    @property
    def remembered(self) -> int:
        """How many blocks are known to be there."""
        return 0

    def cached_tokens(self, request: RoutedRequest, now: float) -> int:
        """Tokens of the prompt's longest prefix that is known to be there."""
        return 0

    def sent(self, request: RoutedRequest) -> None:
        """A request was sent to the replica."""

    def restarted(self) -> None:
        """The replica has lost all that it had."""

    def stepped(self, ends_s: Sequence[float]) -> None:
        """The replica has taken steps that end then."""


class SentPrefixes(PrefixView):
    """What the router itself has sent, in blocks of its own size; the least recently sent are forgotten first. The
    replica may have evicted them since, or never have kept them. With all replicas' `memories`, blocks count
    also behind one that was forgotten here, if another has it.
    """

    def __init__(self, block_size: int, capacity: int, most: int, memories: Memories | None = None) -> None:
        self._size, self._capacity, self._most = block_size, capacity, most
        self._memories = memories
        self._sent: OrderedDict[Key, None] = OrderedDict()

    @classmethod
    def of(cls, router: Router) -> Self:
        """What a router remembers of one replica: as much as its settings say, or its class."""
        block_size, capacity, most = router.memory
        memories = None if router.keeps_heads else router.memories
        return cls(block_size, router.config.memory_blocks or capacity, most, memories)

    @property
    def remembered(self) -> int:
        return len(self._sent)

    def cached_tokens(self, request: RoutedRequest, now: float) -> int:
        keys = request.keys(self._size, self._most)
        count = _leading(keys, self._sent) if self._memories is None else self._memories.count(self, keys)
        return self._size * count

    def sent(self, request: RoutedRequest) -> None:
        keys = request.keys(self._size, self._most)
        for key in keys[::-1] if self._memories is None else keys[:]:  # what comes first is older, and goes first
            if self._memories is not None and key not in self._sent:
                self._memories.add(self, key)
            self._sent[key] = None
            self._sent.move_to_end(key)
        while len(self._sent) > self._capacity:
            self._forget(self._sent.popitem(last=False)[0])

    def restarted(self) -> None:
        while self._sent:
            self._forget(self._sent.popitem()[0])

    def _forget(self, key: Key) -> None:
        if self._memories is not None:
            self._memories.remove(self, key)


class EventSource(Protocol):
    """Where events of a pool come from: its ContentLog, or a server's own."""

    def take(self) -> list[ContentEvent]:
        """The events since the last call, in order."""


class HeldPrefixes(PrefixView):
    """What the replica holds, by the events of its pool's `log`. Those of a step are known `delay_s` after its end;
    0: as soon as the step is taken. The share `lost` of the batches of events never comes.
    """

    def __init__(
        self, log: EventSource, block_size: int, *, delay_s: float = 0.0, lost: float = 0.0, seed: int = 0
    ):
        self._log, self._size, self._delay_s = log, block_size, delay_s
        self._lost, self._seed, self._batches = lost, seed, 0
        self._held: set[Key] = set()
        self._coming: deque[tuple[float, list[ContentEvent]]] = deque()  # when each batch is known
        self._ended_s = 0.0  # when the last step that was taken ends

    @property
    def remembered(self) -> int:
        return len(self._held)

    def cached_tokens(self, request: RoutedRequest, now: float) -> int:
        if not self._delay_s:
            self._apply(self._log.take())
        self._learn(now)
        return self._size * _leading(request.keys(self._size), self._held)

    def stepped(self, ends_s: Sequence[float]) -> None:
        if not isinstance(self._log, ContentLog):  # a server does not say which step it was
            return
        if not self._delay_s:
            self._apply(self._log.take())  # which else pile up behind a router that never asks
            return
        for end_s, events in zip(ends_s, self._log.take_by_step(), strict=True):
            self._learn(self._ended_s)  # nobody asks for an earlier time any more: this step has begun
            self._ended_s = end_s
            self._batches += bool(events)
            if events and not self._is_lost():
                self._coming.append((end_s + self._delay_s, events))

    def _learn(self, now: float) -> None:
        """Apply the batches that are known by now."""
        while self._coming and self._coming[0][0] <= now:
            self._apply(self._coming.popleft()[1])

    def _is_lost(self) -> bool:
        """Whether the latest batch is one of those that are lost, drawn by its number."""
        if not self._lost:
            return False
        word = mix(np.array([self._seed + self._batches], dtype=np.uint64) * STEP)
        return int(word[0]) < self._lost * 2**64

    def _apply(self, events: Iterable[ContentEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self._held.clear()
            elif event.group:  # of the layers of the first group: those of windows keep less
                continue
            elif isinstance(event, Stored):
                self._held.update(event.keys)
            else:
                self._held.difference_update(event.keys)


def _leading(keys: Sequence[Key], held: Container[Key]) -> int:
    """How many keys from the first on are held."""
    for place, key in enumerate(keys):
        if key not in held:
            return place
    return len(keys)
