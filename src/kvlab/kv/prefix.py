"""Finds blocks by the tokens they hold and all tokens before those."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence

_PIECE = 32  # blocks whose tokens are packed at once: a miss on the first does not pay for a long prompt


class Prefix:
    """A full block's tokens behind a given prefix: a node of the tree of all known prefixes.

    `block` is where their K and V are; None: they are not cached. The allocator sets and clears it.
    """

    __slots__ = ("block", "key", "parent", "tokens", "uses")

    def __init__(self, parent: Prefix | None, tokens: bytes, key: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.block: int | None = None
        self.uses = 0  # nodes that have this one as parent, and slots that compute it while another block has it


def chained_hash(parent: int, tokens: bytes) -> int:
    """The key of a block's tokens behind the prefix whose key is `parent`."""
    return hash((parent, tokens))


class PrefixIndex:
    """Full blocks by content. A content is a block's tokens, all tokens before them, and a salt.

    The chained hash finds a candidate; its tokens and its parent are compared before it counts, so that prompts
    whose hashes collide never share. Where a key is taken by another content, the later one is not indexed. A
    node outlives its block while others need it, so what is cached behind an evicted block is found again once
    that block is computed anew.
    """

    def __init__(self, block_size: int, hash_function: Callable[[int, bytes], int] = chained_hash) -> None:
        self.block_size = block_size
        self._hash = hash_function
        self._nodes: dict[int, Prefix] = {}
        self._roots: dict[bytes, Prefix] = {}  # by salt; a root goes with its last node

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> list[int]:
        """Blocks that hold the longest cached prefix of `token_ids`, in order; whole blocks only."""
        node = self._roots.get(repr(salt).encode())
        if node is None:
            return []
        blocks: list[int] = []
        nodes, hash_function = self._nodes, self._hash
        for tokens in self.split(token_ids):
            child = nodes.get(hash_function(node.key, tokens))
            if child is None or child.block is None or child.parent is not node or child.tokens != tokens:
                break
            blocks.append(child.block)
            node = child
        return blocks

    def root(self, salt: Hashable = None) -> Prefix:
        """The empty prefix of a salt, for `extend`."""
        text = repr(salt).encode()
        root = self._roots.get(text)
        if root is None:
            root = self._roots[text] = Prefix(None, text, self._hash(0, text))
        return root

    def extend(self, parent: Prefix, tokens: bytes) -> Prefix | None:
        """The node of one block's tokens, as `split` gives them, behind `parent`, made if it is not there; None if
        its key is taken.
        """
        key = self._hash(parent.key, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Prefix(parent, tokens, key)
            parent.uses += 1
        elif node.parent is not parent or node.tokens != tokens:
            self.prune(parent)
            return None
        return node

    def prune(self, node: Prefix) -> None:
        """Drop a node that has no block and no use, then its parents likewise."""
        while node.block is None and not node.uses:
            if node.parent is None:
                del self._roots[node.tokens]
                return
            del self._nodes[node.key]
            node = node.parent
            node.uses -= 1

    def nodes(self) -> Iterator[Prefix]:
        """Every node except the roots."""
        return iter(self._nodes.values())

    def split(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """The tokens of each whole block, 8 bytes a token."""
        width, piece = 8 * self.block_size, _PIECE * self.block_size
        for start in range(0, len(token_ids), piece):
            data = array("q", token_ids[start : start + piece]).tobytes()
            for begin in range(0, len(data) - width + 1, width):
                yield data[begin : begin + width]
