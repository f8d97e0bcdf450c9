"""What a pool and its tiers have of a prompt, and what a slot takes of it once it is loaded."""

from collections.abc import Sequence

from kvlab.core import Salt
from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import Prefix, PrefixIndex, salt_bytes
from kvlab.kv.prefix_hits import PrefixHits, match, match_with_tiers
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.loads import Wait
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.swap import Swapped
from kvlab.kv.tiers.tier import Tier


class PrefixLookup:
    """Nothing is found: the look-up of a pool that shares no prefixes, and the base of the others."""

    most_part = 0  # tokens of a block that `find_part` may find

    def __init__(self, groups: Sequence[GroupBlocks]) -> None:
        self._groups = groups
        self._nothing = PrefixHits(0, [[] for _ in groups], 0, 0)

    def find(self, token_ids: Sequence[int], salt: Salt, swapped: Swapped | None = None) -> PrefixHits:
        """What there is of these tokens, which may be none; `swapped`: and were swapped out under this ticket."""
        return self._nothing

    def find_part(self, token_ids: Sequence[int], salt: Salt, hits: PrefixHits) -> tuple[Prefix | None, int]:
        """The content that begins with most of what follows these hits, and how many tokens that is, where parts of
        blocks are found, too. The last token is run in any case.
        """
        return None, 0

    def receive(self, slot: int, wait: Wait) -> None:
        """What a slot waited for is there, or not all of it: the slot has the tokens that came."""


class PoolLookup(PrefixLookup):
    """What is found is in the pool, which has no tiers; with `parts`, of the block behind it, too."""

    def __init__(
        self, groups: Sequence[GroupBlocks], index: PrefixIndex, offload: Offload, *, parts: bool = False
    ) -> None:
        super().__init__(groups)
        self._index, self._offload, self.most_part = index, offload, index.block_size - 1 if parts else 0

    def find(self, token_ids: Sequence[int], salt: Salt, swapped: Swapped | None = None) -> PrefixHits:
        return match(self._index, self._groups, token_ids, salt) if token_ids else self._nothing

    def find_part(self, token_ids: Sequence[int], salt: Salt, hits: PrefixHits) -> tuple[Prefix | None, int]:
        size, (blocks, *_) = self._index.block_size, hits.entries
        start = hits.count * size
        behind = token_ids[start : min(start + size, len(token_ids) - 1)]
        if not self.most_part or hits.keys or not behind:
            return None, 0
        node = self._groups[0].ledger.allocator.content(blocks[-1]) if blocks else None
        return self._index.longest_part(node, behind, salt, self._groups[0].sharing.pending)


class TierLookup(PoolLookup):
    """Behind the blocks in the pool come those in tiers. The slot has the former at once; of the latter it takes
    what came, and computes the rest.
    """

    def find(self, token_ids: Sequence[int], salt: Salt, swapped: Swapped | None = None) -> PrefixHits:
        hits = super().find(token_ids, salt)
        if not token_ids or not self._offload.holds_any:
            return hits
        (blocks,) = hits.entries
        node = self._groups[0].ledger.allocator.content(blocks[-1]) if blocks else None
        keys = self._offload.find(salt_bytes(salt), node, self._index.parts(token_ids, len(blocks)), len(blocks))
        tail = 0
        if swapped is not None and swapped.tail is not None and self._offload.source_of(swapped.tail) is not None:
            whole, rest = divmod(swapped.tokens, self._index.block_size)
            if len(blocks) + len(keys) == whole:
                keys.append(swapped.tail)
                tail = rest
        ready = hits.ready
        return PrefixHits(ready + len(keys), [[*blocks, *keys]], ready, ready, keys, tail) if keys else hits

    def receive(self, slot: int, wait: Wait) -> None:
        (group,), tiers = self._groups, wait.loaded()
        has_tail = wait.tail and len(tiers) == len(wait.keys)
        whole = len(tiers) - bool(has_tail)
        if group.sharing.extend_loaded(slot, wait.first, whole, wait.tail if has_tail else 0):
            self._offload.count_hits(tiers[:whole])
        if len(tiers) < len(wait.keys):  # another slot may wait for the same blocks, and write them too
            group.copies.watch(slot)


class WindowLookup(PoolLookup):
    """Where layers have windows, of each group some blocks are in the pool and others in tiers, in any order: of a
    window's group the pool may have the last, of the group with full attention the first. The slot has none before
    all are there, and begins anew if one cannot be loaded.
    """

    def find(self, token_ids: Sequence[int], salt: Salt, swapped: Swapped | None = None) -> PrefixHits:
        without: set[Tier] = set()
        while token_ids and self._offload.holds_any:
            hits = match_with_tiers(self._index, self._groups, self._offload, token_ids, salt, without)
            if not hits.keys:
                break
            useless = self._useless(hits, token_ids, salt)
            if not useless:
                return hits
            without |= useless
        return super().find(token_ids, salt)

    def _useless(self, hits: PrefixHits, token_ids: Sequence[int], salt: Salt) -> set[Tier]:
        """The tiers of which loads would cost more than they spare."""
        asked = dict[Tier, list[Key]]()
        for key in hits.keys:
            tier = self._offload.source_of(key, hits.without)
            if tier is not None and type(tier).is_worth is not Tier.is_worth:
                asked.setdefault(tier, []).append(key)
        in_pool = super().find(token_ids, salt).count if asked else 0
        return {tier for tier, keys in asked.items() if not tier.is_worth(keys, in_pool, hits.count - in_pool)}

    def receive(self, slot: int, wait: Wait) -> None:
        tiers = wait.loaded()
        is_whole = len(tiers) == len(wait.keys)
        for group in self._groups:
            if is_whole:
                group.sharing.place_loaded(slot, wait.first)
            else:
                group.restart(slot)
        if is_whole:
            self._offload.count_hits(dict(zip(wait.entries, tiers, strict=True)).values())
