"""Prefix sharing of layers with states: a prefix is found where a state was kept."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvlab.kv.block_sharing import SharingSlot
from kvlab.kv.prefix import Prefix
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.table import NO_BLOCK


class StateSharing(PrefixSharing):
    """Of the blocks that a step passes those are published in which it keeps a state. The nodes of the others have
    no block, unless another sequence kept one there.
    """

    def droppable_entries(self, slot: int, first: int) -> int:
        return self._before_pending(slot, min(first, self._slots[slot].computed))

    def _extend(self, slot: int, length: int, last: int, new: dict[int, Prefix]) -> None:
        state, size = self._slots[slot], self._tables.block_size
        start, end = state.computed, length // size
        state.known &= length <= len(state.tokens)
        if not state.known:
            return
        entries = self._tables.entries[slot, start:end].tolist()
        behind = sum(1 for _ in takewhile(lambda block: block == NO_BLOCK, reversed(entries)))
        entries = entries[: len(entries) - behind]
        if not entries:
            return
        blocks = {number: block for number, block in enumerate(entries) if block != NO_BLOCK}
        path = self.index.place(
            self._node(state), state.tokens[start * size : (start + len(entries)) * size], blocks, new
        )
        for number, block in blocks.items():
            path[number].uses += path[number].block != block
        state.pending, state.elsewhere = path, True

    def _node(self, state: SharingSlot) -> Prefix:
        """That of the computed blocks, made again if it has left the tree with its block."""
        root = self.index.root(state.salt, self._group)
        if state.node is None or not state.computed:
            return root
        if state.node.block is not None:
            return state.node
        return self.index.place(root, state.tokens[: state.computed * self._tables.block_size], {}, {})[-1]

    def _pending_blocks(self, slot: int, start: int, nodes: Sequence[Prefix]) -> Iterator[tuple[int, Prefix, int]]:
        pending = super()._pending_blocks(slot, start, nodes)
        return ((entry, node, block) for entry, node, block in pending if block != NO_BLOCK)
