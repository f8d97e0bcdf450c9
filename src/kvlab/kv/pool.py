"""The contract of a KV-cache pool, and what its implementations share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import CapacityError, OutOfBlocksError, SlotError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.audit import Finding, audit
from kvlab.kv.stats import PoolStats
from kvlab.kv.storage import KVStorage
from kvlab.kv.table import BlockTables
from kvlab.kv.view import CacheView


class CachePoolProtocol(Protocol):
    """Memory for the K and V of many sequences. A call that raises has changed nothing."""

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        ...

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""
        ...

    def allocate_slot(self, initial_tokens: int = 0, token_ids: Sequence[int] | None = None) -> int:
        """Open a slot with room for its first tokens at once, all or nothing.

        `token_ids` are those tokens, where they are known; they stand for `initial_tokens`.
        Raises OutOfBlocksError if they do not fit now, SlotError if they never will.
        """
        ...

    def reserve(self, slots: Sequence[int], new_tokens: Sequence[int]) -> None:
        """Make room for each slot's next tokens, for all of them or for none.

        Raises OutOfBlocksError naming the slots that do not fit, SlotError for a dead or doubled slot.
        """
        ...

    def view(self, slots: Sequence[int], new_tokens: Sequence[int]) -> CacheView:
        """What a step over these slots sees; their room was reserved before."""
        ...

    def free_slot(self, slot: int) -> None:
        """Close a slot and give back its blocks."""
        ...

    def get_seq_len(self, slot: int) -> int:
        """Tokens of the slot whose K and V are stored."""
        ...

    def free_slot_count(self) -> int:
        """Sequences that could be opened now, if each needed one block."""
        ...

    def free_token_capacity(self) -> int | None:
        """Token slots of free blocks; None where a token budget has no meaning (contiguous)."""
        ...

    def is_paged(self) -> bool:
        """Whether a sequence may span several blocks."""
        ...

    def stats(self) -> PoolStats:
        """Memory in use now, and counts since the start."""
        ...

    def audit(self) -> list[Finding]:
        """Every broken invariant; empty for a sound pool."""
        ...


class KVCachePool(ABC):
    """What both pools are: an allocator, block tables, and tensors that may be absent.

    A contiguous slot is a block of `max_seq_len` tokens, so the two differ in the size of a block and in
    what admission may count on.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_seq_len: int, storage: KVStorage | None = None
    ) -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"a pool of {num_blocks} blocks holds no sequence; one of {max_seq_len} tokens needs "
                f"{-(-max_seq_len // block_size)} blocks of {block_size} tokens"
            )
        self.max_seq_len = max_seq_len
        self.storage = storage
        self.allocator = BlockAllocator(num_blocks)
        self.tables = BlockTables(-(-max_seq_len // block_size), block_size)

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.tables.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""
        return min(self.max_seq_len, self.allocator.num_blocks * self.block_size)

    def allocate_slot(self, initial_tokens: int = 0, token_ids: Sequence[int] | None = None) -> int:
        """See CachePoolProtocol."""
        tokens = initial_tokens if token_ids is None else len(token_ids)
        if tokens < 0:
            raise SlotError(f"initial_tokens={tokens}: must be at least 0")
        if tokens > self.max_seq_len:
            raise SlotError(f"{tokens} tokens are more than max_seq_len={self.max_seq_len}")
        return self.tables.add(self.allocator.allocate(self._initial_blocks(tokens)))

    def reserve(self, slots: Sequence[int], new_tokens: Sequence[int]) -> None:
        """See CachePoolProtocol."""
        rows, new = self._check_step(slots, new_tokens)
        lengths = self.tables.lengths[rows] + new
        wanted = -(-lengths // self.block_size) - self.tables.counts[rows]
        short = np.flatnonzero(wanted > 0)
        if not len(short):
            return
        demand = np.cumsum(wanted[short])
        free = self.allocator.num_free()
        if demand[-1] > free:
            refused = rows[short[demand > free]].tolist()
            raise OutOfBlocksError(int(demand[-1]), free, self.allocator.num_blocks, slots=refused)
        for index in short.tolist():
            self.tables.append(int(rows[index]), self.allocator.allocate(int(wanted[index])))

    def view(self, slots: Sequence[int], new_tokens: Sequence[int]) -> CacheView:
        """See CachePoolProtocol. Raises SlotError where the room was not reserved."""
        rows, new = self._check_step(slots, new_tokens)
        room = self.tables.counts[rows] * self.block_size
        over = np.flatnonzero(self.tables.lengths[rows] + new > room)
        if len(over):
            raise SlotError(f"slots {rows[over].tolist()}: no room reserved for the tokens of this step")
        return CacheView(self.tables, self.storage, rows, new, is_paged=self.is_paged(), on_advance=self._advance)

    def prefill_view(self, slot: int) -> CacheView:
        """A view of all the room reserved for one new slot."""
        self.tables.check(slot)
        room = int(self.tables.counts[slot]) * self.block_size
        return self.view([slot], [room - self.get_seq_len(slot)])

    def batched_prefill_view(self, slots: Sequence[int], lens: Sequence[int]) -> CacheView:
        """A view of several slots that each take `lens[i]` new tokens."""
        return self.view(slots, lens)

    def decode_view(self, slots: Sequence[int]) -> CacheView:
        """A view of slots that each take one new token."""
        return self.view(slots, [1] * len(slots))

    def free_slot(self, slot: int) -> None:
        """See CachePoolProtocol. Blocks go back last to first, so that a prefix outlives its tail."""
        self.allocator.free(self.tables.blocks(slot)[::-1])
        self.tables.remove(slot)

    def get_seq_len(self, slot: int) -> int:
        """See CachePoolProtocol."""
        self.tables.check(slot)
        return int(self.tables.lengths[slot])

    def free_slot_count(self) -> int:
        """See CachePoolProtocol."""
        return self.allocator.num_free()

    def stats(self) -> PoolStats:
        """See CachePoolProtocol."""
        return PoolStats(
            block_size=self.block_size,
            blocks_total=self.allocator.num_blocks,
            blocks_in_use=self.allocator.num_allocated(),
            sequences=len(self.tables),
            tokens_stored=int(self.tables.lengths.sum()),
            kv_bytes=self.storage.num_bytes if self.storage is not None else 0,
            blocks_allocated=self.allocator.total_allocated,
            blocks_freed=self.allocator.total_freed,
        )

    def audit(self) -> list[Finding]:
        """See CachePoolProtocol."""
        return audit(self.allocator, self.tables)

    @abstractmethod
    def free_token_capacity(self) -> int | None:
        """See CachePoolProtocol."""

    @abstractmethod
    def is_paged(self) -> bool:
        """See CachePoolProtocol."""

    @abstractmethod
    def _initial_blocks(self, tokens: int) -> int:
        """Blocks that a new slot takes for its first tokens."""

    def _check_step(
        self, slots: Sequence[int], new_tokens: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if len(slots) != len(new_tokens):
            raise SlotError(f"{len(slots)} slots but {len(new_tokens)} token counts")
        live = self.tables.live
        seen: set[int] = set()
        for slot in slots:
            if slot not in live:
                self.tables.check(slot)
            if slot in seen:
                raise SlotError(f"slot {slot} is given twice in one step")
            seen.add(slot)
        rows = np.asarray(slots, dtype=np.int64)
        new = np.asarray(new_tokens, dtype=np.int64)
        if len(new) and new.min() < 1:
            raise SlotError(f"slot {slots[int(new.argmin())]}: {int(new.min())} new tokens; at least 1")
        over = np.flatnonzero(self.tables.lengths[rows] + new > self.max_seq_len)
        if len(over):
            slot = int(rows[over[0]])
            raise SlotError(
                f"slot {slot}: {self.get_seq_len(slot)} + {int(new[over[0]])} tokens are more than "
                f"max_seq_len={self.max_seq_len}"
            )
        return rows, new

    def _advance(self, rows: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        self.tables.lengths[rows] += new
