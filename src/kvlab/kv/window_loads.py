"""Content from tiers for layers with sliding windows: each group of layers waits for what the pool lacks of it."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.prefix_hits import TierHits, match_with_tiers
from kvlab.kv.protocol import Salt
from kvlab.kv.retention import Retention
from kvlab.kv.tiers.loads import Wait
from kvlab.kv.tiers.offload import Offload


class WindowLoads:
    """Opens slots whose groups share some blocks with the pool and have others loaded, in any order: of a window's
    group the pool may have the last blocks, of the group with full attention the first. All groups take what was
    loaded in at once, or begin anew.
    """

    def __init__(
        self, groups: Sequence[GroupBlocks], index: PrefixIndex, offload: Offload, retention: Retention | None
    ) -> None:
        self._groups, self._index, self._offload, self._retention = groups, index, offload, retention

    def match(self, token_ids: Sequence[int], salt: Salt) -> TierHits | None:
        """What pool and tiers have of a prompt, if some of it is to be loaded."""
        if not self._offload.holds_any:
            return None
        found = match_with_tiers(self._index, self._groups, self._offload, token_ids, salt)
        return found if found.keys else None

    def open(
        self,
        hits: TierHits,
        counts: Sequence[int],
        token_ids: Sequence[int],
        salt: Salt,
        *,
        keep_free: int,
        resumed: bool,
    ) -> int:
        """A slot whose tables have `counts` entries, and wait for some of them. Raises OutOfBlocksError."""
        offload, ledger, plans = self._offload, self._groups[0].ledger, []
        for group, entries, count in zip(self._groups, hits.entries, counts, strict=True):
            blocks = [each if isinstance(each, int) else offload.loading_block(each) for each in entries]
            plans.append((group, entries, blocks, max(count - hits.count, 0)))
        demand = sum(blocks.count(None) + behind for _, _, blocks, behind in plans)
        shared = [block for _, _, blocks, _ in plans for block in blocks if block is not None]
        ledger.check_room(demand + sum(not ledger.allocator.ref_count(block) for block in shared), keep_free)
        offload.hold(hits.keys)
        if self._retention is not None:
            self._retention.ask(salt, demand)
        for group, _, blocks, _ in plans:  # before any is allocated, which may be another's else
            slot = group.ledger.open_partly(blocks, hits.count - len(blocks))
        loaded, numbers = list[int](), list[int]()
        for group, entries, blocks, behind in plans:
            first = hits.count - len(blocks)
            group.ledger.fill(slot, [first + place for place, block in enumerate(blocks) if block is None])
            group.ledger.append(slot, behind)
            group.tables.stored[slot] = hits.count * group.tables.block_size  # from `receive` on
            own = [first + place for place, each in enumerate(entries) if isinstance(each, bytes)]
            loaded += group.tables.entries[slot, own].tolist()
            numbers += own
            if group.sharing is not None:
                group.sharing.open(slot, token_ids, salt, (), resumed=resumed)
        if self._retention is not None:
            self._retention.ask(salt, 0)
        ledger.allocator.touch([block for part in hits.entries for block in part if isinstance(block, int)])
        offload.load(slot, hits.count, hits.keys, loaded, entries=numbers)
        return slot

    def receive(self, slot: int, wait: Wait) -> None:
        """What a slot waited for is there, or not all of it: then it begins anew."""
        tiers = wait.loaded()
        is_whole = len(tiers) == len(wait.keys)
        for group in self._groups:
            if not is_whole:
                group.restart(slot)
            elif group.sharing is not None:
                group.sharing.take_in(slot, wait.first)
        if is_whole:
            self._offload.count_hits(dict(zip(wait.entries, tiers, strict=True)).values())
