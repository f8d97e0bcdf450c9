"""Finds blocks by the tokens they hold and all tokens before those."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from struct import Struct


class Prefix:
    """A full block's tokens behind a given prefix: a node of the tree of all known prefixes.

    `block` is where their K and V are; None: they are not cached. The allocator sets and clears it. `key` is the
    parent's id and the block's tokens.
    """

    __slots__ = ("block", "key", "parent", "uses")

    def __init__(self, parent: Prefix | None, key: tuple[int, bytes]) -> None:
        self.parent = parent
        self.key = key
        self.block: int | None = None
        self.uses = 0  # nodes that have this one as parent, and slots that compute it while another block has it


class PrefixIndex:
    """Full blocks by content. A content is a block's tokens, all tokens before them, and a salt.

    Nodes are found by their parent and their tokens, and both are compared, not their hash alone: prompts whose
    hashes collide never share. A node keeps its parent alive, so that no other object has the id in its key.

    A node outlives its block while others need it, so what is cached behind an evicted block is found again once
    that block is computed anew.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._nodes: dict[tuple[int, bytes], Prefix] = {}
        self._roots: dict[bytes, Prefix] = {}  # by salt; a root goes with its last node
        self._pack = Struct(f"{block_size}q").pack

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> list[int]:
        """Blocks that hold the longest cached prefix of `token_ids`, in order; whole blocks only."""
        node = self._roots.get(repr(salt).encode())
        blocks: list[int] = []
        if node is not None:
            for tokens in self._split(token_ids):
                node = self._nodes.get((id(node), tokens))
                if node is None or node.block is None:
                    break
                blocks.append(node.block)
        return blocks

    def root(self, salt: Hashable = None) -> Prefix:
        """The empty prefix of a salt, for `extend`."""
        text = repr(salt).encode()
        root = self._roots.get(text)
        if root is None:
            root = self._roots[text] = Prefix(None, (0, text))
        return root

    def extend(self, node: Prefix, token_ids: Sequence[int]) -> list[Prefix]:
        """The nodes of these whole blocks of tokens behind `node`, in order, made where they are not there."""
        path = []
        for tokens in self._split(token_ids):
            key = (id(node), tokens)
            new = Prefix(node, key)
            child = self._nodes.setdefault(key, new)
            if child is new:
                node.uses += 1
            path.append(child)
            node = child
        return path

    def prune(self, nodes: Iterable[Prefix]) -> None:
        """Drop each of the nodes that has no block and no use, then its parents likewise."""
        for node in nodes:
            while node.block is None and not node.uses:
                parent = node.parent
                if parent is None:
                    del self._roots[node.key[1]]
                    break
                if self._nodes.pop(node.key, None) is None:
                    break  # it went with its last child, which is one of `nodes` too
                parent.uses -= 1
                node = parent

    def nodes(self) -> Iterator[Prefix]:
        """Every node except the roots."""
        return iter(self._nodes.values())

    def _split(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """The tokens of each whole block, 8 bytes a token."""
        size, pack = self.block_size, self._pack
        for start in range(0, len(token_ids) - size + 1, size):
            yield pack(*token_ids[start : start + size])
