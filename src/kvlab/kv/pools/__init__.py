"""KV backends by name: one file per kind of pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.registry import Registry

if TYPE_CHECKING:
    from kvlab.kv.pool import BlockPool

POOLS: Registry[type[BlockPool]] = Registry("kv.backend", __name__)
