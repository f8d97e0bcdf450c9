"""The contract of a KV-cache pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvlab.core import PoolCounters, PoolStats, Salt
from kvlab.kv.audit import Finding

if TYPE_CHECKING:
    from kvlab.kv.view import CacheView

Numbers = Sequence[int] | NDArray[np.int64]


class KVCachePool(ABC):
    """Memory for the K and V of many sequences. A call that raises has changed nothing, but that blocks may have
    been given back which windows have left.
    """

    unit = "block"  # what people call a block, in the singular
    frees_windows = False  # see KVBackend

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Token slots of a block."""

    @property
    @abstractmethod
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits when it has the pool to itself."""

    @abstractmethod
    def allocate_slot(
        self,
        initial_tokens: int = 0,
        token_ids: Sequence[int] | None = None,
        *,
        salt: Salt = None,
        first_tokens: int | None = None,
        all_fit: bool = True,
        most_tokens: int | None = None,
        keep_free: int = 0,
        resumed: bool = False,
        swapped: int | None = None,
        reuse: bool = True,
    ) -> int:
        """Open a slot with room for its first tokens, all or nothing.

        `token_ids` are those tokens, where they are known; they stand for `initial_tokens`, and blocks that hold
        the same prefix under the same `salt` are shared. The pool keeps the list and reads it as the sequence
        grows: append each token before the step that computes it, and change no other. Of those that are not found
        `first_tokens` get blocks now (None: all), the others when a step computes them; unless `all_fit` there need
        not be blocks for these, and with it for the `most_tokens` that the sequence may have in the end (None:
        those that are known). `keep_free` blocks have to be left, of which as many may be taken for a while as
        windows give back before the tokens are computed. `resumed`: the sequence had a slot before, so that what it
        finds again is not counted as a hit. `swapped`: the ticket that `swap_out` gave for that slot, which ends
        with it. Without `reuse` all tokens are computed, whatever the pool has of them; others may share the blocks
        then.

        Raises OutOfBlocksError if they do not fit now, SlotError if they never will.
        """

    @abstractmethod
    def fork_slot(self, slot: int, token_ids: Sequence[int] | None = None, *, rerun_last: bool = False) -> int:
        """Open a second slot with the same tokens; paged shares every block, contiguous copies.

        `token_ids` is the copy's own list, which begins with the same tokens; without it, blocks that the copy
        fills are not shared. With `rerun_last` its last token is run once more for its logits, storing nothing.

        Raises OutOfBlocksError, or SlotError for a slot that is dead or in a step.
        """

    @abstractmethod
    def reserve(self, slots: Numbers, new_tokens: Numbers, proposed: Numbers | None = None) -> None:
        """Make room for each slot's tokens of the coming step, for all of them or for none.

        Grows tables, copies a shared block that will be written, and lets later slots share what the step fills.
        The last `proposed` of a slot's tokens are not in its list, and the step may turn out not to keep them:
        nobody shares what they fill before they are kept and in the list.

        Raises OutOfBlocksError naming the slots that do not fit, SlotError for a slot that is dead, doubled or
        reserved already, and for more tokens than a sequence may have.
        """

    @abstractmethod
    def view(self, slots: Numbers, new_tokens: Numbers) -> CacheView:
        """What a step over these slots sees; slots that are not reserved are reserved now.

        The view's `advance` or `rollback` ends the step. Raises as `reserve`, and SlotError where another number of
        tokens was reserved.
        """

    @abstractmethod
    def pin_prefix(self, slot: int, tokens: int) -> None:
        """Keep the content of the slot's first tokens when it is closed, while anything else can be evicted.

        Only whole blocks, and only within the pool's limits; what it refuses is counted. A pool that keeps no
        prefixes does nothing.
        """

    @abstractmethod
    def expire(self, now: float) -> bool:
        """It is `now`, in seconds: give up what was kept for its time. Whether that changed anything."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is being copied, and close what the pool keeps outside its own memory."""

    @abstractmethod
    def free_slot(self, slot: int) -> None:
        """Close a slot and give back its blocks. Raises SlotError for a dead one."""

    @abstractmethod
    def get_seq_len(self, slot: int) -> int:
        """Tokens of the slot that are computed: the position of the next one."""

    @abstractmethod
    def prefix_tokens(self, token_ids: Sequence[int], salt: Salt = None) -> int:
        """Tokens of this prompt that a slot opened now would find in the prefix cache."""

    def common_tokens(self, token_ids: Sequence[int], salt: Salt = None) -> int:
        """Tokens of this prompt that are known of others: layers with a state may find fewer."""
        return self.prefix_tokens(token_ids, salt)

    @abstractmethod
    def fork_growth(self, tokens: int, known: int) -> int:
        """Blocks of its own that a fork of a slot with `known` tokens may need until so many are stored."""

    @abstractmethod
    def slot_growth(self, slots: Sequence[int], tokens: Sequence[int], to_compute: Sequence[int]) -> int:
        """Blocks that these slots may need beyond those that they have, copies of shared ones included, until so
        many tokens are stored of each. Of those that are known, `to_compute` are to be computed.
        """

    @abstractmethod
    def free_slot_count(self) -> int:
        """Sequences that could be opened now, if each needed one block."""

    @abstractmethod
    def free_token_capacity(self) -> int | None:
        """Token slots of free blocks; None where a token budget has no meaning (contiguous)."""

    @abstractmethod
    def is_paged(self) -> bool:
        """Whether a sequence may span several blocks."""

    @abstractmethod
    def stats(self) -> PoolStats:
        """Memory in use now."""

    @abstractmethod
    def counters(self) -> PoolCounters:
        """What was done since the start."""

    @abstractmethod
    def audit(self) -> list[Finding]:
        """Every broken invariant; empty for a sound pool."""

    @abstractmethod
    def reclaim_leaked_blocks(self) -> int:
        """Free every block that no live slot's table names; returns how many."""

    # What a pool with tiers can do for a sequence that gives way; without any, it cannot.

    def swap_out(self, slot: int, is_worth: Callable[[float, int], bool] | None = None) -> int | None:
        """Copy what the slot has computed to the pool's tiers, which hold it for the sequence: a ticket for
        `allocate_slot`. The slot stays as it is.

        None where there is no room, or no tier; or where `is_worth` says that it is not, which is given an estimate
        of the seconds for copying it there and back, and the tokens that would be computed otherwise.
        """
        return None

    def end_swap(self, ticket: int) -> None:
        """The sequence of this ticket will not come back."""

    # How a pool with tiers brings content to slots that have found it there; without any, nothing comes.

    def is_loading(self, slot: int) -> bool:
        """Whether content that the slot found in a tier is on its way to it: it takes part in no step before."""
        return False

    def receive(self, now: float) -> list[int]:
        """It is `now`, in seconds: the slots whose content has come since the last call. What could not be loaded
        has to be computed; `get_seq_len` says from which token on.
        """
        return []

    def next_arrival(self) -> float | None:
        """When `receive` has a slot to name; a time that has passed: any moment. None: no slot is being loaded."""
        return None

    def await_arrival(self, seconds: float) -> None:
        """Wait until content has come, at most so long. Modelled loads are not waited for."""
