"""Which unreferenced block loses its content first: eviction policies by name, one file each."""

from kvlab.kv.eviction.base import EVICTION_POLICIES, EvictionPolicy, RankedEviction, check_victims
from kvlab.kv.eviction.lru import LruEviction

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "LruEviction", "RankedEviction", "check_victims"]
