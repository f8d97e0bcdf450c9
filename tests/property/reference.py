"""What a pool should hold, in plain Python: every sequence's tokens, and the K and V that follow from them."""

from __future__ import annotations

import zlib
from array import array
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from kvlab.core import Salt
from kvlab.kv.formats import FORMATS
from kvlab.kv.pool import BlockPool
from kvlab.kv.prefix import Prefix
from kvlab.kv.retention import Retention
from kvlab.kv.sharing import PrefixSharing
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")

Key = tuple[Salt, tuple[int, ...]]  # a salt and all tokens of a prefix


@lru_cache(maxsize=20_000)
def kv_of(salt: Salt, tokens: tuple[int, ...]) -> torch.Tensor:
    """K and V of the last of these tokens, `[layers, 2, kv_heads, head_dim]`: of all before it, as in a decoder."""
    seed = [zlib.crc32(repr(salt).encode()), *tokens]
    shape = (SPEC.num_layers, 2, SPEC.num_kv_heads, SPEC.head_dim)
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


def computed_dtype(storage: KVStorage) -> torch.dtype:
    """What a model gives to be stored: numbers of the storage's type, or what its formats are made of."""
    return storage.keys.dtype if storage.key_scales is None else torch.float32


@lru_cache(maxsize=20_000)
def stored_kv_of(salt: Salt, tokens: tuple[int, ...], dtypes: tuple[str, str]) -> torch.Tensor:
    """`kv_of` as it is read back from a storage of these formats of K and V."""
    both = zip(kv_of(salt, tokens).unbind(1), (FORMATS[dtype] for dtype in dtypes), strict=True)
    return torch.stack(
        [kind.unpack(*kind.pack(x.to(kind.dtype) if kind.is_plain else x)) for x, kind in both], dim=1
    )


def block_of(storage: KVStorage, block: int) -> torch.Tensor:
    """K and V of a block on every layer, `[layers, 2, kv_heads, block_size, head_dim]`, as float32."""
    kinds = (FORMATS[dtype] for dtype in storage.spec.dtypes)
    tensors = ((storage.keys, storage.key_scales), (storage.values, storage.value_scales))
    return torch.stack(
        [
            kind.unpack(cache[:, block], None if scales is None else scales[:, block])
            for kind, (cache, scales) in zip(kinds, tensors, strict=True)
        ],
        dim=1,
    )


@dataclass
class Content:
    """What one slot should hold. A slot that is not `told` has tokens that the pool does not know."""

    salt: Salt
    tokens: list[int]
    told: bool
    blocks: int
    length: int = 0  # computed: the next token has this position
    stored: int = 0  # in the blocks, a last token that is run again included
    pending: dict[int, int] = field(default_factory=dict)  # entries that a step will fill -> its slot
    hits: int = 0  # blocks that it found when it was opened
    part: int = 0  # tokens that it found of the one behind them
    known: int = 0  # tokens that it had then
    same_step: tuple[int, ...] = ()  # which of them a step was to fill
    resumed: bool = False

    def rewind(self, stored: Mapping[int, int], block_size: int) -> bool:
        """Slots that have `stored` so many tokens do not fill what they announced; True if this one counted on it,
        and has to compute what is not stored.
        """
        lost = [entry for entry, slot in self.pending.items() if slot in stored]
        if not lost:
            return False
        self.length = self.stored = max(min(lost) * block_size, stored[self.pending[min(lost)]])
        self.pending = {entry: slot for entry, slot in self.pending.items() if entry < min(lost)}
        return True

    def key(self, length: int) -> Key:
        return self.salt, tuple(self.tokens[:length])

    def kv(self, start: int, end: int) -> torch.Tensor:
        """`[layers, 2, kv_heads, tokens, head_dim]` of the positions from `start` to `end`."""
        if start == end:
            return torch.empty(SPEC.num_layers, 2, SPEC.num_kv_heads, 0, SPEC.head_dim)
        return torch.stack([kv_of(*self.key(position + 1)) for position in range(start, end)], dim=3)

    def stored_kv(self, length: int, storage: KVStorage) -> torch.Tensor:
        """The same of the first positions, at least one, as it is read back from a storage."""
        dtypes = storage.spec.dtypes
        return torch.stack([stored_kv_of(*self.key(position + 1), dtypes) for position in range(length)], dim=3)


