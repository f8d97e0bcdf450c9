"""A block that several slots hold is copied before one of them writes it."""

from kvlab.kv.ledger import BlockLedger


class CopyOnWrite:
    """Finds the blocks that a step writes and other slots hold too, and gives the writer a copy.

    Shared blocks are full, and full blocks are never written, except where a slot was forked or had to go back:
    only such slots (`watch`) are looked at.
    """

    def __init__(self, ledger: BlockLedger) -> None:
        self.copies = 0
        self._ledger = ledger
        self._watched: set[int] = set()

    def watch(self, *slots: int) -> None:
        """These slots may hold a shared block that is not full."""
        self._watched.update(slots)

    def forget(self, slot: int) -> None:
        """The slot is closed."""
        self._watched.discard(slot)

    def find(self, slots: list[int], after: list[int]) -> list[tuple[int, int]]:
        """(slot, entry) of each block to copy before a step that brings each slot to `after` tokens. Of several
        slots that write one block, the last needs no copy if nobody else holds it.
        """
        copies: list[tuple[int, int]] = []
        tables, size = self._ledger.tables, self._ledger.tables.block_size
        left: dict[int, int] = {}
        for slot, end in zip(slots, after, strict=True):
            first = int(tables.stored[slot])
            if slot not in self._watched or end <= first:
                continue
            for entry in range(first // size, min(-(-end // size), int(tables.counts[slot]))):
                block = int(tables.entries[slot, entry])
                references = left.get(block, self._ledger.allocator.ref_count(block))
                if references > 1:
                    copies.append((slot, entry))
                    left[block] = references - 1
        return copies

    def copy(self, slot: int, entry: int) -> None:
        """Give a slot its own copy of a shared block."""
        self._ledger.copy(slot, entry)
        self.copies += 1

    def copy_part(self, slot: int, entry: int, source: int, tokens: int) -> None:
        """A slot's own block has the first `tokens` of a content: copied, unless it is the `source` itself."""
        self.copies += self._ledger.copy_part(slot, entry, source, tokens)

    def __bool__(self) -> bool:
        return bool(self._watched)
