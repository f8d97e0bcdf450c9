"""What each slot's blocks hold, and which of them others may use."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.prefix import Prefix, PrefixIndex
from kvlab.kv.table import BlockTables


@dataclass(slots=True)
class _Contents:
    """A slot's tokens, and the index's nodes of its leading full blocks.

    Nodes up to `settled` are of blocks that are computed and that the slot references; those behind it are of
    blocks that the step in preparation fills.
    """

    tokens: list[int]
    root: Prefix
    nodes: list[Prefix] = field(default_factory=list)
    settled: int = 0
    indexable: bool = True  # False behind a block whose key another content holds


class PrefixSharing:
    """Publishes full blocks in the index, and finds those of others.

    A block is published when the step that fills it is prepared (`announce`): each layer writes all of the
    step's K and V before its attention reads, so that a sequence in the same step may share it. If the step
    fails, `retract` takes it back. If another block holds the content already, the slot keeps its own until the
    step is done, then `settle` maps its entry to the other and gives its own back.
    """

    def __init__(self, index: PrefixIndex, allocator: BlockAllocator, tables: BlockTables) -> None:
        self.index = index
        self._allocator = allocator
        self._tables = tables
        self._slots: dict[int, _Contents] = {}
        self._tokens: dict[int, list[int]] = {}  # those of `_slots`, which decoding touches in every step
        self._pending: set[int] = set()  # published, and computed by the step in preparation

    def open(self, slot: int, token_ids: Sequence[int], salt: Hashable, hits: int, *, known: bool) -> None:
        """A slot with these tokens was opened; its first `hits` blocks come from the index. A slot whose tokens are
        not `known` shares nothing.
        """
        contents = _Contents(list(token_ids), self.index.root(salt), settled=hits, indexable=known)
        for block in self._tables.blocks(slot)[:hits]:
            node = self.index.content(block)
            if node is None:
                raise RuntimeError(f"block {block} was matched but has no content")
            contents.nodes.append(node)
        self._slots[slot] = contents
        self._tokens[slot] = contents.tokens

    def fork(self, slot: int, copy: int) -> None:
        """Slot `copy` was opened with the same content."""
        source = self._slots[slot]
        self._slots[copy] = _Contents(
            list(source.tokens), source.root, list(source.nodes), source.settled, source.indexable
        )
        self._tokens[copy] = self._slots[copy].tokens

    def close(self, slot: int) -> list[int]:
        """A slot is about to be freed; returns the blocks it announced and never computed, which are taken back."""
        retracted = self.retract(slot)
        del self._slots[slot], self._tokens[slot]
        return retracted

    def borrowers(self, blocks: list[int]) -> list[int]:
        """Slots that found one of these blocks when they were opened, or were forked from one that did."""
        wanted = set(blocks)
        return [
            slot
            for slot, contents in self._slots.items()
            if not wanted.isdisjoint(self._tables.blocks(slot)[: contents.settled])
        ]

    def disown(self, slot: int, blocks: list[int]) -> int:
        """A slot found blocks that hold nothing after all; returns how many entries before them are sound."""
        contents = self._slots[slot]
        sound = min(
            self._tables.blocks(slot).index(block) for block in blocks if block in self._tables.blocks(slot)
        )
        del contents.nodes[sound:]
        contents.settled = sound
        return sound

    def extend(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """The token that each slot's next step computes, where it is not known yet."""
        lists = self._tokens
        for slot, token in zip(slots, tokens, strict=True):
            lists[slot].append(token)

    def is_pending(self, block: int) -> bool:
        """Whether a block's content is being computed by the step in preparation."""
        return block in self._pending

    def announce(self, slot: int, length: int) -> None:
        """A step is prepared that brings a slot to `length` tokens: publish the blocks it fills."""
        contents = self._slots[slot]
        if length > len(contents.tokens):  # it computes tokens that nobody told: from here on nothing is known
            contents.indexable = False
        size, first = self._tables.block_size, len(contents.nodes)
        full = min(length, len(contents.tokens)) // size
        if not contents.indexable or first >= full:
            return
        blocks = self._tables.entries[slot, first:full].tolist()
        texts = self.index.split(contents.tokens[first * size : full * size])
        node = contents.nodes[-1] if contents.nodes else contents.root
        published = []
        for block, tokens in zip(blocks, texts, strict=True):
            child = self.index.extend(node, tokens)
            if child is None:
                contents.indexable = False
                break
            contents.nodes.append(child)
            if self.index.publish(child, block):
                published.append(block)
            node = child
        self._allocator.set_content(*published)
        self._pending.update(published)

    def settle(self, slot: int) -> list[tuple[int, int]]:
        """The step is done. Returns (entry, other block) for each block it filled whose content another has."""
        contents = self._slots[slot]
        duplicates = []
        first, size = contents.settled, self._tables.block_size
        blocks = self._tables.entries[slot, first : len(contents.nodes)].tolist()
        for entry, block in enumerate(blocks, start=first):
            if contents.nodes[entry].block == block:
                self._pending.discard(block)
                continue
            # What another block held when the step was prepared may have been evicted since.
            parent = contents.nodes[entry - 1] if entry else contents.root
            (tokens,) = self.index.split(contents.tokens[entry * size : (entry + 1) * size])
            node = self.index.extend(parent, tokens)
            if node is None:
                del contents.nodes[entry:]
                contents.indexable = False
                break
            contents.nodes[entry] = node
            self._pending.discard(block)
            if node.block is None:
                self.index.publish(node, block)
                self._allocator.set_content(block)
            elif node.block != block:
                duplicates.append((entry, node.block))
        contents.settled = len(contents.nodes)
        return duplicates

    def retract(self, slot: int) -> list[int]:
        """The step failed, or never ran: what it would have filled has no content. Returns those blocks."""
        contents = self._slots[slot]
        retracted = []
        for entry in range(contents.settled, len(contents.nodes)):
            block = int(self._tables.entries[slot, entry])
            if block in self._pending:
                self._pending.discard(block)
                self._allocator.clear_content(block)
                self.index.unpublish(block)
                retracted.append(block)
        del contents.nodes[contents.settled :]
        return retracted
