"""Between the pool and its tiers: what is evicted goes down, what a prompt hits comes up while others run."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from threading import Semaphore
from time import perf_counter

import numpy as np

from kvlab.errors import TierError
from kvlab.kv.prefix import Prefix, PrefixPart
from kvlab.kv.tiers.base import Key, Page, PageStore, key_behind, key_of
from kvlab.kv.tiers.host import BlockPages, HostStore
from kvlab.kv.tiers.loads import Load, Wait, read_pages, worth_loading
from kvlab.kv.tiers.swap import Swaps
from kvlab.kv.tiers.tier import Tier

_BACKLOG = 256  # pages that may wait to be written to a store other than main memory; more are not kept


class Offload:
    """The tiers of a pool, the fastest first; there may be none.

    Content that the pool evicts goes to the first tier, what that evicts to the next. A prompt's content is looked
    up in all of them (`find`); the pool gives a slot blocks for what is found, and `load` copies it there, in a
    thread for each tier. Other slots that want content that is being loaded wait for the same load. Everything else
    is done by the thread that steps. A page that cannot be read is a miss, and leaves its tier.

    Without `pages` there are no bytes, as in a simulated engine: a load then takes the time of its tier's link.
    """

    def __init__(self, tiers: Sequence[Tier], pages: BlockPages | None = None) -> None:
        self.tiers = tiers
        self.now = 0.0  # on the engine's clock, as the pool was told last
        self.waiting: dict[int, Wait] = {}  # by slot
        self._pages = pages
        self.loads: list[Load] = []
        self.loading: dict[Key, Load] = {}  # by content
        self._holds: dict[Key, Tier] = {}  # what is loaded next, whatever is evicted to another tier meanwhile
        self._threads: dict[Tier, ThreadPoolExecutor] = {}
        self._room = {tier: Semaphore(_BACKLOG) for tier in tiers}
        self._written: deque[tuple[Tier, Key, float, bool]] = deque()  # by threads: seconds, whether it is there
        self.swaps = Swaps(self.store)

    def evicted(self, blocks: Sequence[int], contents: Mapping[int, Prefix]) -> None:
        """The pool is about to drop the contents of these blocks, in this order."""
        for block in blocks:
            if not isinstance(content := contents[block], PrefixPart):
                self.store(key_of(content), block)

    def store(self, key: Key, block: int) -> Tier | None:
        """The tier that stores a content: the first, which gets a copy unless another does. None: no room."""
        tier, first = self._tier_of(key), self.tiers[0]
        if tier is first:
            first.refresh(key)
        else:
            start = perf_counter()
            page = None if self._pages is None or isinstance(first.store, HostStore) else self._copy_of(block)
            self._keep(0, key, page, block)
            if self._pages is not None:
                first.counts.stored_s += perf_counter() - start
        return self._tier_of(key, stored=True)

    def find(self, root: bytes, node: Prefix | None, parts: Iterable[bytes], before: int = 0) -> list[Key]:
        """The contents of these blocks of tokens that are in a tier, up to the first that is not or is not worth a
        load; they come behind those of `node`, or of the `root` without one: so many blocks.
        """
        keys: list[Key] = []
        if not self.holds_any:
            return keys
        key = key_behind(b"", root) if node is None else key_of(node)
        for tokens in parts:
            key = key_behind(key, tokens)
            if not self.has(key):
                break
            keys.append(key)
        if any(type(tier).wanted is not Tier.wanted for tier in self.tiers):
            keys = worth_loading(keys, before, self.source_of)
        return keys

    @property
    def holds_any(self) -> bool:
        """Whether any tier has a content."""
        return any(map(len, self.tiers))

    def has(self, key: Key, without: Collection[Tier] = ()) -> bool:
        """Whether a content is in a tier, or on its way from one; `without` these."""
        return key in self.loading or self._tier_of(key, without=without) is not None

    def source_of(self, key: Key, without: Collection[Tier] = ()) -> Tier | None:
        """The tier that a content would be loaded from; None: it is on its way, or in no other than these."""
        return None if key in self.loading else self._tier_of(key, without=without)

    def block_of(self, entry: int | Key) -> int | None:
        """A block as it is; of a content, the block that it is being loaded to, if it is."""
        if isinstance(entry, int):
            return entry
        load = self.loading.get(entry)
        return None if load is None else load.blocks[entry]

    def copy_s(self, keys: Sequence[Key]) -> float:
        """An estimate of the seconds that it takes to copy these contents to the first tier, as far as no tier has
        them, and all of them back.
        """
        first, missing = self.tiers[0], sum(self._tier_of(key, stored=True) is None for key in keys)
        if self._pages is not None:
            counts = first.counts
            copied, seconds = counts.stored + counts.loaded, counts.stored_s + counts.loaded_s
            return (missing + len(keys)) * (seconds / copied if copied else self._time_copy())
        links = ((first.down, missing), (first.up, len(keys)))
        return sum(link.seconds(pages * first.page_bytes) for link, pages in links if link is not None)

    def hold(self, keys: Sequence[Key], without: Collection[Tier] = ()) -> None:
        """These contents, which are in a tier that is not in `without`, stay there until they are loaded: `load` is
        called next.
        """
        self._holds = {}
        for key in reversed(keys):  # so that of a prefix the tail is older, and goes first
            if (tier := self.source_of(key, without)) is not None:
                tier.hold(key)
                self._holds[key] = tier

    def load(
        self,
        slot: int,
        first: int,
        keys: Sequence[Key],
        blocks: Sequence[int],
        entries: Sequence[int],
        *,
        tail: int = 0,
    ) -> None:
        """Bring contents that are held to these blocks of a slot, which are its tables' `entries`. What is being
        loaded already is in these blocks. If the last is of a block that is not full, it has `tail` tokens. What
        comes counts from block number `first` on: see Wait.
        """
        tiers: list[Tier] = []
        wait, wanted = Wait(first, keys, tiers, entries, tail=tail), dict[Tier, dict[Key, int]]()
        for key, block in zip(keys, blocks, strict=True):
            load = self.loading.get(key)
            tier = load.tier if load is not None else self._holds.get(key)
            if tier is None:
                raise RuntimeError(f"content {key.hex()} is in no tier")
            tiers.append(tier)
            if load is not None:
                load.users.add(slot)
                wait.loads.add(load)
            else:
                wanted.setdefault(tier, {})[key] = block
        for tier, pages in wanted.items():
            load = self._start(Load(tier, pages, slot, users={slot}))
            wait.loads.add(load)
            self.loads.append(load)
            self.loading.update(dict.fromkeys(pages, load))
        self.waiting[slot] = wait

    def arrived(self) -> dict[int, Wait]:
        """The slots whose loads are done by now, in the order in which they began to wait."""
        while self._written:
            tier, key, seconds, is_there = self._written.popleft()
            tier.counts.stored_s += seconds
            if not is_there:
                self._lose(tier, key)
        if not self.waiting:
            return {}
        for load in [load for load in self.loads if load.is_done(self.now)]:
            self._finish(load)
        done = [slot for slot, wait in self.waiting.items() if not wait.loads]
        return {slot: self.waiting.pop(slot) for slot in done}

    def leave(self, slot: int) -> None:
        """A slot that waits is about to be freed: nothing is written to its blocks afterwards."""
        wait = self.waiting.pop(slot, None)
        for load in () if wait is None else wait.loads:
            load.users.discard(slot)
            if load.owner != slot and load.owner in load.users:
                continue
            if load.copy is not None:
                if not load.users:
                    load.copy.cancel()
                self._finish(load)
            else:  # go on for what others wait for: the slot's other blocks are free from now on
                kept = {key for user in load.users for key in self.waiting[user].keys}
                for key in [key for key in load.blocks if key not in kept]:
                    del load.blocks[key], self.loading[key]
                    load.tier.release(key)
                if not load.users:
                    self.loads.remove(load)

    def next_arrival(self) -> float | None:
        """When a load is done; a time that has passed: any moment, as real ones are. None: none is on its way."""
        if any(not wait.loads for wait in self.waiting.values()):
            return 0.0
        return min((load.done_s for load in self.loads), default=None)

    def wait(self, seconds: float) -> None:
        """Let a real load get done, for so long at most."""
        wait_for([load.copy for load in self.loads if load.copy is not None], seconds, FIRST_COMPLETED)

    def count_hits(self, tiers: Iterable[Tier]) -> None:
        """A slot has a block from each of these tiers."""
        for tier in tiers:
            tier.counts.hits += 1

    def stats(self) -> dict[str, int]:
        """What PoolStats says of tiers."""
        if not self.tiers:
            return {}
        counted = {f"{tier.name}_blocks": len(tier) for tier in self.tiers if tier.is_counted}
        return counted | {"loading_sequences": len(self.waiting)}

    def counters(self, block_size: int) -> dict[str, int]:
        """What PoolCounters says of tiers."""
        if not self.tiers:
            return {}
        counts = [tier.counts for tier in self.tiers]
        counters = {
            "store_us": round(1e6 * sum(count.stored_s for count in counts)),
            "load_us": round(1e6 * sum(count.loaded_s for count in counts)),
            "failed_pages": sum(count.failed for count in counts),
            "swapped_out_blocks": self.swaps.blocks_out,
            "swapped_in_blocks": self.swaps.blocks_in,
        }
        for tier, count in zip(self.tiers, counts, strict=True):
            if tier.is_counted:
                counters[f"{tier.name}_stored_blocks"] = count.stored
                counters[f"{tier.name}_loaded_blocks"] = count.loaded
                counters[f"{tier.name}_hit_tokens"] = count.hits * block_size
        return counters

    def close(self) -> None:
        """Finish what is being copied, and close the stores."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        for tier in self.tiers:
            if tier.store is not None:
                tier.store.close()

    def _tier_of(self, key: Key, *, stored: bool = False, without: Collection[Tier] = ()) -> Tier | None:
        """The first that has a content, or stores it: what others only lend may be gone when it is wanted back."""
        for tier in self.tiers:
            if key in tier and (tier.is_counted or not stored) and tier not in without:
                return tier
        return None

    def _lose(self, tier: Tier, key: Key) -> None:
        """A tier has not what it should have, and forgets it."""
        tier.counts.failed += 1
        if key in tier:
            tier.drop(key)
            self.swaps.lost(tier, key)

    def _keep(self, level: int, key: Key, page: Page | None, block: int | None = None) -> None:
        """A content goes to a tier: its `page`, or that of the block; what has to go for it, to the next."""
        tier = self.tiers[level]
        if key in tier:
            tier.refresh(key)
            return
        store, queued = tier.store, tier.store is not None and not isinstance(tier.store, HostStore)
        if queued and not self._room[tier].acquire(blocking=False):
            return
        if (added := tier.add(key)) is None:
            if queued:
                self._room[tier].release()
            return
        place, gone = added
        if gone is not None and level + 1 < len(self.tiers):
            old = store.page(place).copy() if isinstance(store, HostStore) else None
            if store is None or old is not None:
                self._keep(level + 1, gone, old)
        tier.counts.stored += 1
        self._put(tier, place, key, gone, page, block)

    def _put(
        self, tier: Tier, place: int, key: Key, gone: Key | None, page: Page | None, block: int | None
    ) -> None:
        """Write a content: at once in main memory, else in the tier's thread; modelled, it takes its link."""
        store = tier.store
        if isinstance(store, HostStore):
            if page is not None:
                store.write(place, key, page)
            elif block is not None and self._pages is not None:
                self._pages.save(block, store.page(place))
        elif store is not None and page is not None:
            if gone is not None:
                self._thread(tier).submit(store.remove, place, gone)
            self._thread(tier).submit(self._write, tier, store, place, key, page)
        elif tier.down is not None:
            tier.down.transfer(self.now, tier.page_bytes)
            tier.counts.stored_s += tier.down.seconds(tier.page_bytes)

    def _write(self, tier: Tier, store: PageStore, place: int, key: Key, page: Page) -> None:
        """In a tier's thread."""
        start, is_there = perf_counter(), True
        try:
            store.write(place, key, page)
        except (OSError, TierError):
            is_there = False
        self._room[tier].release()
        self._written.append((tier, key, perf_counter() - start, is_there))

    def _copy_of(self, block: int) -> Page:
        page = np.empty(self.tiers[0].page_bytes, np.uint8)
        if self._pages is not None:
            self._pages.save(block, page)
        return page

    def _time_copy(self) -> float:
        """Seconds that the copy of a block takes, tried once."""
        start = perf_counter()
        self._copy_of(0)
        return perf_counter() - start

    def _start(self, load: Load) -> Load:
        tier, pages = load.tier, self._pages
        if pages is None or tier.store is None:
            num_bytes = tier.bytes_of(load.blocks)
            load.done_s = self.now if tier.up is None else tier.up.transfer(self.now, num_bytes)
            load.seconds = 0.0 if tier.up is None else tier.up.seconds(num_bytes)
            return load
        wanted = [(tier.place(key), key, block) for key, block in load.blocks.items()]
        load.copy = self._thread(tier).submit(read_pages, tier.store, wanted, pages)
        return load

    def _finish(self, load: Load) -> None:
        """A load is done or cancelled, or is waited for."""
        self.loads.remove(load)
        failed = set(load.blocks) if load.is_lost else set[Key]()
        is_cancelled = load.copy is not None and load.copy.cancelled()
        if load.copy is not None and not is_cancelled:
            failed, load.seconds = load.copy.result()
        for key in reversed(load.blocks):
            del self.loading[key]
            load.tier.release(key)
            if key in failed:
                self._lose(load.tier, key)
        load.tier.counts.loaded += 0 if is_cancelled else len(load.blocks) - len(failed)
        load.tier.counts.loaded_s += load.seconds
        for slot in load.users:
            self.waiting[slot].loads.discard(load)
            self.waiting[slot].failed |= failed

    def _thread(self, tier: Tier) -> ThreadPoolExecutor:
        if tier not in self._threads:
            self._threads[tier] = ThreadPoolExecutor(1, thread_name_prefix=f"kvlab-{tier.name}")
        return self._threads[tier]
