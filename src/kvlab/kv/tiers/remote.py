"""What other pools hold for this one: a tier that stores nothing, from which a prompt's blocks are pulled."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.tiers.base import Key, Link
from kvlab.kv.tiers.tier import Tier


class ElsewhereTier(Tier):
    """A tier that stores nothing itself."""

    is_counted = False

    def __init__(self, name: str, page_bytes: int, *, down: Link | None = None, up: Link) -> None:
        super().__init__(name, 0, page_bytes, EVICTION_POLICIES.get("lru")(), down=down, up=up)

    def add(self, key: Key) -> tuple[int, Key | None] | None:
        """Nothing is stored here."""
        return None

    def drop(self, key: Key) -> None:
        """Nothing is lost here."""

    def refresh(self, key: Key) -> None:
        """Nothing ages here."""


class Offered(NamedTuple):
    """A content that can be pulled: which tokens of its sequence end with it, and its bytes."""

    tokens: int
    num_bytes: int


class RemoteTier(ElsewhereTier):
    """Contents that are offered to a pool under a name, each offer until it is withdrawn. When the content at an
    offer's end has come, `pulled` is called with its name: whoever holds the contents may let them go.
    """

    def __init__(self, page_bytes: int, link: Link, pulled: Callable[[str], None]) -> None:
        super().__init__("remote", page_bytes, up=link)
        self.source = ""  # the offer whose contents were held last: what is loaded next
        self._pulled = pulled
        self.offered: dict[Key, Offered] = {}
        self._offers: dict[str, Sequence[Key]] = {}
        self._names: dict[Key, list[str]] = {}  # the offers of a content
        self._pulls: dict[Key, list[str]] = {}  # the offers that a held content is taken from, one for each hold

    def offer(self, name: str, contents: Mapping[Key, Offered]) -> None:
        """These contents can be pulled: a group's of layers behind another's, each in order."""
        self._offers[name] = list(contents)
        self.offered.update(contents)
        for key in contents:
            self._names.setdefault(key, []).append(name)

    def withdraw(self, name: str) -> None:
        """Contents of this offer cannot be pulled any more; those that are on their way come."""
        for key in self._offers.pop(name, ()):
            names = self._names[key]
            names.remove(name)
            if not names:
                del self._names[key], self.offered[key]

    def offers(self, name: str) -> bool:
        """Whether this offer stands."""
        return name in self._offers

    def bytes_of(self, keys: Iterable[Key]) -> int:
        """See Tier. Layers of a group may be fewer than a page has room for."""
        return sum(self.offered[key].num_bytes for key in keys)

    def taken(self, name: str) -> list[Key]:
        """The contents of an offer that are on their way."""
        return [key for key, names in self._pulls.items() if name in names]

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def hold(self, key: Key) -> int:
        """A content is about to be pulled."""
        self.source = self._offer_of(key)
        self._pulls.setdefault(key, []).append(self.source)
        return 0

    def _offer_of(self, key: Key) -> str:
        """The offer that a content is taken from."""
        return self._names[key][-1]

    def release(self, key: Key) -> None:
        """A content has come, or nobody waits for it any more."""
        name = self._pulls[key].pop()
        if not self._pulls[key]:
            del self._pulls[key]
        self._let_go(name, key)

    def _let_go(self, name: str, key: Key) -> None:
        """A content of an offer is not pulled any more."""
        if self._offers.get(name, (None,))[-1] == key:
            self.withdraw(name)
            self._pulled(name)

    def held(self) -> dict[Key, int]:
        """The contents that are being pulled."""
        return {key: len(names) for key, names in self._pulls.items()}

    def broken(self) -> Iterator[str]:
        """What does not agree, for the audit."""
        names = [name for names in self._names.values() for name in names]
        if sorted(names) != sorted(name for name, keys in self._offers.items() for _ in keys):
            yield "contents are offered by other names than those that offered them"
        if not all(self._pulls.values()):
            yield "a content is held by nobody"
