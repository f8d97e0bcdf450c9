"""Blocks of the pool as integers: who may use which, with reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvlab.errors import BlockError, OutOfBlocksError


class BlockAllocator:
    """Hands out block ids `0 .. num_blocks - 1` and takes them back.

    What holds between calls: a block has a reference count exactly if it is allocated, and is in the free
    queue exactly if it is not; free + allocated = total. A call that raises has changed nothing. Each
    operation costs O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks!r}: must be a whole number, at least 0")
        self.num_blocks = num_blocks
        # The queue's head is the list's end, so that taking and returning blocks moves no other.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: dict[int, int] = {}
        self.total_allocated = 0  # blocks handed out since the start
        self.total_freed = 0  # blocks that came back to the queue since the start

    def num_free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def num_allocated(self) -> int:
        """Blocks with at least one reference."""
        return len(self._references)

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= len(self._free)

    def ref_count(self, block: int) -> int:
        """References to a block; 0 for a free one. Raises BlockError for an id outside the pool."""
        self._check_id(block)
        return self._references.get(block, 0)

    def allocated_block_ids(self) -> set[int]:
        """The blocks with at least one reference."""
        return set(self._references)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the queue, each with one reference. 0 takes none.

        Raises OutOfBlocksError if there are fewer, ValueError for a count that is no number of blocks.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"count={count!r}: must be a whole number of blocks, at least 0")
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free), self.num_blocks)
        if count == 0:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._references.update(dict.fromkeys(blocks, 1))
        self.total_allocated += count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block. Raises BlockError for one that is not allocated."""
        blocks = list(blocks)
        for block in blocks:
            self._check_allocated(block, "share")
        for block in blocks:
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; at 0 it returns to the head of the queue, the first block given
        being the first to be used again.

        Raises BlockError, naming the block, for one that is not allocated or given more often than it is
        referenced.
        """
        for block, times in Counter(blocks).items():
            self._check_allocated(block, "free")
            if times > self._references[block]:
                raise BlockError(
                    f"free: block {block} was given {times} times but has {self._references[block]} reference(s)"
                )
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left:
                self._references[block] = left
            else:
                del self._references[block]
                self._free.append(block)
                self.total_freed += 1

    def _check_id(self, block: int) -> None:
        if isinstance(block, bool) or not isinstance(block, int):
            raise BlockError(f"block {block!r}: a block id is a whole number")
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block}: outside the pool of {self.num_blocks} blocks")

    def _check_allocated(self, block: int, action: str) -> None:
        self._check_id(block)
        if block not in self._references:
            raise BlockError(f"{action}: block {block} is not allocated")
