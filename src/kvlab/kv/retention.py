"""How long cached blocks are kept: pins, a time to live and quotas of tenants, in front of any eviction policy."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from kvlab.kv.eviction import EvictionPolicy
from kvlab.kv.journal import BlockEvent, BlockJournal
from kvlab.kv.prefix import Prefix, salt_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What is kept, in blocks, and for how long, in seconds since the last use. None: no limit."""

    pinned: int = 0  # blocks that may be pinned
    pin_ttl_s: float | None = None
    ttl_s: float | None = None
    quota: int | None = None  # blocks of a tenant, in use or not; beyond it, its own are evicted first


class Tenant:
    """The content under one salt. `queue` has its blocks that nobody references, but for pinned ones."""

    def __init__(self, salt: bytes, queue: EvictionPolicy) -> None:
        self.salt = salt
        self.queue = queue
        self.contents = 0  # blocks with content, in use or not
        self.pinned = 0  # of those, pinned ones


class Retention(EvictionPolicy):
    """An eviction policy that keeps some content longer than others. Blocks that nobody references are evicted

    1. of tenants that have more blocks than their quota: of the one that has most, in the policy's order,
    2. then all others, in the policy's order,
    3. pinned ones when nothing else is left, the one first that was not used for longest.

    Before any of them, `expire` gives up what was not used for its time to live. A pin that was not used for its
    own time ends: its blocks are as if they had just been let go.

    No block goes before a cached one that continues its content. Within a queue the policy sees to that. A pin is
    of a whole prefix, so that all before a pinned block is pinned too. Who uses a block uses all before it, so that
    neither a block's time nor its pin is over before those of the blocks that continue it.

    With quotas each tenant has a queue of the policy's beside the one that all share: twice the policy's time.
    There are few tenants over their quota, since each has that share of the pool. All else is O(1) a block.
    """

    def __init__(
        self, policy: Callable[[], EvictionPolicy], limits: Limits, journal: BlockJournal | None = None
    ) -> None:
        self.limits = limits
        self._policy = policy
        self._journal = journal
        self._now = 0.0
        self._queue = policy()
        # In the order in which they were let go, and when: blocks that nobody references.
        self._ordinary: OrderedDict[int, float] = OrderedDict()
        self._kept: OrderedDict[int, float] = OrderedDict()  # those that are pinned
        self._pinned: set[int] = set()  # in use or not
        self._nodes: dict[int, Prefix] = {}  # of all blocks with content
        self._tenants: dict[bytes, Tenant] = {}  # by salt, where there is a quota; one goes with its last content
        self._tenant_of: dict[int, Tenant] = {}
        self._over: dict[Tenant, None] = {}  # tenants that have more blocks than their quota
        self._asking: tuple[Tenant | None, int] = None, 0  # who is about to take blocks, and how many

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def kept(self) -> list[int]:
        return list(self._kept)

    def set_demand(self, salt: Hashable, blocks: int) -> None:
        if self.limits.quota is not None:
            self._asking = self._tenants.get(salt_bytes(salt)), blocks

    def pin(self, blocks: Sequence[int]) -> bool:
        new = [block for block in blocks if block not in self._pinned]
        tenant = self._tenant_of.get(new[0]) if new else None
        quota = self.limits.quota
        if len(self._pinned) + len(new) > self.limits.pinned or (
            tenant is not None and quota is not None and tenant.pinned + len(new) > quota
        ):
            return False
        self._pinned.update(new)
        if tenant is not None:
            tenant.pinned += len(new)
        return True

    def expire(self, now: float) -> list[int]:
        self._now, limits = now, self.limits
        if limits.pin_ttl_s is not None and (ended := _over(self._kept, limits.pin_ttl_s, now)):
            for block in ended:
                del self._kept[block]
                self._unpin(block)
            self._let_go(ended)
            if self._journal is not None:
                self._journal.add(BlockEvent.CACHED, ended)
        expired = [] if limits.ttl_s is None else _over(self._ordinary, limits.ttl_s, now)
        for block in expired:
            self.remove(block)
        return expired

    def next_expiry(self) -> float:
        queues = (self._ordinary, self.limits.ttl_s), (self._kept, self.limits.pin_ttl_s)
        ends = [next(iter(ages.values())) + ttl_s for ages, ttl_s in queues if ages and ttl_s is not None]
        return min(ends, default=math.inf)

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._kept)

    def add(self, block: int, parent: int | None = None) -> None:
        self.add_all([block], self._nodes)

    def add_all(self, blocks: Sequence[int], contents: Mapping[int, Prefix]) -> None:
        kept = [block for block in blocks if block in self._pinned] if self._pinned else []
        if kept:
            self._kept.update(dict.fromkeys(kept, self._now))
            if self._journal is not None:
                self._journal.add(BlockEvent.PINNED, kept)
        self._let_go([block for block in blocks if block not in self._pinned] if kept else blocks)

    def remove(self, block: int) -> None:
        if block in self._kept:
            del self._kept[block]
        else:
            self._queue.remove(block)
            self._take_out(block)

    def victim(self) -> int:
        return self.victims(1)[0]

    def victims(self, count: int) -> list[int]:
        victims: list[int] = []
        while len(victims) < count:
            if (tenant := self._first_to_give()) is not None:
                part = [tenant.queue.victim()]
                self._queue.remove(part[0])
                del self._ordinary[part[0]]
                self.quota_evictions += 1
            elif self._ordinary:
                part = self._queue.victims(min(count - len(victims), len(self._ordinary)))
                for block in part:
                    self._take_out(block)
            else:
                part = [self._kept.popitem(last=False)[0]]
                self._unpin(part[0])
                self.pinned_evictions += 1
            for block in part:
                self._disown(block)
            victims += part
        return victims

    def _first_to_give(self) -> Tenant | None:
        """Of the tenants that have more than their quota and a block that could go, the one that has most."""
        if not self._tenants:
            return None
        asker, wanted = self._asking
        counts = {tenant: tenant.contents for tenant in self._over}
        if asker is not None and asker.contents + wanted > (self.limits.quota or 0):
            counts[asker] = asker.contents + wanted
        return max((tenant for tenant in counts if len(tenant.queue)), key=counts.__getitem__, default=None)

    def blocks(self) -> Iterable[int]:
        return [*self._ordinary, *self._kept]

    def filled(self, contents: Mapping[int, Prefix]) -> None:
        self._queue.filled(contents)
        self._nodes.update(contents)
        if self.limits.quota is None:
            return
        for block, node in contents.items():
            tenant = self._tenant_of[block] = self._tenant(node)
            tenant.contents += 1
            if tenant.contents > self.limits.quota:
                self._over[tenant] = None
        for tenant, blocks in self._by_tenant(contents):
            tenant.queue.filled({block: contents[block] for block in blocks})

    def used(self, blocks: Sequence[int]) -> None:
        self._queue.used(blocks)
        for tenant, part in self._by_tenant(blocks):
            tenant.queue.used(part)

    def forget(self, blocks: Sequence[int]) -> None:
        self._queue.forget(blocks)
        for block in blocks:
            del self._nodes[block]
            if block in self._pinned:
                self._unpin(block)
            self._disown(block)

    def broken(self) -> Iterator[tuple[str, str]]:
        if set(self._queue.blocks()) != self._ordinary.keys() or self._kept.keys() & self._ordinary.keys():
            yield "eviction", "its queue has other blocks than those that are cached and not pinned"
        if len(self._pinned) > self.limits.pinned:
            yield "pins", f"{len(self._pinned)} blocks, of {self.limits.pinned} that may be pinned"
        for block in sorted(self._pinned | self._kept.keys() | self._ordinary.keys()):
            node, is_pinned = self._nodes.get(block), block in self._pinned
            before = node.parent if node is not None else None
            if node is None or node.block != block:
                yield f"block {block}", "cached or pinned without content"
            elif block in (self._ordinary if is_pinned else self._kept):
                yield f"block {block}", "pinned, but not kept" if is_pinned else "kept, but not pinned"
            elif is_pinned and before is not None and before.parent and before.block not in self._pinned:
                yield f"block {block}", f"pinned behind block {before.block}, which is not"
        yield from self._broken_quotas()

    def _broken_quotas(self) -> Iterator[tuple[str, str]]:
        if self.limits.quota is None:
            return
        blocks_by_salt: defaultdict[bytes, set[int]] = defaultdict(set)
        for block, node in self._nodes.items():
            blocks_by_salt[_root(node).tokens].add(block)
        for tenant in self._tenants.values():
            mine = blocks_by_salt[tenant.salt]
            if (len(mine), len(mine & self._pinned)) != (tenant.contents, tenant.pinned):
                counted = f"counted {tenant.contents} and {tenant.pinned}"
                yield f"salt {tenant.salt!r}", f"{len(mine)} blocks, {len(mine & self._pinned)} pinned; {counted}"
            if set(tenant.queue.blocks()) != mine & self._ordinary.keys():
                yield f"salt {tenant.salt!r}", "its queue has other blocks than those that are cached"
            if (tenant in self._over) != (tenant.contents > self.limits.quota):
                yield f"salt {tenant.salt!r}", f"{tenant.contents} blocks, quota {self.limits.quota}: not noted so"
        if sum(tenant.contents for tenant in self._tenants.values()) != len(self._nodes):
            yield "quotas", "not every content has a tenant"

    def _let_go(self, blocks: Sequence[int]) -> None:
        """Blocks that are not pinned enter the policy's queues, and are as old as of now."""
        self._queue.add_all(blocks, self._nodes)
        self._ordinary.update(dict.fromkeys(blocks, self._now))
        for tenant, part in self._by_tenant(blocks):
            tenant.queue.add_all(part, self._nodes)

    def _take_out(self, block: int) -> None:
        """A block that is not pinned leaves, but for the policy's own queue."""
        del self._ordinary[block]
        if (tenant := self._tenant_of.get(block)) is not None:
            tenant.queue.remove(block)

    def _unpin(self, block: int) -> None:
        self._pinned.remove(block)
        if (tenant := self._tenant_of.get(block)) is not None:
            tenant.pinned -= 1

    def _disown(self, block: int) -> None:
        """The content of a block, which is in no queue, is gone or about to go: its tenant has one less."""
        tenant, quota = self._tenant_of.pop(block, None), self.limits.quota
        if tenant is None or quota is None:
            return
        tenant.queue.forget([block])
        tenant.contents -= 1
        if tenant.contents <= quota:
            self._over.pop(tenant, None)
        if not tenant.contents:
            del self._tenants[tenant.salt]

    def _by_tenant(self, blocks: Iterable[int]) -> list[tuple[Tenant, list[int]]]:
        """Blocks in their order, those of a tenant that follow each other together; none without a quota."""
        if not self._tenants:
            return []
        return [(tenant, list(part)) for tenant, part in groupby(blocks, self._tenant_of.__getitem__)]

    def _tenant(self, node: Prefix) -> Tenant:
        """Whose content this is: most often the tenant of the block before it."""
        while (parent := node.parent) is not None:
            if parent.block is not None and (known := self._tenant_of.get(parent.block)) is not None:
                return known
            node = parent
        if node.tokens not in self._tenants:
            self._tenants[node.tokens] = Tenant(node.tokens, self._policy())
        return self._tenants[node.tokens]


def _over(ages: OrderedDict[int, float], ttl_s: float, now: float) -> list[int]:
    """The blocks that were let go at least `ttl_s` ago."""
    return list(takewhile(lambda block: ages[block] + ttl_s <= now, ages))


def _root(node: Prefix) -> Prefix:
    while node.parent is not None:
        node = node.parent
    return node
