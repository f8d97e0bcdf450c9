"""Finds blocks by the tokens they hold and all tokens before those."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence


class Prefix:
    """A full block's tokens behind a given prefix: a node of the tree of all prefixes known.

    `block` is where their K and V are, None where they are not cached (any more).
    """

    __slots__ = ("block", "children", "key", "parent", "tokens")

    def __init__(self, parent: Prefix | None, tokens: bytes, key: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.block: int | None = None
        self.children = 0  # nodes that have this one as parent


def chained_hash(parent: int, tokens: bytes) -> int:
    """The key of a block's tokens behind the prefix whose key is `parent`."""
    return hash((parent, tokens))


class PrefixIndex:
    """Full blocks by content. A content is a block's tokens, all tokens before them, and a salt.

    The chained hash finds a candidate; its tokens and its parent are compared before it counts, so that prompts
    whose hashes collide never share. Where a key is taken by another content, the later one is not indexed. A
    node outlives its block while others hang on it, so what is cached behind an evicted block is found again
    once that block is.

    `match` and `locate` read, `publish` and `unpublish` write; blocks have at most one content, and a content
    at most one block.
    """

    def __init__(self, block_size: int, hash_function: Callable[[int, bytes], int] = chained_hash) -> None:
        self.block_size = block_size
        self._hash = hash_function
        self._nodes: dict[int, Prefix] = {}
        self._roots: dict[Hashable, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> list[int]:
        """Blocks that hold the longest cached prefix of `token_ids`, in order; whole blocks alone."""
        root = self._roots.get(salt)
        if root is None:
            return []
        blocks: list[int] = []
        node = root
        nodes, hash_function = self._nodes, self._hash
        for tokens in self.split(token_ids):
            child = nodes.get(hash_function(node.key, tokens))
            if child is None or child.block is None or child.parent is not node or child.tokens != tokens:
                break
            blocks.append(child.block)
            node = child
        return blocks

    def root(self, salt: Hashable = None) -> Prefix:
        """The empty prefix of a salt."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Prefix(None, b"", self._hash(0, repr(salt).encode()))
        return root

    def extend(self, parent: Prefix, tokens: bytes) -> Prefix | None:
        """The node of one block's tokens, as `split` gives them, behind `parent`, made if it is not there; None if
        its key is taken.
        """
        key = self._hash(parent.key, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Prefix(parent, tokens, key)
            parent.children += 1
        elif node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def publish(self, node: Prefix, block: int) -> bool:
        """Say that `block` holds a node's content; False, changing nothing, if another block does."""
        if node.block is not None:
            return False
        node.block = block
        self._by_block[block] = node
        return True

    def unpublish(self, block: int) -> None:
        """Forget a block's content: it was evicted, or never computed."""
        node = self._by_block.pop(block, None)
        if node is None:
            return
        node.block = None
        self._prune(node)

    def content(self, block: int) -> Prefix | None:
        """The node whose content a block holds."""
        return self._by_block.get(block)

    def items(self) -> Iterator[tuple[int, Prefix]]:
        """Every indexed block and its node."""
        return iter(self._by_block.items())

    def split(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """The tokens of each whole block, 8 bytes a token."""
        data = array("q", token_ids).tobytes()
        width = 8 * self.block_size
        for start in range(0, len(data) - width + 1, width):
            yield data[start : start + width]

    def _prune(self, node: Prefix) -> None:
        while node.parent is not None and node.block is None and not node.children:
            del self._nodes[node.key]
            node = node.parent
            node.children -= 1
