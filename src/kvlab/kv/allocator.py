"""Blocks of the pool as integers: who may use which, with reference counts."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import BlockError, OutOfBlocksError
from kvlab.kv.content_copies import ContentCopies
from kvlab.kv.content_log import ContentLog
from kvlab.kv.eviction import EvictionPolicy, LruEviction, check_victims
from kvlab.kv.journal import BlockEvent, BlockJournal, BlockState
from kvlab.kv.owners import BlockOwners
from kvlab.kv.prefix import Prefix

#: Given blocks that are about to be evicted, in order, and the contents of all blocks.
OnEvict = Callable[[Sequence[int], Mapping[int, Prefix]], None]


class BlockAllocator:
    """Hands out block ids `0 .. num_blocks - 1` and takes them back.

        allocate --> [ referenced ] --free, count 0--> [ free queue ]
                         ^                              head: without content (scratch), last in first out
                         |                              tail: with content, in the eviction policy's order
                         +------- share ----------------+

    What holds between calls: a block has references exactly if it is not in the free queue; free + allocated =
    total. A call that raises has changed nothing. A block costs O(1), plus what the eviction policy takes for one
    with content.

    Which block has which content is stored here and nowhere else (`set_contents`, `content`); the content's node
    names its block, of several the first. Taking a block with content from the queue is its eviction: `on_evict`
    hears of it first. `on_drop` is given contents that have lost their last block. References may have `owners`.
    With a `journal`, what happens to each block is written there, and to contents in a `content_log`.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: EvictionPolicy | None = None,
        on_drop: Callable[[list[Prefix]], None] | None = None,
        journal: BlockJournal | None = None,
        on_evict: OnEvict | None = None,
    ) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks!r}: must be a whole number, at least 0")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # The queue's head is the list's end, so that taking and returning blocks moves no other. Below the list lie
        # the blocks from `first_untouched` on, in order: a large device has a million, of which most runs take few.
        self._scratch: list[int] = []
        self.first_untouched = 0
        self.eviction = LruEviction() if eviction is None else eviction  # of what is unreferenced, with content
        self._contents: dict[int, Prefix] = {}
        self.copies = ContentCopies()
        self.owners = BlockOwners()
        self._on_drop = on_drop
        self._journal = journal
        self._on_evict = on_evict
        self.content_log: ContentLog | None = None
        self.num_references = 0
        self.total_allocated = 0  # blocks handed out since the start
        self.total_freed = 0  # blocks that came back to the queue since the start
        self.evictions = 0  # calls that had to evict
        self.evicted_blocks = 0

    def num_free(self) -> int:
        """Blocks that nobody references, with or without content."""
        return len(self._scratch) + len(self.eviction) + self.num_blocks - self.first_untouched

    def num_evictable(self) -> int:
        """Part of the free blocks that holds content."""
        return len(self.eviction)

    def num_allocated(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free()

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return 0 <= count <= self.num_free()

    def ref_count(self, block: int) -> int:
        """References to a block; 0 for a free one. Raises BlockError for an id outside the pool."""
        self._check_id(block)
        return self._references[block]

    def num_unreferenced(self, blocks: Iterable[int | None]) -> int:
        """How many of these blocks of the pool nobody references; None is no block."""
        return sum(block is not None and not self._references[block] for block in blocks)

    def content(self, block: int) -> Prefix | None:
        """The content of a block that can be shared, if it has one."""
        return self._contents.get(block)

    def content_block_ids(self) -> set[int]:
        """The blocks that have content, referenced or not."""
        return set(self._contents)

    def allocated_block_ids(self) -> set[int]:
        """The blocks with at least one reference."""
        return set(compress(range(self.num_blocks), self._references))

    def free_block_ids(self) -> set[int]:
        """The blocks in the free queue."""
        return {*self.returned_block_ids(), *range(self.first_untouched, self.num_blocks)}

    def returned_block_ids(self) -> set[int]:
        """Those but for the blocks from `first_untouched` on, which were never taken."""
        return {*self._scratch, *self.eviction.blocks()}

    def states(self) -> NDArray[np.uint8]:
        """The BlockState of each block, `[num_blocks]`; pinned ones are CACHED here."""
        references = np.fromiter(self._references, np.int32, self.num_blocks)
        states = np.where(references > 1, BlockState.SHARED, 2 * references).astype(np.uint8)
        states[np.fromiter(self.eviction.blocks(), np.int64, len(self.eviction))] = BlockState.CACHED
        return states

    def allocate(self, count: int, owner: Hashable = None) -> list[int]:
        """Take `count` blocks from the head of the queue, each with one reference. 0 takes none.

        Raises OutOfBlocksError if there are fewer, ValueError for a count that is no number of blocks.
        """
        if type(count) is not int or count < 0:
            raise ValueError(f"count={count!r}: must be a whole number of blocks, at least 0")
        blocks, evicted = self._take(count)
        self.evictions += evicted > 0
        if owner is not None and blocks:
            self.owners.add(owner, blocks)
        if self._journal is not None and blocks:
            self._journal.add(BlockEvent.ALLOCATED, blocks, owner)
        return blocks

    def allocate_each(self, owners: Sequence[Hashable]) -> list[int]:
        """One block for each owner, as `allocate(1, owner)` for one after the other. Raises OutOfBlocksError."""
        blocks, evicted = self._take(len(owners))
        self.evictions += evicted
        for block, owner in zip(blocks, owners, strict=True):
            self.owners.add(owner, (block,))
            if self._journal is not None:
                self._journal.add(BlockEvent.ALLOCATED, (block,), owner)
        return blocks

    def share(self, blocks: Iterable[int], owner: Hashable = None) -> list[int]:
        """Add one reference to each block, taking unreferenced ones out of the free queue; returns the latter.

        Raises BlockError for one that is neither allocated nor holds content.
        """
        blocks, reused = list(blocks), list[int]()
        for block in blocks:
            self._check_id(block)
            if not self._references[block] and block not in self._contents:
                raise BlockError(f"share: block {block} is neither allocated nor cached")
        for block in blocks:
            if not self._references[block]:
                self.eviction.remove(block)
                reused.append(block)
            self._references[block] += 1
        self.num_references += len(blocks)
        self.total_allocated += len(reused)
        if owner is not None and blocks:
            self.owners.add(owner, blocks)
        if self._journal is not None:
            self._journal.add(BlockEvent.SHARED, blocks, owner)
        return reused

    def touch(self, blocks: Sequence[int]) -> None:
        """Record for the eviction policy that the content of these blocks was hit."""
        self.eviction.used(blocks)

    def free(self, blocks: Sequence[int], owner: Hashable = None) -> list[int]:
        """Drop one reference of each block; returns the blocks that nobody references any more.

        Those return to the queue: without content to its head, the first given to be reused first; with content
        to its tail, the first given to be evicted first under `lru`.

        Raises BlockError, naming the block, for one that is not allocated, given more often than it is
        referenced, or not `owner`'s.
        """
        all_of_owner = owner is not None and self.owners.holds_just(owner, blocks)
        released = self._drop_references(blocks)
        if self._journal is not None:
            self._journal.add(BlockEvent.FREED, blocks, owner)
        self._enqueue(released)
        self.num_references -= len(blocks)
        self.total_freed += len(released)
        if all_of_owner:
            self.owners.remove_all(owner)
        elif owner is not None and blocks:
            self.owners.remove(owner, blocks)
        return released

    def set_contents(self, contents: Mapping[int, Prefix]) -> None:
        """Referenced blocks without content hold those of nodes that name them now: others may share them."""
        self._contents.update(contents)
        if self.content_log is not None:
            self.content_log.stored(contents)
        self.eviction.filled(contents)

    def add_copy(self, block: int, node: Prefix) -> None:
        """A referenced block without content holds that of a node which names another."""
        self.copies.add(node, block)
        self._contents[block] = node
        self.eviction.filled({block: node})

    def clear_content(self, block: int) -> None:
        """A block's content may not be shared any more; unreferenced, it goes to the queue's head."""
        if block not in self._contents:
            return
        if self._references[block]:
            self._drop([block])
        else:
            self.eviction.remove(block)
            self.give_up([block])

    def give_up(self, blocks: list[int]) -> None:
        """Unreferenced blocks that the eviction policy took out lose their content: they are allocated next."""
        self._scratch += blocks
        if self._journal is not None:
            self._journal.add(BlockEvent.DROPPED, blocks)
        self._drop(blocks)

    def find_unreferenced_blocks(self, referenced: Collection[int]) -> list[int]:
        """Allocated blocks that are not among `referenced`, such as the entries of all live tables."""
        return sorted(self.allocated_block_ids().difference(referenced))

    def force_free(self, blocks: Iterable[int]) -> int:
        """For recovery alone, as it breaks tables that name them: drop every reference of these blocks. Returns how
        many came back to the queue. Raises BlockError for an id outside the pool.
        """
        wanted = list(dict.fromkeys(blocks))
        for block in wanted:
            self._check_id(block)
        lost = [block for block in wanted if self._references[block]]
        self.owners.forget(lost)
        for block in lost:
            if self._journal is not None:
                self._journal.add(BlockEvent.FREED, [block] * self._references[block])
            self.num_references -= self._references[block]
            self._references[block] = 0
        self._enqueue(lost)
        self.total_freed += len(lost)
        return len(lost)

    def _drop_references(self, blocks: Sequence[int]) -> list[int]:
        """Drop a reference of each block; returns those with none left. Raises BlockError, changing nothing."""
        references, released, done = self._references, [], 0
        try:
            for block in blocks:  # its own: those that a sequence shares with others come last
                # A negative id would count from the list's end, and True pass for 1.
                if references[block] != 1 or block < 0 or type(block) is not int:
                    break
                references[block] = 0
                done += 1
            if done == len(blocks):
                return list(blocks)
            released = list(blocks[:done])
            for block in blocks[done:]:
                left = references[block] - 1
                if left < 0 or block < 0 or type(block) is not int:
                    break
                references[block] = left
                done += 1
                if not left:
                    released.append(block)
        except (IndexError, TypeError):
            pass
        if done < len(blocks):
            for block in blocks[:done]:
                references[block] += 1
            self._refuse_to_free(blocks)
        return released

    def _refuse_to_free(self, blocks: Sequence[int]) -> None:
        """Raise BlockError for the first block that cannot be freed, or not so often."""
        for block in blocks:
            self._check_id(block)
            if not self._references[block]:
                raise BlockError(f"free: block {block} is not allocated")
        for block, times in Counter(blocks).items():
            held = self._references[block]
            if times > held:
                raise BlockError(f"free: block {block} was given {times} times but has {held} reference(s)")

    def _take(self, count: int) -> tuple[list[int], int]:
        """Take blocks from the head of the queue, each with one reference; and how many of them were evicted."""
        scratch = self._scratch
        if count == 1 and scratch:  # of a sequence that grows, as most are
            block = scratch.pop()
            self._references[block] = 1
            self.num_references += 1
            self.total_allocated += 1
            return [block], 0
        missing, first = count - len(scratch), self.first_untouched
        evict = max(missing - (self.num_blocks - first), 0)
        if evict > len(self.eviction):
            raise OutOfBlocksError(count, self.num_free(), self.num_blocks, evictable=len(self.eviction))
        if missing > 0 and first < self.num_blocks:
            self.first_untouched = min(first + max(missing, 1024), self.num_blocks)
            scratch[:0] = range(self.first_untouched - 1, first - 1, -1)
        evicted = self.eviction.victims(evict) if evict else []
        if evict:  # what is answered may be anything: nothing has been taken yet
            check_victims(self.eviction, evicted, evict, self._contents, self._references)
        blocks = scratch[: -(count - evict) - 1 : -1]
        del scratch[len(scratch) - len(blocks) :]
        if evict:
            if self._on_evict is not None:
                self._on_evict(evicted, self._contents)
            self._drop(evicted)
            if self._journal is not None:
                self._journal.add(BlockEvent.DROPPED, evicted)
            self.evicted_blocks += evict
            blocks += evicted
        references = self._references
        for block in blocks:
            references[block] = 1
        self.num_references += count
        self.total_allocated += count
        return blocks, evict

    def _drop(self, blocks: list[int]) -> None:
        """The content of these blocks is gone."""
        nodes = self.copies.leave(blocks, list(map(self._contents.pop, blocks)))
        if self.content_log is not None:
            self.content_log.removed(nodes)
        self.eviction.forget(blocks)
        if self._on_drop is not None:
            self._on_drop(nodes)

    def _enqueue(self, released: Sequence[int]) -> None:
        """Blocks without a reference go to the queue."""
        if not self._contents:
            self._scratch += released[::-1]
            return
        kept = list(filter(self._contents.__contains__, released))
        if len(kept) < len(released):
            self._scratch += [block for block in reversed(released) if block not in self._contents]
        if kept:
            if self._journal is not None:
                self._journal.add(BlockEvent.CACHED, kept)
            self.eviction.add_all(kept, self._contents)

    def _check_id(self, block: int) -> None:
        if type(block) is not int:
            raise BlockError(f"block {block!r}: a block id is a whole number")
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block}: outside the pool of {self.num_blocks} blocks")
