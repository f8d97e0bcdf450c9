"""The tiers of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.config import KVConfig, format_bytes, parse_bytes
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.sizing import PoolSize
from kvlab.kv.tiers.base import Link, PageStore
from kvlab.kv.tiers.disk import DiskStore
from kvlab.kv.tiers.host import BlockPages, HostStore
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.tier import Tier

if TYPE_CHECKING:
    from kvlab.kv.storage import KVStorage

Links = Callable[[str], tuple[Link, Link]]  # down to a tier and up from it, by its name


def tier_pages(kv: KVConfig, pool: PoolSize, key: str) -> int:
    """Blocks that `kv.offload` or `kv.offload_disk` holds. Raises ConfigError, saying what would do, for none."""
    room = {"kv.offload": kv.offload, "kv.offload_disk": kv.offload_disk}[key]
    if room is None:
        return 0
    page_bytes = pool.block_size * pool.bytes_per_slot
    pages = parse_bytes(room, key=key) // page_bytes
    if not pages:
        text = f"holds no block: {pool.block_size} tokens take {format_bytes(page_bytes)}"
        raise ConfigError(key, room, f"{text}; {-(-page_bytes // 1024)}KiB would hold one")
    return pages


def build_offload(
    kv: KVConfig,
    pool: PoolSize,
    storage: KVStorage | None,
    *,
    links: Links | None = None,
    identity: Mapping[str, str] | None = None,
) -> Offload | None:
    """The tiers behind a pool with this storage, None: without tensors, where copies take the time of `links`. None
    without tiers. What is on a disk is of the model that `identity` describes. Raises ConfigError or CapacityError.
    """
    page_bytes = pool.block_size * pool.bytes_per_slot
    in_memory, on_disk = (tier_pages(kv, pool, key) for key in ("kv.offload", "kv.offload_disk"))

    def tier(name: str, pages: int, store: PageStore | None) -> Tier:
        down, up = (None, None) if links is None else links(name)
        policy = EVICTION_POLICIES.get(kv.offload_eviction)()
        return Tier(name, pages, page_bytes, policy, store, down=down, up=up)

    tiers, disk = [], None
    if on_disk:  # first, since it may be refused at no cost
        disk = None if storage is None else open_disk(kv, page_bytes, on_disk, identity or {})
        tiers.append(tier("disk", on_disk, disk))
    try:
        if in_memory:
            tiers.insert(0, tier("host", in_memory, None if storage is None else HostStore(in_memory, page_bytes)))
    except CapacityError:
        if disk is not None:
            disk.close()
        raise
    return Offload(tiers, None if storage is None else BlockPages(storage)) if tiers else None


def open_disk(kv: KVConfig, page_bytes: int, pages: int, identity: Mapping[str, str]) -> DiskStore:
    """The store of `kv.offload_dir`. Raises ConfigError without one, for one that cannot be used, and for more than
    its disk has room for.
    """
    if kv.offload_dir is None:
        text = "needs a directory for the blocks, as kv.offload_dir=/data/kv"
        raise ConfigError("kv.offload_disk", kv.offload_disk, text)
    store = DiskStore(Path(kv.offload_dir).expanduser(), identity, pages)
    needed, free = store.room(page_bytes)
    if needed > free:
        store.close()
        text = f"is more than there is on the disk of kv.offload_dir={kv.offload_dir}, which has"
        took = f"{format_bytes(free)} left; the files would take {format_bytes(needed)}"
        raise ConfigError("kv.offload_disk", kv.offload_disk, f"{text} {took}")
    return store
