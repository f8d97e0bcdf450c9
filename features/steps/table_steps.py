"""Block tables: where a token is, and what growth leaves alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.support import Memory
from kvlab.errors import SlotError
from kvlab.kv.view import CacheView


@given(parsers.re(r"the \d+ blocks that come next are (?P<order>[\d ]+)"))
def next_blocks(memory: Memory, order: str) -> None:
    """Take every block in a sequence of its own, and give back the wanted ones, and only these, in an order
    that hands them out as wanted.
    """
    wanted = [int(block) for block in order.split()]
    pool = memory.pool
    holders = {pool.tables.blocks(slot)[0]: slot for slot in [pool.allocate_slot(1) for _ in memory.free_blocks()]}
    for block in reversed(wanted):
        pool.free_slot(holders[block])
    memory.audit()


@then(parsers.re(r'the blocks of "(?P<name>\w+)" are (?P<order>[\d ]+)'))
def blocks_are(memory: Memory, name: str, order: str) -> None:
    assert memory.blocks(name) == [int(block) for block in order.split()][: len(memory.blocks(name))]


Snapshot = tuple[list[int], torch.Tensor]  # a sequence's table, and what is read through it


@when(
    parsers.parse('"{first}" and "{second}" grow by {tokens:d} tokens in turns, {times:d} times'),
    target_fixture="growths",
)
def grow_in_turns(memory: Memory, first: str, second: str, tokens: int, times: int) -> list[dict[str, Snapshot]]:
    """What each sequence's table and content were, ahead of the first growth and after each."""
    growths = [_snapshot(memory)]
    for _ in range(times):
        for name in (first, second):
            memory.step({name: tokens})
            growths.append(_snapshot(memory))
    return growths


def _snapshot(memory: Memory) -> dict[str, Snapshot]:
    return {name: (memory.blocks(name), memory.read(name)) for name in memory.slots}


@then("each time, the old entries of their tables stayed as they were")
def entries_stayed(growths: list[dict[str, Snapshot]]) -> None:
    for before, after in pairwise(growths):
        for name, (blocks, _) in before.items():
            assert after[name][0][: len(blocks)] == blocks


@then("each time, K and V of their old tokens stayed as they were, bit for bit")
def content_stayed(growths: list[dict[str, Snapshot]]) -> None:
    for before, after in pairwise(growths):
        for name, (_, content) in before.items():
            assert torch.equal(after[name][1][: len(content)], content)
    for name, (blocks, content) in growths[0].items():
        assert len(growths[-1][name][0]) > len(blocks)
        assert len(growths[-1][name][1]) > len(content)


@then(parsers.parse('the blocks of "{name}" are not side by side'))
def scattered(memory: Memory, name: str) -> None:
    blocks = memory.blocks(name)
    assert any(abs(right - left) != 1 for left, right in pairwise(blocks))


@then(parsers.parse('position {position:d} of "{name}" is mapped to no block'))
def mapped_nowhere(memory: Memory, position: int, name: str) -> None:
    with pytest.raises(SlotError, match=str(position)):
        memory.pool.tables.locate(memory.slots[name], position)


@then(parsers.parse('no position of "{name}" can be looked up, and its slot cannot be given back again'))
def unmapped(memory: Memory, name: str) -> None:
    assert name not in memory.slots
    assert memory.pool.stats().sequences == 0
    for slot in range(8):
        with pytest.raises(SlotError):
            memory.pool.tables.locate(slot, 0)
        with pytest.raises(SlotError):
            memory.pool.free_slot(slot)
    memory.audit()


@then(parsers.parse('positions {first:d} to {last:d} of "{name}" are mapped to the block it got'))
def mapped_to_new(memory: Memory, first: int, last: int, name: str) -> None:
    new = [block for block in memory.blocks(name) if block not in memory.blocks_before[name]]
    assert len(new) == 1
    assert new[0] in memory.free_before
    places = [memory.pool.tables.locate(memory.slots[name], position) for position in range(first, last + 1)]
    assert places == [(new[0], offset) for offset in range(memory.pool.block_size)]


@then(parsers.parse('the table of "{name}" is'))
def table_is(memory: Memory, name: str, datatable: list[list[str]]) -> None:
    blocks = memory.blocks(name)
    rows = [[int(cell) for cell in row] for row in datatable[1:]]
    assert len(rows) == len(blocks)
    for entry, first, last in rows:
        places = [memory.pool.tables.locate(memory.slots[name], position) for position in range(first, last + 1)]
        assert places == [(blocks[entry], offset) for offset in range(len(places))]


@then("the step before wrote and read by that same table")
def view_agrees(memory: Memory) -> None:
    """Attention is given the same blocks, and writes go to the same places: seen in the next step."""
    (name,) = memory.slots
    memory.step({name: 5}, during=lambda view: _check_view(view, memory, name))


def _check_view(view: CacheView, memory: Memory, name: str) -> None:
    table, slot = memory.pool.tables, memory.slots[name]
    length = memory.length(name)
    assert view.seq_lens.tolist() == [length + 5]
    assert view.block_tables.tolist() == [memory.blocks(name)]
    assert view.blocks(0) == memory.blocks(name)
    places = [table.locate(slot, position) for position in range(length, length + 5)]
    assert view.positions.tolist() == list(range(length, length + 5))
    assert view.slot_mapping.tolist() == [block * memory.pool.block_size + offset for block, offset in places]


@then(parsers.parse('position {position:d} of "{name}" is in its block {entry:d} at offset {offset:d}'))
def resolves(memory: Memory, position: int, name: str, entry: int, offset: int) -> None:
    place = memory.pool.tables.locate(memory.slots[name], position)
    assert place == (memory.blocks(name)[entry], offset)


@then(parsers.parse('that place holds K and V of token {position:d} of "{name}" in every layer'))
def place_holds(memory: Memory, position: int, name: str) -> None:
    block, offset = memory.pool.tables.locate(memory.slots[name], position)
    k, v = memory.storage.keys[:, block, :, offset], memory.storage.values[:, block, :, offset]
    assert torch.equal(torch.stack([k, v], dim=1), memory.written[name][position])
