"""Prefix sharing: which blocks of a slot others may use, and which of others it uses itself."""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.core import Salt
from kvlab.kv.block_sharing import BlockSharing, SharingSlot
from kvlab.kv.ledger import BlockLedger
from kvlab.kv.prefix import Prefix, PrefixIndex


class PrefixSharing(BlockSharing):
    """Publishes full blocks, and takes back those whose step failed.

    A block is published when the step that fills it is reserved: each layer writes all of the step's K and V
    before its attention reads, so that a sequence in the same step may share it. If another block holds the content
    already, the slot computes its own until the step is done, then maps its entry to the other (`confirm`), or
    unless it `merges` keeps both. It cannot do so earlier: if the step failed, tokens that it had stored in its own
    block would be lost.

    With `parts` the last block of a slot that is closed has a content too, though it is not full.
    """

    def __init__(
        self, index: PrefixIndex, ledger: BlockLedger, group: int = 0, *, parts: bool = False, merges: bool = True
    ) -> None:
        super().__init__()
        self._merges = merges
        self.index = index
        self._keeps_parts = parts
        self._group = group
        self._ledger = ledger
        self._allocator = ledger.allocator
        self._tables = ledger.tables
        self._slots: dict[int, SharingSlot] = {}
        self._pending: set[int] = set()  # blocks that are published but not computed
        self._late: set[int] = set()  # slots that may have filled blocks with tokens that their lists got later

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
        first = int(self._tables.first[slot]) if hits else 0
        node, count = self._allocator.content(hits[-1]) if hits else None, first + len(hits)
        state = self._slots[slot] = SharingSlot(
            () if token_ids is None else token_ids, salt, token_ids is not None, count, node, resumed=resumed
        )
        pending = [entry for entry, block in enumerate(hits, start=first) if block in self._pending]
        self._count_hits(state, count, pending, part)

    def _count_hits(self, state: SharingSlot, hits: int, same_step: Sequence[int], part: int = 0) -> None:
        """Count a slot's hits, instead of those that were counted before, and so many tokens behind them. The last
        token of a prompt that is found as a whole is none: it is computed again.
        """
        size, (found, at_once) = self._tables.block_size, state.counted
        tokens = min(hits * size + part, max(len(state.tokens) - 1, 0))
        same = len(same_step) * size - (tokens < hits * size and hits - 1 in same_step)
        if state.resumed:
            self.recompute_tokens += tokens - found
        else:
            self.hit_tokens += tokens - found
            self.same_step_tokens += same - at_once
        state.hits, state.same_step, state.counted = hits, same_step, (tokens, same)

    def fork(self, slot: int, copy: int, token_ids: Sequence[int] | None) -> None:
        source = self._slots[slot]
        # Without tokens of its own, the copy's are known as far as they are the source's today.
        tokens = tuple(source.tokens) if token_ids is None else token_ids
        self._slots[copy] = SharingSlot(tokens, source.salt, source.known, source.computed, source.node)
        if slot in self._late:
            self._late.add(copy)

    def close(self, slot: int) -> None:
        state = self._slots[slot]
        pinned = min(state.pinned, state.computed)  # of a prompt, which is published before its output
        self.publish_late([slot])
        self._late.discard(slot)
        if self._keeps_parts:
            self._publish_part(slot, state)
        del self._slots[slot]
        if pinned:
            blocks = self._tables.entries[slot, :pinned].tolist()
            self.pins_refused += not self._allocator.eviction.pin(blocks)

    def _publish_part(self, slot: int, state: SharingSlot) -> None:
        """Others may find the tokens of a slot's last block that is not full, which nobody else holds."""
        tables, size = self._tables, self._tables.block_size
        length = min(int(tables.lengths[slot]), len(state.tokens))
        if not state.known or state.computed != length // size or not length % size:
            return
        block = int(tables.entries[slot, state.computed])
        if self._allocator.ref_count(block) > 1:
            return
        node = state.node or self.index.root(state.salt, self._group)
        part = self.index.add_part(node, state.tokens[state.computed * size : length], block)
        if part is not None:
            self._store({block: part})

    def _store(self, contents: Mapping[int, Prefix]) -> None:
        """These blocks have contents from now on."""
        self._allocator.set_contents(contents)
        if self._keeps_parts:
            self.index.stored(contents.values())

    @property
    def is_preparing(self) -> bool:
        return bool(self._pending)

    @property
    def pending(self) -> Collection[int]:
        return self._pending

    def is_pending(self, block: int) -> bool:
        return block in self._pending

    def place_loaded(self, slot: int, count: int) -> None:
        state, tables, size, new = self._slots[slot], self._tables, self._tables.block_size, dict[int, Prefix]()
        first = int(tables.first[slot])
        blocks = dict(enumerate(tables.entries[slot, first:count].tolist(), start=first))
        root = self.index.root(state.salt, self._group)
        path = self.index.place(root, state.tokens[: count * size], blocks, new)
        self._store(new)
        for entry, block in blocks.items():
            self._ledger.occupancy.fill(block, size)
            other = path[entry].block
            if other is not None and other != block:  # it was computed meanwhile
                self._ledger.remap(slot, entry, other)
                self.merged_blocks += 1
        state.computed, state.node = count, path[-1]
        tables.lengths[slot] = min(count * size, len(state.tokens) - 1)
        self._count_hits(state, count, ())

    def computed(self, slot: int) -> tuple[Sequence[int], Salt] | None:
        state, length = self._slots[slot], int(self._tables.lengths[slot])
        blocks = self._tables.entries[slot, : -(-length // self._tables.block_size)].tolist()
        if not length or not state.known or length > len(state.tokens) or not self._pending.isdisjoint(blocks):
            return None
        return state.tokens[:length], state.salt

    def extend_loaded(self, slot: int, first: int, blocks: int, tail: int = 0) -> bool:
        state, tables, size = self._slots[slot], self._tables, self._tables.block_size
        if state.computed != first or not blocks + tail:
            return False
        end = first + blocks
        for block in tables.entries[slot, first:end].tolist():
            self._ledger.occupancy.fill(block, size)
        tables.stored[slot] = end * size
        tables.lengths[slot] = min(end * size, len(state.tokens) - 1)
        self._count_hits(state, end, state.same_step)
        if blocks:
            self._complete(slot, end * size)
        if tail:
            self._ledger.occupancy.fill(int(tables.entries[slot, end]), tail)
            tables.stored[slot] = end * size + tail
            tables.lengths[slot] = min(end * size + tail, len(state.tokens) - 1)
        return True

    def pin(self, slot: int, tokens: int) -> None:
        self._slots[slot].pinned = tokens // self._tables.block_size

    def mark_late(self, slots: Iterable[int]) -> None:
        self._late.update(slots)

    def publish_late(self, slots: Iterable[int]) -> None:
        if not self._late or self._pending:
            return
        for slot in self._late.intersection(slots):
            length = min(int(self._tables.lengths[slot]), len(self._slots[slot].tokens))
            if length >= self._tables.block_size:
                self._complete(slot, length)
            self._late.discard(slot)

    def publish(self, rows: NDArray[np.int64], before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        size = self._tables.block_size
        fills = after // size > before // size
        rows, lengths = rows[fills], after[fills]
        lasts = self._tables.entries[rows, lengths // size - 1]
        self._pending.update(self._publish(rows.tolist(), lengths.tolist(), lasts.tolist()))

    def confirm(self, rows: NDArray[np.int64], before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        size = self._tables.block_size
        self._confirm(rows[after // size > before // size].tolist())

    def fills_apart(self, slots: Sequence[int], hits: int) -> bool:
        size, parts = self._tables.block_size, dict[int, list[bytes]]()
        for slot in slots:
            state = self._slots[slot]
            node, start = state.node, state.computed * size
            if not state.known or node is None or state.computed <= hits or slot in self._late:
                return False
            part = array("q", state.tokens[start : start + size]).tobytes()  # of the block, as far as it is known
            others = parts.setdefault(id(node), node.child_tokens())
            if any(each.startswith(part) or part.startswith(each) for each in others):
                return False
            others.append(part)
        return True

    def _complete(self, slot: int, length: int) -> None:
        """Publish and confirm at once the blocks that a slot has filled up to this length."""
        last = int(self._tables.entries[slot, length // self._tables.block_size - 1])
        self._publish([slot], [length], [last])
        self._confirm([slot])

    def _publish(self, slots: Sequence[int], lengths: Sequence[int], lasts: Sequence[int]) -> dict[int, Prefix]:
        """Put blocks of slots into the tree, and return those nodes that are in them."""
        new: dict[int, Prefix] = {}
        for slot, length, last in zip(slots, lengths, lasts, strict=True):
            self._extend(slot, length, last, new)
        self._store(new)
        return new

    def _extend(self, slot: int, length: int, last: int, new: dict[int, Prefix]) -> None:
        """Put a slot's blocks up to a length into the tree; `last` is the last of them."""
        state, size = self._slots[slot], self._tables.block_size
        tokens, start, end, others = state.tokens, state.computed, length // size, len(new)
        if length > len(tokens):
            state.known = False
        if not state.known or start >= end:
            return
        blocks = [last] if start + 1 == end else self._tables.entries[slot, start:end].tolist()
        node = state.node or self.index.root(state.salt, self._group)
        state.pending = self.index.extend(node, tokens[start * size : end * size], blocks, new)
        state.elsewhere = len(new) - others < len(blocks)

    def _confirm(self, slots: Sequence[int]) -> None:
        """The step that filled these slots' pending blocks is done: give up those that another block equals."""
        for slot in slots:
            state = self._slots[slot]
            nodes = state.pending
            if not nodes:
                continue
            start = state.computed
            state.computed += len(nodes)
            state.node, state.pending = nodes[-1], ()
            if state.elsewhere:
                self._merge(slot, start, nodes)
                state.elsewhere = False
            elif self._pending:
                self._pending.difference_update([node.block for node in nodes])

    def _merge(self, slot: int, start: int, nodes: Sequence[Prefix]) -> None:
        """Where others have the contents of the entries from `start` on, map these to them, or have both."""
        for entry, node, block in self._pending_blocks(slot, start, nodes):
            if node.block == block:
                self._pending.discard(block)
                continue
            node.uses -= 1
            if node.block is None:  # the other was evicted meanwhile, or its step failed
                node.block = block
                self._store({block: node})
            elif self._merges:
                self._ledger.remap(slot, entry, node.block)
                self.merged_blocks += 1
            else:
                self._allocator.add_copy(block, node)

    def _pending_blocks(self, slot: int, start: int, nodes: Sequence[Prefix]) -> Iterator[tuple[int, Prefix, int]]:
        """The nodes of a slot's entries from `start` on, with these and with their blocks."""
        blocks = self._tables.entries[slot, start : start + len(nodes)].tolist()
        return zip(range(start, start + len(nodes)), nodes, blocks, strict=True)

    def _computed_blocks(self, slot: int, state: SharingSlot) -> list[int]:
        blocks: list[int] = self._tables.entries[slot, self._tables.first[slot] : state.computed].tolist()
        return blocks

    def droppable_entries(self, slot: int, first: int) -> int:
        # Blocks whose content is yet to be published are needed, and the last that was, which the next continues.
        state = self._slots[slot]
        if state.known:
            first = min(first, state.computed - 1)
        return self._before_pending(slot, first)

    def _before_pending(self, slot: int, first: int) -> int:
        if self._pending:  # whoever holds a block is found when the step fails that would have filled it
            entries = range(int(self._tables.first[slot]), first)
            return next((each for each in entries if self.is_pending(int(self._tables.entries[slot, each]))), first)
        return first

    def retract(self, slots: Sequence[int]) -> list[int]:
        rewound: list[int] = []
        lost = {block for slot in slots for block in self._take_back(slot)}
        while lost:
            sharers = [
                slot
                for slot, state in self._slots.items()
                if not lost.isdisjoint(self._computed_blocks(slot, state))
            ]
            taken_back: set[int] = set()
            for slot in sharers:
                taken_back.update(self._take_back(slot))
                self._rewind(slot, lost)
                rewound.append(slot)
            lost = taken_back
        return rewound

    def _take_back(self, slot: int) -> list[int]:
        """Forget a slot's pending blocks; returns those whose content is gone."""
        state = self._slots[slot]
        taken_back = []
        for _, node, block in self._pending_blocks(slot, state.computed, state.pending):
            if node.block == block:
                self._pending.discard(block)
                self._allocator.clear_content(block)
                taken_back.append(block)
            else:
                node.uses -= 1
                self.index.prune([node])
        state.pending, state.elsewhere = (), False
        return taken_back

    def _rewind(self, slot: int, lost: set[int]) -> None:
        """Set a slot back to its tokens before the first of the `lost` blocks, and those stored in that one."""
        state, tables = self._slots[slot], self._tables
        blocks = tables.entries[slot, : state.computed].tolist()
        sound = next(entry for entry, block in enumerate(blocks) if block in lost)
        for _ in range(state.computed - sound):
            state.node = state.node.parent if state.node is not None else None
        if not sound:
            state.node = None  # not the root, which goes with its last node
        state.computed = sound
        if sound < state.hits:
            self._count_hits(state, sound, [entry for entry in state.same_step if entry < sound])
        stored = sound * tables.block_size + self._ledger.occupancy.held(blocks[sound])
        tables.lengths[slot] = tables.stored[slot] = stored
        tables.reserved[slot] = 0

    def restart(self, slot: int) -> None:
        self._take_back(slot)
        state = self._slots[slot]
        state.computed, state.node, state.pinned = 0, None, 0
        self._count_hits(state, 0, ())
