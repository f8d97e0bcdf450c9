"""Which contents of whole blocks a pool can find, as events: what became findable, and what is gone."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvlab.core import Salt
from kvlab.kv.prefix import DIGEST, Prefix, PrefixPart
from kvlab.kv.tiers.base import Key, key_behind, key_of

_TOKEN_BYTES = 8  # the tokens of a root's child that stands for a group are fewer


@dataclass(slots=True)
class Stored:
    """Blocks behind each other that can be found from now on, by the keys of their contents. Before the first is
    the content `parent`; None: it begins a prompt, under this `salt`.
    """

    keys: list[Key]
    parent: Key | None
    nodes: list[Prefix]  # of the keys, in a pool of this process; they have the tokens
    group: int  # of layers
    salt: Salt
    blocks: list[int] = field(default_factory=list)  # where each is, in a pool of this process


@dataclass(slots=True)
class Removed:
    """Contents of a group of layers that are in no block of the pool any more."""

    keys: list[Key]
    group: int


@dataclass(slots=True)
class Cleared:
    """No content is in the pool any more."""


ContentEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class ContentLog:
    """Takes events of an allocator whose `contents` it is, until `take` is called. A block whose step is prepared
    can be found already, by sequences of the same step; where that fails, its content is removed again.
    """

    has_groups: bool = False  # whether the pool has several groups of layers
    _events: list[ContentEvent] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)  # events before each step that is not the first
    _others: list[ContentLog] = field(default_factory=list)

    def beside(self) -> ContentLog:
        """Another log of the same events from now on, for another reader."""
        self._others.append(ContentLog(self.has_groups))
        return self._others[-1]

    def stored(self, contents: Mapping[int, Prefix]) -> None:
        """These blocks can be found."""
        for other in self._others:
            other.stored(contents)
        event: Stored | None = None
        for block, node in contents.items():
            if isinstance(node, PrefixPart):  # which no other pool, and no router, knows of
                continue
            if event is None or node.parent is not event.nodes[-1]:
                event = self._stored(node)
                self._events.append(event)
            else:
                if not hasattr(node, "key"):
                    node.key = key_behind(event.keys[-1], node.tokens)
                event.keys.append(node.key)
                event.nodes.append(node)
            event.blocks.append(block)

    def removed(self, nodes: Iterable[Prefix]) -> None:
        """These contents cannot be found any more."""
        if self._others:
            nodes = list(nodes)
        for other in self._others:
            other.removed(nodes)
        event: Removed | None = None
        for node in nodes:
            if isinstance(node, PrefixPart):
                continue
            group = self._group_of(node)
            if event is None or event.group != group:
                event = Removed([], group)
                self._events.append(event)
            event.keys.append(node.key if hasattr(node, "key") else key_of(node))

    def cleared(self) -> None:
        """No content is left: what the events before had is of no interest any more."""
        self._events, self._starts = [Cleared()], [0] * len(self._starts)
        for other in self._others:
            other.cleared()

    def next_step(self) -> None:
        """What comes now is of the next of several steps that are taken at once."""
        for other in self._others:
            other.next_step()
        self._starts.append(len(self._events))

    @property
    def steps(self) -> int:
        """How many steps are behind the one that events are of, of those since the last call."""
        return len(self._starts)

    def take(self) -> list[ContentEvent]:
        """The events since the last call, in order."""
        events, self._events, self._starts = self._events, [], []
        return events

    def take_by_step(self) -> list[list[ContentEvent]]:
        """The same, those of each step that was taken since."""
        places = [0, *self._starts, len(self._events)]
        events = self.take()
        return [events[start:end] for start, end in pairwise(places)]

    def _stored(self, node: Prefix) -> Stored:
        group, before = self._group_of(node), node.parent
        if before is not None and not _is_above_tokens(before):
            return Stored([key_of(node)], key_of(before), [node], group, None)
        root = before.parent if before is not None and before.parent is not None else before
        return Stored([key_of(node)], None, [node], group, None if root is None else _salt_of(root))

    def _group_of(self, node: Prefix) -> int:
        """The group of layers that a content is of: what stands at the beginning of its prefix says so."""
        at: Prefix | None = node
        while self.has_groups and at is not None and at.parent is not None:
            if _is_above_tokens(at):
                return int.from_bytes(at.tokens)
            at = at.parent
        return 0


def _is_above_tokens(node: Prefix) -> bool:
    """Whether a node is a root, or stands for a group of layers behind one."""
    return node.parent is None or len(node.tokens) < _TOKEN_BYTES


def _salt_of(root: Prefix) -> Salt:
    """The salt of a root; of a long one its digest."""
    text = root.tokens
    if text.startswith(DIGEST):
        return DIGEST.decode() + text.removeprefix(DIGEST).hex()
    salt: Salt = literal_eval(text.decode())
    return salt
