"""A tier's ledger: which contents it holds, in which places, and which of them go first."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.kv.eviction import EvictionPolicy
from kvlab.kv.prefix import Prefix
from kvlab.kv.tiers.base import Key, Link, PageStore


@dataclass(slots=True)
class TierCounts:
    """What went through a tier since the start. Seconds are those that copies took, or would take by a link."""

    stored: int = 0  # pages
    stored_s: float = 0.0
    loaded: int = 0  # pages
    loaded_s: float = 0.0
    hits: int = 0  # pages that sequences hit; several may wait for one load
    failed: int = 0  # pages that could not be read again, or not be written


class Tier:
    """Contents by key, each in a place from 0 to `capacity` - 1, of which one is `page_bytes` long.

    What is held (`hold`) stays; of all else the eviction policy's first goes when a new one comes. There are no
    bytes here: they are in the `store`, or nowhere in a simulated engine, where copies take the time of the links
    `down` and `up`.
    """

    is_counted = True  # whether it stores contents: pools report it, and what is swapped out stays there

    def __init__(
        self,
        name: str,
        capacity: int,
        page_bytes: int,
        policy: EvictionPolicy,
        store: PageStore | None = None,
        *,
        down: Link | None = None,
        up: Link | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.store = store
        self.down, self.up = down, up
        self.counts = TierCounts()
        self._policy = policy  # over the places that nobody holds
        self._places: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._holds: dict[int, int] = {}  # by place
        self._unused: list[int] = []  # places that were given back
        self._first_untouched = 0  # those from here on were never taken: a large store has millions
        for key in store.kept() if store is not None else ():
            self.add(key)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def place(self, key: Key) -> int:
        """Where a content is that the tier holds."""
        return self._places[key]

    def bytes_of(self, keys: Iterable[Key]) -> int:
        """Bytes of these contents."""
        return self.page_bytes * sum(1 for _ in keys)

    def wanted(self, keys: Sequence[Key], before: int, *, again: bool = False) -> int:
        """How many of these contents, which it has and which lie behind so many blocks, are worth a load. `again`:
        others of the same prompt, which lie before, are.
        """
        return len(keys)

    def is_worth(self, keys: Sequence[Key], before: int, blocks: int) -> bool:
        """Whether a load of these contents, which it has, is worth what it spares of a prompt: so many blocks
        behind `before` others. Asked where layers have windows, whose contents are loaded all or not at all.
        """
        return True

    def add(self, key: Key) -> tuple[int, Key | None] | None:
        """Take in a content that is not here: its place, and the content that went for it, whose page is still
        there. None: everything is held.
        """
        gone = None
        if self._unused:
            place = self._unused.pop()
        elif self._first_untouched < self.capacity:
            place = self._first_untouched
            self._first_untouched += 1
        elif len(self._policy):
            place = self._policy.victim()
            gone = self._forget(place)
        else:
            return None
        self._places[key] = place
        self._keys[place] = key
        self._policy.filled({place: Prefix(None, key, place)})
        self._policy.add(place)
        return place, gone

    def drop(self, key: Key) -> None:
        """A content is lost, held or not."""
        place = self._places[key]
        if not self._holds.pop(place, 0):
            self._policy.remove(place)
        self._forget(place)
        self._unused.append(place)

    def hold(self, key: Key) -> int:
        """A content was hit, and stays until it is released as often as it was held; returns its place."""
        place = self._places[key]
        if place not in self._holds:
            self._policy.remove(place)
        self._holds[place] = self._holds.get(place, 0) + 1
        self._policy.used([place])
        return place

    def release(self, key: Key) -> None:
        """A content that was held may go once nobody holds it. One that was dropped meanwhile has gone."""
        place = self._places.get(key)
        if place is None or place not in self._holds:
            return
        self._holds[place] -= 1
        if not self._holds[place]:
            del self._holds[place]
            self._policy.add(place)

    def refresh(self, key: Key) -> None:
        """A content was given to the tier that it holds already: it is as young as a new one."""
        place = self._places[key]
        if place not in self._holds:
            self._policy.remove(place)
            self._policy.add(place)

    def held(self) -> dict[Key, int]:
        """The contents that are held, and how often."""
        return {self._keys[place]: count for place, count in self._holds.items()}

    def broken(self) -> Iterator[str]:
        """What does not agree, for the audit."""
        places = set(self._places.values())
        if {key: place for place, key in self._keys.items()} != self._places or len(places) < len(self._places):
            yield "a content in two places, or two contents in one"
        taken = self._first_untouched
        if sorted([*places, *self._unused]) != list(range(taken)) or taken > self.capacity:
            yield f"{len(places)} places used and {len(self._unused)} given back, of {taken} that were taken"
        waiting = list(self._policy.blocks())
        if len(waiting) != len(set(waiting)) or set(waiting) != places - self._holds.keys():
            yield "its eviction has other places than those that hold a content and are not held"
        if not self._holds.keys() <= places or min(self._holds.values(), default=1) < 1:
            yield "a place is held that has no content, or less than once"

    def _forget(self, place: int) -> Key:
        key = self._keys.pop(place)
        del self._places[key]
        self._policy.forget([place])
        return key