@dataclass
class Guess:
    """Tokens that a slot's step computes behind those of its list, and the blocks that are there for them alone."""

    tokens: list[int]
    blocks: int


@dataclass
class Step:
    """A view that was neither advanced nor rolled back, and the layers that were written through it."""

    view: CacheView
    slots: list[int]
    new: list[int]
    written: set[int] = field(default_factory=set)


def look(pool: BlockPool, slots: list[int]) -> CacheView:
    """A view of what is stored, without a new token."""
    return CacheView(
        pool.tables,
        pool.storage,
        np.asarray(slots, dtype=np.int64),
        np.zeros(len(slots), dtype=np.int64),
        on_advance=lambda rows, new, kept: None,
        on_rollback=lambda rows: None,
    )


def indexed(pool: BlockPool) -> dict[Key, int]:
    """Every content that the pool's index says it has, and the block that is to hold it."""
    if not pool.shares_prefixes:
        return {}
    found = {}
    for block, node in pool.allocator._contents.items():
        root = _root(node)
        assert pool.index._roots[root.tokens] is root
        found[_salt(root.tokens), _tokens(node)] = block
    return found


@lru_cache
def _salt(text: bytes) -> Salt:
    salt: Salt = literal_eval(text.decode())
    return salt


def _root(node: Prefix) -> Prefix:
    return node if node.parent is None else _root(node.parent)


def _tokens(node: Prefix) -> tuple[int, ...]:
    if node.parent is None:
        return ()
    own = array("q")
    own.frombytes(node.tokens)
    return (*_tokens(node.parent), *own)


def state(pool: BlockPool) -> tuple[object, ...]:
    """All that a call which is refused has to leave as it was, the order of reuse and eviction included."""
    allocator, live = pool.allocator, sorted(pool.tables.live)
    policy, kept = allocator.eviction, tuple[object, ...]()
    if isinstance(policy, Retention):
        kept = (list(policy._ordinary.items()), list(policy._kept.items()), set(policy._pinned), list(policy._over))
        policy = policy._queue
    order = getattr(policy, "_order", None)
    cached = list(order) if order is not None else sorted(policy._evictable.values())  # type: ignore[attr-defined]
    sharing = pool._sharing
    slots = sharing._slots if isinstance(sharing, PrefixSharing) else {}
    contents = {
        slot: (list(each.tokens), id(each.node), list(map(id, each.pending)), each.computed, each.known)
        for slot, each in slots.items()
    }
    return (
        {slot: pool.tables.blocks(slot) for slot in live},
        {slot: (pool.get_seq_len(slot), int(pool.tables.stored[slot])) for slot in live},
        [allocator.ref_count(block) for block in range(allocator.num_blocks)],
        {slot: allocator.owners.blocks_of(slot) for slot in live},
        list(allocator._scratch),
        allocator.first_untouched,
        cached,
        kept,
        dict(getattr(policy, "hits", {})),
        indexed(pool),
        {id(node): node.uses for node in pool.index.nodes()},
        set(pool.index._roots),
        contents,
        set(sharing._pending) if isinstance(sharing, PrefixSharing) else set(),
        pool.tables.reserved.tolist(),
        dict(pool._step._proposed),
        set(sharing._late) if isinstance(sharing, PrefixSharing) else set(),
        set(pool.groups[0].copies._watched),
        pool.free_slot_count(),
        pool.free_token_capacity(),
        pool.stats(),
        pool.counters(),
    )
