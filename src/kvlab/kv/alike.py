"""Nodes of the tree of prefixes by how they begin, where parts of blocks are found."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

_MOST = 16  # nodes that are compared one by one
_TOKEN = 8  # bytes


class Node(Protocol):
    """Of the tree: a block's tokens, packed, and the block that has them."""

    tokens: bytes
    block: int | None


N = TypeVar("N", bound=Node)


class Alike(Generic[N]):
    """Nodes with blocks behind one parent that begin with the same tokens, in the order in which they were stored.

    Of more than a few each is among those of its next token, too: behind a system prompt, or a token that begins
    all prompts, thousands begin alike.
    """

    __slots__ = ("by_next", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[N, None] = {}
        self.by_next: dict[bytes, Alike[N]] = {}  # by the token behind those that they have in common

    def add(self, node: N, common: int = 0) -> None:
        """A node has a block from now on; so many bytes of its tokens are those of the others."""
        self.nodes[node] = None
        if self.by_next or len(self.nodes) > _MOST:
            for each in (node,) if self.by_next else tuple(self.nodes):
                token = each.tokens[common : common + _TOKEN]
                self.by_next.setdefault(token, Alike()).add(each, common + _TOKEN)

    def remove(self, node: N, common: int = 0) -> bool:
        """A node has no block any more; whether none is left."""
        self.nodes.pop(node, None)
        token = node.tokens[common : common + _TOKEN]
        behind = self.by_next.get(token)
        if behind is not None and behind.remove(node, common + _TOKEN):
            del self.by_next[token]
        return not self.nodes

    def longest(self, tokens: bytes, without: Collection[int]) -> tuple[N | None, int]:
        """The first stored of those that begin with most of these tokens, and how many bytes that is; not in the
        blocks `without`.
        """
        alike, found, common = self, None, 0
        while alike.by_next and common < len(tokens):
            behind = alike.by_next.get(tokens[common : common + _TOKEN])
            usable = None if behind is None else next((n for n in behind.nodes if n.block not in without), None)
            if behind is None or usable is None:
                return found, common
            alike, found, common = behind, usable, common + _TOKEN
        for node in alike.nodes if common < len(tokens) else ():
            if node.block not in without:
                while common < len(tokens) and node.tokens.startswith(tokens[: common + _TOKEN]):
                    found, common = node, common + _TOKEN
        return found, common
