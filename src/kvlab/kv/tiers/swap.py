"""Sequences that gave up their blocks and want them back: in the tiers meanwhile."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.tier import Tier

Store = Callable[[Key, int], Tier | None]  # copies a block to the first tier unless any has its content


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence's computed tokens, all held in tiers. Of its last block, which is not full, `tail` is the key."""

    tokens: int
    held: list[tuple[Tier, Key]]  # of each block
    tail: Key | None


class Swaps:
    """What was swapped out, by ticket.

    A content is held once for each sequence that wants it back. One that its tier has lost meanwhile is a miss.
    """

    def __init__(self, store: Store) -> None:
        self.by_ticket: dict[int, Swapped] = {}
        self.blocks_out = self.blocks_in = 0  # since the start
        self._store = store
        self._tickets = 0

    def add(self, keys: Sequence[Key], blocks: Sequence[int], tokens: int, *, has_tail: bool) -> int | None:
        """Copy contents that no tier has from blocks to the first tier, and hold them all: a ticket. None, and
        nothing is held, where there is no room for all of them.
        """
        held: list[tuple[Tier, Key]] = []
        for key, block in zip(keys, blocks, strict=True):
            tier = self._store(key, block)
            if tier is None:
                _release(held)
                return None
            tier.hold(key)
            held.append((tier, key))
        self._tickets += 1
        self.by_ticket[self._tickets] = Swapped(tokens, held, keys[-1] if has_tail else None)
        self.blocks_out += len(keys)
        return self._tickets

    def end(self, ticket: int) -> None:
        """The sequence has come back, or ended: its contents stay no longer than others."""
        _release(self.by_ticket.pop(ticket).held)

    def held(self, tier: Tier) -> Counter[Key]:
        """How often each content of a tier is held for such sequences."""
        keys = (key for swapped in self.by_ticket.values() for where, key in swapped.held if where is tier)
        return Counter(key for key in keys if key in tier)

    def lost(self, tier: Tier, key: Key) -> None:
        """A tier has lost a content."""
        for swapped in self.by_ticket.values():
            if (tier, key) in swapped.held:
                swapped.held.remove((tier, key))


def _release(held: Sequence[tuple[Tier, Key]]) -> None:
    for tier, key in reversed(held):  # so that of a prefix the tail is older, and goes first
        tier.release(key)
