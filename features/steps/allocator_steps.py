"""The allocator on its own: what it hands out, and what it refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pytest_bdd import given, parsers, then, when

from kvlab.errors import BlockError, OutOfBlocksError
from kvlab.kv.allocator import BlockAllocator


@dataclass
class AllocatorCase:
    """An allocator, and how it was ahead of the latest call that was to be refused."""

    allocator: BlockAllocator
    owned: dict[str, list[int]] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    mistake: str = ""
    named: int = -1

    def state(self) -> dict[str, Any]:
        """All that can be known of it, the order of its queue included."""
        allocator = self.allocator
        twin = copy.deepcopy(allocator)
        return {
            "references": [allocator.ref_count(block) for block in range(allocator.num_blocks)],
            "free": (allocator.num_free(), allocator.free_block_ids(), twin.allocate(twin.num_free())),
            "allocated": (allocator.num_allocated(), allocator.allocated_block_ids(), allocator.num_references),
            "counts": (allocator.total_allocated, allocator.total_freed, allocator.evicted_blocks),
            "owned": {owner: allocator.owners.blocks_of(owner) for owner in self.owned},
        }

    def refuse(self, call: Callable[[], object]) -> None:
        """Make a call that has to be refused."""
        self.before = self.state()
        with pytest.raises(BlockError) as refused:
            call()
        self.mistake = str(refused.value)


@given(parsers.parse("an allocator of {blocks:d} blocks"), target_fixture="case")
def an_allocator(blocks: int) -> AllocatorCase:
    return AllocatorCase(BlockAllocator(blocks))


@given(parsers.re(r"blocks (?P<taken>[\d, ]+) are handed out, and (?P<block>\d+) is (?P<what>freed again|shared)"))
def handed_out(case: AllocatorCase, taken: str, block: str, what: str) -> None:
    wanted = _ids(taken)
    assert sorted(case.allocator.allocate(len(wanted))) == wanted
    if what == "shared":
        case.allocator.share([int(block)])
    else:
        case.allocator.free([int(block)])


@given(parsers.parse('"{first}" owns {count:d} blocks and "{second}" {other:d}'))
def owned(case: AllocatorCase, first: str, count: int, second: str, other: int) -> None:
    case.owned = {
        name: case.allocator.allocate(blocks, owner=name) for name, blocks in ((first, count), (second, other))
    }


@given(parsers.parse("all but {free:d} blocks are handed out"))
def all_blocks_but(case: AllocatorCase, free: int) -> None:
    case.allocator.allocate(case.allocator.num_blocks - free)


@given(parsers.parse("{count:d} blocks are handed out"))
def some_handed_out(case: AllocatorCase, count: int) -> None:
    case.allocator.allocate(count)


@when(parsers.re(r"blocks (?P<blocks>-?\d+(?:, -?\d+)*) are (?P<what>freed|shared) by mistake"))
def by_mistake(case: AllocatorCase, blocks: str, what: str) -> None:
    call = case.allocator.free if what == "freed" else case.allocator.share
    case.refuse(lambda: call(_ids(blocks)))


@when(parsers.re(r"blocks (?P<blocks>\d+(?:, \d+)*) are freed"))
def freed(case: AllocatorCase, blocks: str) -> None:
    case.allocator.free(_ids(blocks))


@when(parsers.parse('"{first}" frees a block of his own and one of "{second}"'))
def frees_anothers(case: AllocatorCase, first: str, second: str) -> None:
    case.named = case.owned[second][0]
    case.refuse(lambda: case.allocator.free([case.owned[first][0], case.named], first))


@when(parsers.re(r"(?P<count>[1-9]\d*) blocks are asked for"), target_fixture="refusal")
def too_many(case: AllocatorCase, count: str) -> OutOfBlocksError:
    case.before = case.state()
    assert not case.allocator.can_allocate(int(count))
    with pytest.raises(OutOfBlocksError) as refused:
        case.allocator.allocate(int(count))
    return refused.value


@when("0 blocks are asked for", target_fixture="got")
def none_asked(case: AllocatorCase) -> list[int]:
    case.before = case.state()
    assert case.allocator.can_allocate(0)
    return case.allocator.allocate(0)


@then("none is handed out")
def none_got(got: list[int]) -> None:
    assert got == []


@then(parsers.re(r"it is refused, naming block (?P<block>-?\d+)"))
def refused_naming_a_block(case: AllocatorCase, block: str) -> None:
    assert re.search(rf"block {block}\b", case.mistake)


@then("it is refused, naming that block")
def refused_naming_that(case: AllocatorCase) -> None:
    refused_naming_a_block(case, str(case.named))


@then("the allocator is as it was")
def unchanged(case: AllocatorCase) -> None:
    assert case.before
    assert case.state() == case.before


@then(parsers.parse("{count:d} blocks can still be had"))
def can_be_had(case: AllocatorCase, count: int) -> None:
    assert len(set(case.allocator.allocate(count))) == count
    assert case.allocator.num_free() == 0


@then(parsers.parse("all {count:d} blocks are free"))
def all_free(case: AllocatorCase, count: int) -> None:
    assert case.allocator.num_free() == count
    assert case.allocator.free_block_ids() == set(range(count))


def _ids(text: str) -> list[int]:
    return [int(number) for number in text.split(", ")]
