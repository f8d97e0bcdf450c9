"""Ragged batches over a pool whose every other token slot holds values that would show if they were read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.attention.base import AttentionSpec
from kvlab.kv.formats import FORMATS
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec, PageLayout
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView

KV_HEADS, LAYERS, LAYER = 2, 2, 1
POISON = 1e4


@dataclass(frozen=True)
class RaggedBatch:
    """A step's queries, the view they attend over, and each sequence's K and V `[kv_heads, length, head_dim]`."""

    q: torch.Tensor
    view: CacheView
    pool: PagedKVCachePool
    slots: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_spec(
    group: int,
    head_dim: int,
    dtype: str = "float32",
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_dtypes: tuple[str, str] | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        device="cpu",
        sliding_window=window,
        soft_cap=soft_cap,
        kv_dtypes=kv_dtypes,
    )


def make_batch(
    spec: AttentionSpec,
    block_size: int,
    sequences: list[tuple[int, int]],
    seed: int = 0,
    layout: PageLayout = PageLayout.HND,
) -> RaggedBatch:
    """A batch of sequences of (stored, new) tokens, in blocks scattered over the pool.

    The same seed gives the same tensors, whatever the block size.
    """
    random = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, spec.head_dim, generator=random).to(dtype)

    stored, new = [list(column) for column in zip(*sequences, strict=True)]
    lengths = [sum(sequence) for sequence in sequences]
    keys, values = ([draw(length, KV_HEADS) for length in lengths] for _ in range(2))
    q = draw(sum(new), spec.num_heads)

    num_blocks = 3 + sum(-(-length // block_size) for length in lengths)
    key_dtype, value_dtype = spec.kv_dtypes or (spec.dtype, spec.dtype)
    kv_spec = KVSpec(LAYERS, KV_HEADS, spec.head_dim, key_dtype, value_dtype)
    storage = KVStorage(kv_spec, num_blocks, block_size, layout=layout)
    poison(storage)
    pool = PagedKVCachePool(num_blocks, block_size, max(lengths), storage)
    pool.allocator.allocate(num_blocks)
    pool.allocator.free(torch.randperm(num_blocks, generator=random).tolist())
    slots = [pool.allocate_slot(length) for length in lengths]

    with_prefix = [index for index, tokens in enumerate(stored) if tokens]
    if with_prefix:
        prefix = pool.view([slots[i] for i in with_prefix], [stored[i] for i in with_prefix])
        prefix.update(LAYER, *(torch.cat([kv[i][: stored[i]] for i in with_prefix]) for kv in (keys, values)))
        prefix.advance()
    view = pool.view(slots, new)
    view.update(LAYER, *(torch.cat([x[n:] for x, n in zip(kv, stored, strict=True)]) for kv in (keys, values)))
    return RaggedBatch(q, view, pool, slots, [k.transpose(0, 1) for k in keys], [v.transpose(0, 1) for v in values])


def poison(storage: KVStorage) -> None:
    """Let every number of a storage be read as POISON, or nearly."""
    for kind, cache, scales in (
        (FORMATS[storage.spec.dtypes[0]], storage.keys, storage.key_scales),
        (FORMATS[storage.spec.dtypes[1]], storage.values, storage.value_scales),
    ):
        stored, factors = kind.pack(torch.full((storage.spec.head_dim,), POISON))
        cache[:] = stored
        if scales is not None and factors is not None:
            scales[:] = factors


def naive_attention(batch: RaggedBatch, spec: AttentionSpec) -> torch.Tensor:
    """Softmax(q k) v in double precision, one query of one head at a time, from the tensors that were stored."""
    out = torch.empty(batch.q.shape, dtype=torch.float64)
    for sequence, length in enumerate(batch.view.lengths):
        start, new = batch.view.starts[sequence], batch.view.num_new[sequence]
        for token in range(new):
            position = length - new + token
            first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
            for head in range(spec.num_heads):
                k = batch.keys[sequence][head // spec.group, first : position + 1].double()
                v = batch.values[sequence][head // spec.group, first : position + 1].double()
                scores = (k @ batch.q[start + token, head].double()) * spec.scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                out[start + token, head] = torch.softmax(scores, dim=0) @ v
    return out
