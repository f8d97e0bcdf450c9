"""The tiers of a configuration."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.config import KVConfig, format_bytes, parse_bytes
from kvlab.errors import ConfigError
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.sizing import PoolSize
from kvlab.kv.storage import KVStorage
from kvlab.kv.tiers.base import Link
from kvlab.kv.tiers.host import BlockPages, HostStore
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.tier import Tier


def host_pages(kv: KVConfig, pool: PoolSize) -> int:
    """Blocks that `kv.offload` holds. Raises ConfigError, saying what would do, where it holds none."""
    if kv.offload is None:
        return 0
    page_bytes = pool.block_size * pool.bytes_per_token
    pages = parse_bytes(kv.offload, key="kv.offload") // page_bytes
    if not pages:
        text = f"holds no block: {pool.block_size} tokens take {format_bytes(page_bytes)}"
        raise ConfigError("kv.offload", kv.offload, f"{text}; {-(-page_bytes // 1024)}KiB would hold one")
    return pages


def build_offload(
    kv: KVConfig,
    pool: PoolSize,
    storage: KVStorage | None,
    *,
    links: Callable[[str], tuple[Link, Link]] | None = None,
) -> Offload | None:
    """The tiers behind a pool with this storage, None: without tensors, where `links` are those down to a tier and
    up from it, by its name. None without tiers. Raises ConfigError or CapacityError.
    """
    pages = host_pages(kv, pool)
    if not pages:
        return None
    page_bytes = pool.block_size * pool.bytes_per_token
    store = None if storage is None else HostStore(pages, page_bytes)
    down, up = (None, None) if links is None else links("host")
    host = Tier("host", pages, page_bytes, EVICTION_POLICIES.get(kv.offload_eviction)(), store, down=down, up=up)
    return Offload([host], None if storage is None else BlockPages(storage))
