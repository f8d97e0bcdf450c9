"""The pool as a whole: where its tensors are, and who gets blocks that come back."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
from pytest_bdd import parsers, then, when
from torch.utils._python_dispatch import TorchDispatchMode

from features.steps.sizing_steps import Attempt
from features.steps.support import SPEC, Memory, MemorySize
from kvlab.errors import CapacityError
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage


class AllocationWatch(TorchDispatchMode):
    """Collects the floating-point tensors that come out of an operation in memory that did not go into it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in known:
                self.allocated.append(result.shape)
        return result


@when(parsers.parse("{count:d} sequences come, grow and go"), target_fixture="watch")
def come_grow_go(memory: Memory, count: int) -> AllocationWatch:
    """Work of the pool alone, so that any floating-point tensor that appears is one for K and V."""
    chance, pool = random.Random(0), memory.pool
    live: list[int] = []
    content = torch.randn(32, SPEC.num_kv_heads, SPEC.head_dim)
    watch = AllocationWatch()
    for _ in range(count):
        tokens = chance.randint(1, 30)
        while live and pool.allocator.num_free() * pool.block_size < tokens + 1 + len(live) * pool.block_size:
            with watch:
                pool.free_slot(live.pop(0))
        with watch:
            live.append(pool.allocate_slot(tokens))
            _step(pool, live[-1:], [tokens], content)
            _step(pool, live, [1] * len(live), content)
    for slot in live:
        pool.free_slot(slot)
    memory.audit()
    return watch


def _step(pool: BlockPool, slots: list[int], new: list[int], content: torch.Tensor) -> None:
    pool.reserve(slots, new)
    view = pool.view(slots, new)
    for layer in range(SPEC.num_layers):
        view.update(layer, content[: sum(new)], content[: sum(new)])
    view.advance()


@dataclass
class Footprint:
    """Bytes that the process took from the machine: for the empty pool, and while it was filled."""

    at_start: int
    later: int


@when(
    parsers.parse("a pool of {blocks:d} blocks of {tokens:d} tokens is reserved and then filled"),
    target_fixture="footprint",
)
def reserve_and_fill(blocks: int, tokens: int) -> Footprint:
    content, process = torch.randn(4096, SPEC.num_kv_heads, SPEC.head_dim), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    pool = MemorySize(blocks, tokens, paged=True).build(SPEC, max_seq_len=len(content))
    reserved = process.memory_info().rss
    for _ in range(blocks * tokens // len(content)):
        _step(pool, [pool.allocate_slot(len(content))], [len(content)], content)
    return Footprint(reserved - before, process.memory_info().rss - reserved)


@then(parsers.parse("the process took {size:d} MiB for the empty pool"))
def took_at_start(footprint: Footprint, size: int) -> None:
    assert footprint.at_start == pytest.approx(size * 2**20, rel=0.1)


@then("it took no more while the pool was filled")
def took_no_more(footprint: Footprint) -> None:
    assert footprint.later < 8 * 2**20


@when(parsers.parse("a pool of {blocks:d} blocks of {tokens:d} tokens is reserved"), target_fixture="attempt")
def reserve_pool(blocks: int, tokens: int) -> Attempt:
    return reserve_pool_for(blocks, tokens, tokens)


@when(
    parsers.parse(
        "a pool of {blocks:d} blocks of {tokens:d} tokens for sequences of {longest:d} tokens is reserved"
    ),
    target_fixture="attempt",
)
def reserve_pool_for(blocks: int, tokens: int, longest: int) -> Attempt:
    with pytest.raises(CapacityError) as refused:
        PagedKVCachePool(blocks, tokens, longest, KVStorage(SPEC, blocks, tokens))
    return Attempt(refusal=str(refused.value))


@then("K and V are where they were at start")
def same_place(memory: Memory) -> None:
    assert memory.place() == memory.started_at


@then("no step allocated memory for K and V")
def nothing_allocated(watch: AllocationWatch) -> None:
    assert watch.allocated == []


@then(parsers.parse('the blocks of "{name}" are free again'))
def blocks_free_again(memory: Memory, name: str) -> None:
    assert memory.blocks_before[name]
    assert memory.free_blocks() == memory.free_before | set(memory.blocks_before[name])


@then(parsers.parse('"{name}" gets the blocks that "{other}" gave back'))
def gets_blocks_of(memory: Memory, name: str, other: str) -> None:
    assert set(memory.blocks(name)) == set(memory.last_blocks[other])
