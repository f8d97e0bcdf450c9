"""What sequences may still take of a pool, beyond the blocks that they have."""

from collections.abc import Sequence

from kvlab.kv.group_blocks import GroupBlocks


class Growth:
    """See KVCachePool."""

    def __init__(self, groups: Sequence[GroupBlocks], step_tokens: int, *, fork_shares: bool) -> None:
        """No step computes more than `step_tokens` of a slot."""
        self._groups, self._step_tokens, self._fork_shares = groups, step_tokens, fork_shares
        self._size = groups[0].tables.block_size

    def of_fork(self, tokens: int, known: int) -> int:
        """That of a slot that is to be forked from one with `known` tokens, copies of what it writes included."""
        if self._fork_shares and tokens <= known:
            return 0
        return sum(group.layers.most_blocks(tokens, self._size, 1, known // self._size) for group in self._groups)

    def of_slots(self, slots: Sequence[int], tokens: Sequence[int], to_compute: Sequence[int]) -> int:
        """That of slots that are open, copies of what they share and write included."""
        growth = 0
        for group in self._groups:
            tables, layers, allocator = group.tables, group.layers, group.ledger.allocator
            for slot, end, count in zip(slots, tokens, to_compute, strict=True):
                behind = -(-end // self._size) - int(tables.counts[slot])
                if layers.window is not None:  # what others hold too does not come free when the slot gives it back
                    own = sum(allocator.ref_count(block) == 1 for block in tables.blocks(slot))
                    computed = max(count, 1) + int(self._groups[0].tables.in_flight[slot])
                    most = layers.most_blocks(end, self._size, min(self._step_tokens, computed))
                    behind = min(behind, most - own)
                growth += max(behind, 0)
            if group.copies:
                growth += len(group.copies.find(list(slots), list(tokens)))
        return growth
