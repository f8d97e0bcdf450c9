"""Contents that are in several blocks, as vLLM keeps equal blocks: its tables are append-only."""

from collections.abc import Sequence

from kvlab.kv.prefix import Prefix


class ContentCopies:
    """The blocks of a content beside the one that its node names, in the order in which they got it."""

    def __init__(self) -> None:
        self._others: dict[Prefix, list[int]] = {}

    def add(self, node: Prefix, block: int) -> None:
        """A content that has a block is in this one, too."""
        self._others.setdefault(node, []).append(block)

    def of(self, node: Prefix) -> Sequence[int]:
        """The other blocks of a content."""
        return self._others.get(node, ())

    def leave(self, blocks: Sequence[int], nodes: list[Prefix]) -> list[Prefix]:
        """These contents leave these blocks. Returns those that are in no other, whose nodes name none any more."""
        if not self._others:
            for node in nodes:
                node.block = None
            return nodes
        gone = []
        for block, node in zip(blocks, nodes, strict=True):
            others = self._others.get(node, [])
            if node.block != block:
                others.remove(block)
            elif others:
                node.block = others.pop(0)
            else:
                node.block = None
                gone.append(node)
            if not others:
                self._others.pop(node, None)
        return gone
