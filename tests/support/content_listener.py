"""Who hears what a pool's prefix index can find, and keeps account of it."""

from __future__ import annotations

from array import array
from ast import literal_eval
from collections import Counter
from dataclasses import dataclass, field

from kvlab.core import Salt
from kvlab.kv.content_log import Cleared, ContentEvent, ContentLog, Removed
from kvlab.kv.pool import BlockPool
from kvlab.kv.prefix import Prefix
from kvlab.kv.tiers.base import Key

Content = tuple[int, Salt, tuple[int, ...]]  # a group of layers, a salt, and all tokens of a prefix


@dataclass
class ContentListener:
    """Knows a pool by its events alone. An event that contradicts those before it is an assertion."""

    contents: set[Content] = field(default_factory=set)
    heard: Counter[str] = field(default_factory=Counter)
    _names: dict[Key, Content] = field(default_factory=dict)

    @classmethod
    def to(cls, pool: BlockPool) -> ContentListener:
        """Listens to a pool that is empty."""
        pool.allocator.content_log = ContentLog(has_groups=len(pool.groups) > 1)
        return cls()

    def hear(self, pool: BlockPool) -> None:
        """Take the events since the last call."""
        assert pool.allocator.content_log is not None
        for event in pool.allocator.content_log.take():
            self._take(event)

    def _take(self, event: ContentEvent) -> None:
        self.heard[type(event).__name__] += 1
        if isinstance(event, Cleared):
            self.contents.clear()
        elif isinstance(event, Removed):
            for key in event.keys:
                assert self._names[key][0] == event.group
                self.contents.remove(self._names[key])
        else:
            _, salt, tokens = (
                (0, event.salt, ()) if event.parent is None else self._before(event.parent, event.nodes)
            )
            for key, part in zip(event.keys, [node.tokens for node in event.nodes], strict=True):
                tokens = (*tokens, *array("q", part))
                content = self._names[key] = event.group, salt, tokens
                assert content not in self.contents
                self.contents.add(content)

    def _before(self, parent: Key, nodes: list[Prefix]) -> Content:
        """What is before an event's contents: of layers with states nobody may ever have heard of it."""
        if parent not in self._names:
            assert nodes[0].parent is not None
            self._names[parent] = _content(nodes[0].parent)
        return self._names[parent]


def findable(pool: BlockPool) -> set[Content]:
    """What a pool's index has in blocks, read from its tree."""
    return {_content(node) for node in pool.index.nodes() if node.block is not None}


def _content(node: Prefix) -> Content:
    path, at = [], node
    while at.parent is not None:
        path.append(at.tokens)
        at = at.parent
    group = int.from_bytes(path.pop()) if len(path[-1]) == 4 else 0
    return group, literal_eval(at.tokens.decode()), tuple(array("q", b"".join(reversed(path))))
