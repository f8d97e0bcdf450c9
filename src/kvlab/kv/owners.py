"""Whose references to blocks are whose."""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from kvlab.errors import BlockError


class BlockOwners:
    """The references of each owner, such as a slot, so that those of one that is gone can be found."""

    def __init__(self) -> None:
        # As they came, until some of them go alone and are counted from then on.
        self._owned: dict[Hashable, list[int] | Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._owned)

    def blocks_of(self, owner: Hashable) -> Counter[int]:
        """An owner's references by block."""
        return Counter(self._owned.get(owner, ()))

    def holders(self, block: int) -> list[Hashable]:
        """The owners of a block's references."""
        return [owner for owner, blocks in self._owned.items() if block in blocks]

    def leaked_blocks(self, active_owners: Collection[Hashable]) -> dict[Hashable, list[int]]:
        """Blocks that owners outside `active_owners` still reference, by owner, once for each reference."""
        gone = (owner for owner in self._owned if owner not in active_owners)
        return {owner: sorted(self.blocks_of(owner).elements()) for owner in gone}

    def add(self, owner: Hashable, blocks: Sequence[int]) -> None:
        """An owner has one more reference to each block."""
        owned = self._owned.get(owner)
        if owned is None:
            self._owned[owner] = list(blocks)
        elif isinstance(owned, list):
            owned += blocks
        else:
            owned.update(blocks)

    def holds_just(self, owner: Hashable, blocks: Sequence[int]) -> bool:
        """Whether these references are all that the owner has. Raises BlockError for one that it has not."""
        if self._owned.get(owner, ()) == blocks[::-1]:  # as a sequence ends: last to first
            return bool(blocks)
        owned, wanted = self._counted(owner), Counter(blocks)
        for block, times in wanted.items():
            if times > owned[block]:
                raise BlockError(f"free: {owner!r} holds {owned[block]} reference(s) to block {block}, not {times}")
        return bool(blocks) and owned == wanted

    def remove(self, owner: Hashable, blocks: Sequence[int]) -> None:
        """An owner has one reference less to each of these blocks, which it holds."""
        owned = self._owned[owner] = self._counted(owner)
        owned.subtract(blocks)
        for block in blocks:
            if not owned[block]:
                del owned[block]
        if not owned:
            del self._owned[owner]

    def remove_all(self, owner: Hashable) -> None:
        """An owner has no references any more."""
        del self._owned[owner]

    def forget(self, blocks: Sequence[int]) -> None:
        """Nobody has a reference to these blocks any more."""
        for owner in list(self._owned):
            owned = self._counted(owner)
            for block in blocks:
                owned.pop(block, None)
            if not owned:
                del self._owned[owner]

    def _counted(self, owner: Hashable) -> Counter[int]:
        """An owner's references by block, to be changed."""
        owned = self._owned.get(owner, ())
        if not isinstance(owned, Counter):
            owned = Counter(owned)
            if owner in self._owned:
                self._owned[owner] = owned
        return owned
