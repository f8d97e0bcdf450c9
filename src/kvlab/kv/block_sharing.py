"""What a group of layers does about equal content of its slots' blocks: here nothing."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.core import Salt
from kvlab.kv.prefix import Prefix


@dataclass(slots=True)
class SharingSlot:
    """A slot's tokens, and how many of its blocks are in the tree of prefixes.

    table:  [ computed ......... | pending ...... | not full yet, or not known ]
                          node ^    nodes of blocks that the step in preparation fills
    """

    tokens: Sequence[int]
    salt: Salt
    known: bool  # False: a step computed tokens that the list did not have, so that nothing more is published
    computed: int
    node: Prefix | None  # of the last computed block
    pending: Sequence[Prefix] = ()
    elsewhere: bool = False  # some pending content is, or was, in another block
    hits: int = 0  # blocks that were found when the slot was opened
    same_step: Sequence[int] = ()  # which of them the step in preparation filled
    counted: tuple[int, int] = (0, 0)  # tokens in these and in those, as they were counted
    resumed: bool = False
    pinned: int = 0  # blocks from the first on that stay cached when it is closed, as far as they are computed


class BlockSharing:
    """Blocks belong to one slot and its forks. The base of `PrefixSharing`, whose calls these are."""

    def __init__(self) -> None:
        self.pins_refused = self.merged_blocks = 0
        self.hit_tokens = self.same_step_tokens = self.recompute_tokens = 0

    def open(
        self,
        slot: int,
        token_ids: Sequence[int] | None,
        salt: Salt,
        hits: Sequence[int],
        *,
        resumed: bool,
        part: int = 0,
    ) -> None:
        """A slot was opened whose first entries are `hits` of the index, those that it needs, with the first `part`
        tokens of the block behind them in a block of its own. Without `token_ids` it shares nothing.
        """

    def fork(self, slot: int, copy: int, token_ids: Sequence[int] | None) -> None:
        """Slot `copy` was opened with the content of `slot`, and goes on with its own `token_ids`."""

    def close(self, slot: int) -> None:
        """A slot is about to be freed. It was retracted from its step."""

    def restart(self, slot: int) -> None:
        """The slot has no blocks any more, and computes all its tokens."""

    def fills_apart(self, slots: Sequence[int], hits: int) -> bool:
        """Whether the blocks that these slots fill next, if nothing else happens, surely equal no other, and none
        is behind the first `hits` blocks of another sequence's tokens and goes on like these.
        """
        return True

    def pin(self, slot: int, tokens: int) -> None:
        """Keep the content of the slot's first tokens, whole blocks of them, when it is closed."""

    @property
    def is_preparing(self) -> bool:
        """Whether a step is prepared that fills blocks."""
        return False

    @property
    def pending(self) -> Collection[int]:
        """The blocks that the step in preparation fills."""
        return ()

    def is_pending(self, block: int) -> bool:
        """Whether the step in preparation fills a block."""
        return False

    def computed(self, slot: int) -> tuple[Sequence[int], Salt] | None:
        """The tokens that a slot has computed, and its salt. None where they are not known, or where it counts on a
        block that the step in preparation computes.
        """
        return None

    def extend_loaded(self, slot: int, first: int, blocks: int, tail: int = 0) -> bool:
        """The slot's blocks from number `first` on were loaded, so many of them, and so many tokens of the block
        behind them. Not while a step is prepared.

        False where the slot had to go back meanwhile: it computes them like the tokens before.
        """
        return False

    def place_loaded(self, slot: int, count: int) -> None:
        """The slot's first `count` blocks were loaded, or shared with that in view, as far as it needs them. Not
        while a step is prepared.
        """

    def publish(self, rows: NDArray[np.int64], before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        """A step is reserved that takes these slots from so many tokens to so many: publish what it fills."""

    def confirm(self, rows: NDArray[np.int64], before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        """That step is done: what it filled is computed."""

    def retract(self, slots: Sequence[int]) -> list[int]:
        """The step of these slots failed or never ran: what it would have filled has no content.

        Slots that share such a block lose it and what is behind it, and leave the step that they are in: they have
        to compute those tokens themselves. Returns them.
        """
        return []

    def mark_late(self, slots: Iterable[int]) -> None:
        """These slots have kept tokens that were proposed, which their lists do not have yet."""

    def publish_late(self, slots: Iterable[int]) -> None:
        """Publish the blocks that slots have filled with tokens that are in their lists by now.

        Not while a step is prepared that fills blocks: one of them may hold the same, and its step may fail.
        """

    def droppable_entries(self, slot: int, first: int) -> int:
        """How many of a slot's first entries, of those before `first`, nothing needs any more."""
        return first
