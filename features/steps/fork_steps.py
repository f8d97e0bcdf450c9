"""Forks, and what a write into a shared block leaves alone."""

from __future__ import annotations

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.canary_steps import Canary
from features.steps.support import NAMES, names_in
from features.steps.texts import Texts, pool_state
from kvlab.errors import OutOfBlocksError


@given(parsers.re(NAMES + r' (is|are) forked from "(?P<source>\w+)"'), converters={"names": names_in})
@when(parsers.re(NAMES + r' (is|are) forked from "(?P<source>\w+)"'), converters={"names": names_in})
def forked(memory: Texts, names: list[str], source: str) -> None:
    for name in names:
        memory.fork(name, source)


@given("what each sequence reads is kept to compare with", target_fixture="canary")
def keep(memory: Texts) -> Canary:
    memory.kept = {name: memory.read(name) for name in memory.slots}
    memory.fill_unused(None)
    return Canary(memory.storage.keys.clone(), memory.storage.values.clone())


@when(parsers.parse('"{name}" tries to write {tokens:d} token'), target_fixture="refusal")
def tries_to_write(memory: Texts, name: str, tokens: int) -> OutOfBlocksError:
    memory.know(name, memory.length(name) + tokens)
    memory.state = pool_state(memory)
    with pytest.raises(OutOfBlocksError) as refused:
        memory.step({name: tokens})
    return refused.value


@when(parsers.re(r"all but (?P<left>\d+) of " + NAMES + " end"), converters={"left": int, "names": names_in})
def free_but(memory: Texts, left: int, names: list[str]) -> None:
    for name in names[: len(names) - left]:
        memory.end(name)


@then(parsers.re(r"(?P<count>\d+) blocks? (was|were) copied"))
def copies(memory: Texts, count: str) -> None:
    assert memory.pool.counters().cow_copies == int(count)


@then("each sequence reads what was kept, bit for bit, before what is new")
def reads_kept(memory: Texts) -> None:
    assert memory.kept
    for name, content in memory.kept.items():
        assert torch.equal(memory.read(name)[: len(content)], content)


@then("no block that was in use has changed a bit but where a sequence wrote what is its own")
def blocks_of_others_unchanged(memory: Texts, canary: Canary) -> None:
    own = memory.places(memory.new_tokens)
    taken = sorted(memory.free_before & memory.pool.allocator.allocated_block_ids())
    own[taken] = True
    for now, before in ((memory.storage.keys, canary.keys), (memory.storage.values, canary.values)):
        changed = (now != before).transpose(2, 3).flatten(3).any(dim=3)
        assert changed.any()
        assert not (changed & ~own).any()


@then(parsers.parse('"{name}" is where it was'))
def same_table(memory: Texts, name: str) -> None:
    old = memory.blocks_before[name]
    assert memory.blocks(name)[: len(old)] == old
