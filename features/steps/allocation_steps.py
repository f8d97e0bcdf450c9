"""Sequences that come, grow and go in a pool, and the blocks they hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.support import NAMES, SPEC, Memory, MemorySize, chunks, memory_size, names_in
from kvlab.errors import OutOfBlocksError
from kvlab.kv.view import CacheView

_TYPES: dict[str, Callable[[str], object]] = {"names": names_in, "tokens": int}


@given(parsers.parse("a pool of {size:Size}", extra_types={"Size": memory_size}), target_fixture="memory")
def a_pool(size: MemorySize) -> Memory:
    return Memory(size.build(SPEC))


@given("the free blocks are in shuffled order")
def shuffled(memory: Memory) -> None:
    memory.shuffle_free_blocks()


@given(parsers.re(r'a sequence "(?P<name>\w+)" of (?P<tokens>\d+) tokens?'), converters={"tokens": int})
@when(parsers.re(r'a sequence "(?P<name>\w+)" of (?P<tokens>\d+) tokens? arrives'), converters={"tokens": int})
@when(parsers.re(r'"(?P<name>\w+)" is prefilled with (?P<tokens>\d+) tokens at once'), converters={"tokens": int})
def prefilled_at_once(memory: Memory, name: str, tokens: int) -> None:
    memory.prefill(name, tokens)


@given(parsers.parse('an empty sequence "{name}"'))
def empty_sequence(memory: Memory, name: str) -> None:
    memory.open(name)


@given("sequences of these lengths")
def sequences(memory: Memory, datatable: list[list[str]]) -> None:
    for name, tokens in datatable[1:]:
        memory.prefill(name, int(tokens))


@when(parsers.parse('"{name}" is prefilled with {tokens:d} tokens token by token'))
def prefilled_token_by_token(memory: Memory, name: str, tokens: int) -> None:
    prefilled_in_chunks(memory, name, tokens, 1)


@when(parsers.parse('"{name}" is prefilled with {tokens:d} tokens in chunks of {size:d}'))
def prefilled_in_chunks(memory: Memory, name: str, tokens: int, size: int) -> None:
    memory.open(name)
    for count in chunks(tokens, size):
        memory.step({name: count})


@given(parsers.re(NAMES + r" grows? by (?P<tokens>\d+) tokens?(?: in the same step)?"), converters=_TYPES)
@when(parsers.re(NAMES + r" grows? by (?P<tokens>\d+) tokens?(?: in the same step)?"), converters=_TYPES)
def grow(memory: Memory, names: list[str], tokens: int) -> None:
    memory.step(dict.fromkeys(names, tokens))


@when("the sequences grow in the same step")
def grow_each(memory: Memory, datatable: list[list[str]]) -> None:
    memory.step({name: int(tokens) for name, tokens in datatable[1:]})


@when(parsers.parse('"{name}" grows token by token to {tokens:d} tokens'), target_fixture="gained")
def grow_token_by_token(memory: Memory, name: str, tokens: int) -> dict[int, int]:
    """The blocks it got, by the number of the token that brought them."""
    gained = {}
    for number in range(memory.length(name) + 1, tokens + 1):
        memory.step({name: 1})
        gained[number] = len(memory.blocks(name)) - len(memory.blocks_before[name])
    return gained


@when(parsers.parse('"{name}" tries to grow by {tokens:d} token'), target_fixture="refusal")
def tries_to_grow(memory: Memory, name: str, tokens: int) -> OutOfBlocksError:
    with pytest.raises(OutOfBlocksError) as refused:
        memory.step({name: tokens})
    memory.audit()
    return refused.value


@when(parsers.parse('a sequence "{name}" of {tokens:d} tokens tries to enter'), target_fixture="refusal")
def tries_to_enter(memory: Memory, name: str, tokens: int) -> OutOfBlocksError:
    with pytest.raises(OutOfBlocksError) as refused:
        memory.open(name, tokens)
    memory.audit()
    return refused.value


@when(parsers.parse('"{name}" ends'))
def end(memory: Memory, name: str) -> None:
    memory.end(name)


@then(parsers.re(r"it is refused: (?P<wanted>\d+) blocks? wanted, (?P<free>\d+) free, (?P<total>\d+) in the pool"))
def growth_refused(refusal: OutOfBlocksError, wanted: str, free: str, total: str) -> None:
    assert [refusal.wanted, refusal.free, refusal.total] == [int(wanted), int(free), int(total)]
    for figure in (wanted, free, total):
        assert figure in re.findall(r"\d+", str(refusal))


@then(
    parsers.re(NAMES + r" gets? (?P<count>\d+) more blocks?(?:, out of those that were free)?"),
    converters={"names": names_in, "count": int},
)
def gets_blocks(memory: Memory, names: list[str], count: int) -> None:
    for name in names:
        before = memory.blocks_before.get(name, [])
        new = memory.blocks(name)[len(before) :]
        assert len(new) == count
        assert set(new) <= memory.free_before
        assert not set(new) & memory.free_blocks()


@then(parsers.parse('"{name}" took one block each for tokens {numbers} and none for the others'))
def took_blocks_for(gained: dict[int, int], numbers: str) -> None:
    assert {number: count for number, count in gained.items() if count} == {
        int(number): 1 for number in numbers.split(", ")
    }


@then(parsers.re(r'"(?P<name>\w+)" holds (?P<count>\d+) blocks?'), converters={"count": int})
def holds_blocks(memory: Memory, name: str, count: int) -> None:
    assert len(memory.blocks(name)) == len(set(memory.blocks(name))) == count
    assert not set(memory.blocks(name)) & memory.free_blocks()


@then(parsers.re(r"(?P<count>\d+) blocks? (is|are) free"), converters={"count": int})
def blocks_free(memory: Memory, count: int) -> None:
    assert len(memory.free_blocks()) == memory.pool.allocator.num_free() == count


@then(parsers.re(r"every token of " + NAMES + " reads back as it was written"), converters={"names": names_in})
def reads_back(memory: Memory, names: list[str]) -> None:
    for name in names:
        assert torch.equal(memory.read(name), memory.written[name])


@then(parsers.parse('the blocks of "{name}" hold {counts} of its tokens'))
def blocks_hold(memory: Memory, name: str, counts: str) -> None:
    """Read straight from the tensors: each block has the sequence's next tokens, from its first place on."""
    parts = memory.written[name].split([int(count) for count in counts.split(", ")])
    for block, part in zip(memory.blocks(name), parts, strict=True):
        k = memory.storage.keys[:, block, :, : len(part)].permute(2, 0, 1, 3)
        v = memory.storage.values[:, block, :, : len(part)].permute(2, 0, 1, 3)
        assert torch.equal(torch.stack([k, v], dim=2), part)


@then("no block is held by two of them")
def no_block_twice(memory: Memory) -> None:
    holders = Counter(block for name in memory.slots for block in memory.blocks(name))
    assert max(holders.values()) == 1


@then(
    parsers.parse("K and V of every block are shaped {heads:d} x {tokens:d} x {dim:d} in each of {layers:d} layers")
)
def block_shapes(memory: Memory, heads: int, tokens: int, dim: int, layers: int) -> None:
    memory.open("reader", 1)
    memory.step({"reader": 1}, during=lambda view: _check_shapes(view, memory, (heads, tokens, dim), layers))
    memory.end("reader")


def _check_shapes(view: CacheView, memory: Memory, shape: tuple[int, int, int], layers: int) -> None:
    assert view.block_size == memory.pool.stats().block_size == shape[1]
    assert len(memory.storage.keys) == len(memory.storage.values) == layers
    for layer in range(layers):
        for tensor in (view.keys(layer), view.values(layer)):
            assert len(tensor) == memory.pool.allocator.num_blocks
            assert {tuple(block.shape) for block in tensor} == {shape}
