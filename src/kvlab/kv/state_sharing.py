"""Prefix sharing of layers with states: a prefix is found where a state was kept."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvlab.kv.block_sharing import SharingSlot
from kvlab.kv.prefix import Prefix
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.table import NO_BLOCK


class StateSharing(PrefixSharing):
    """Of the blocks that a step passes those are published in which it keeps a state. The nodes of the others have
    no block, unless another sequence kept one there.
    """

    def __init__(self, *arguments: Any, states: int, **options: Any) -> None:
        """A slot has so many `states`: see StateBlocks."""
        super().__init__(*arguments, **options)
        self._keeps_passed = states > 2
        self._kept = dict[int, list[int]]()  # by slot: entries of what it last published

    def close(self, slot: int) -> None:
        super().close(slot)
        self._kept.pop(slot, None)

    def droppable_entries(self, slot: int, first: int) -> int:
        state = self._slots[slot]  # of whose blocks those are needed that are yet to be published
        return self._before_pending(slot, min(first, state.computed) if state.known else first)

    def _extend(self, slot: int, length: int, last: int, new: dict[int, Prefix]) -> None:
        state, size, entries = self._slots[slot], self._tables.block_size, self._tables.entries
        state.known &= length <= len(state.tokens)
        end, before, start = (length - 1) // size, int(self._tables.lengths[slot]), state.computed
        kept = [end - 1] if self._keeps_passed and (end - 1) * size >= before else []
        kept += [end] if length == (end + 1) * size else []
        blocks = {entry - start: int(entries[slot, entry]) for entry in kept if entry >= start}
        blocks = {place: block for place, block in blocks.items() if block != NO_BLOCK}
        if not state.known or not blocks:
            return
        self._kept[slot] = [start + place for place in blocks]
        tokens = state.tokens[start * size : (self._kept[slot][-1] + 1) * size]
        state.pending = path = self.index.place(self._node(state), tokens, blocks, new)
        state.elsewhere = True
        for number, block in blocks.items():
            path[number].uses += path[number].block != block

    def _node(self, state: SharingSlot) -> Prefix:
        """That of the computed blocks, made again if it has left the tree with its block."""
        root = self.index.root(state.salt, self._group)
        if state.node is None or not state.computed:
            return root
        if state.node.block is not None:
            return state.node
        return self.index.place(root, state.tokens[: state.computed * self._tables.block_size], {}, {})[-1]

    def _pending_blocks(self, slot: int, start: int, nodes: Sequence[Prefix]) -> Iterator[tuple[int, Prefix, int]]:
        kept = self._kept.get(slot, ())
        return (pending for pending in super()._pending_blocks(slot, start, nodes) if pending[0] in kept)
