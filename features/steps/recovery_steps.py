"""Blocks that were lost: found, listed by owner, reclaimed; and a life that loses none."""

from __future__ import annotations

from collections import Counter

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import random_tokens
from features.steps.isolation_steps import Fault
from features.steps.server import Server
from features.steps.support import NAMES, Memory, names_in
from features.steps.texts import Texts, pool_state
from kvlab.core import FinishReason, SamplingParams, SequenceSpec
from kvlab.engine.step import StepInput
from kvlab.errors import OutOfBlocksError, SlotError


@given(parsers.parse('"{owner}" took {count:d} blocks and vanished'))
def took_and_vanished(memory: Texts, owner: str, count: int) -> None:
    memory.last_blocks[owner] = memory.pool.allocator.allocate(count, owner=owner)


@given(parsers.parse('"{owner}" shared the first {count:d} blocks of "{name}" and vanished'))
def shared_and_vanished(memory: Texts, owner: str, count: int, name: str) -> None:
    memory.last_blocks[owner] = memory.blocks(name)[:count]
    memory.pool.allocator.share(memory.last_blocks[owner], owner=owner)


@given(parsers.parse("{count:d} blocks are allocated and recorded nowhere"))
def nowhere(memory: Texts, count: int) -> None:
    memory.last_blocks["nobody"] = memory.pool.allocator.allocate(count)


@given(parsers.parse('"{name}" was given a block that her table does not name'))
def not_in_table(memory: Texts, name: str) -> None:
    memory.last_blocks[name] = memory.pool.allocator.allocate(1, owner=memory.slots[name])


@given(parsers.parse('the table of "{name}" is dropped without freeing its blocks'))
def table_dropped(memory: Texts, name: str) -> None:
    slot = memory.slots.pop(name)
    del memory.written[name]
    memory.last_blocks[name] = memory.pool.tables.remove(slot)
    memory.gone[name] = slot


@given(parsers.parse('the first block of "{name}" was shared once more, and that was recorded nowhere'))
def shared_nowhere(memory: Texts, name: str) -> None:
    memory.last_blocks["nobody"] = memory.blocks(name)[:1]
    memory.pool.allocator.share(memory.last_blocks["nobody"])


@when(parsers.parse('"{name}" has ended'))
def has_ended(memory: Texts, name: str) -> None:
    """Without the audit of a step that leaves a sound pool."""
    memory.pool.free_slot(memory.slots.pop(name))
    del memory.written[name]


@when("leaked blocks are reclaimed", target_fixture="reclaimed")
def reclaim(memory: Memory) -> int:
    count = memory.pool.reclaim_leaked_blocks()
    memory.audit()
    return count


@when(parsers.parse('"{name}" ends, and is ended once more by mistake'))
def ended_twice(memory: Texts, name: str) -> None:
    slot = memory.slots[name]
    memory.end(name)
    memory.state = pool_state(memory)
    with pytest.raises(SlotError, match=str(slot)):
        memory.pool.free_slot(slot)


@when(
    parsers.re(NAMES + r" try to grow by (?P<tokens>\d+) token in the same step"),
    converters={"names": names_in, "tokens": int},
    target_fixture="refusal",
)
def try_to_grow(memory: Texts, names: list[str], tokens: int) -> OutOfBlocksError:
    for name in names:
        memory.know(name, memory.length(name) + tokens)
    memory.state = pool_state(memory)
    with pytest.raises(OutOfBlocksError) as refused:
        memory.step(dict.fromkeys(names, tokens))
    return refused.value


@then(parsers.re(r"it names " + NAMES), converters={"names": names_in})
def names_slots(memory: Texts, refusal: OutOfBlocksError, names: list[str]) -> None:
    assert list(refusal.slots) == [memory.slots[name] for name in names]


@then(parsers.re(r"the blocks of owners that are gone are (?P<wanted>.+)"))
def gone_owners(memory: Texts, wanted: str) -> None:
    leaked = memory.pool.allocator.owners.leaked_blocks(memory.pool.tables.live)
    counts = {part.split('"')[1]: int(part.split()[0]) for part in wanted.split(" and ")}
    assert leaked == {memory.gone.get(name, name): sorted(memory.last_blocks[name]) for name in counts}
    assert {name: len(memory.last_blocks[name]) for name in counts} == counts


@then(parsers.parse("the audit finds these {count:d} blocks leaked, and says who holds them"))
def audit_finds(memory: Texts, count: int) -> None:
    findings = memory.pool.audit()
    lost = {block: owner for owner, blocks in memory.last_blocks.items() for block in blocks}
    assert len(findings) == len(lost) == count
    assert {finding.rule for finding in findings} == {"leaked"}
    for block, owner in lost.items():
        (finding,) = [finding for finding in findings if finding.subject == f"block {block}"]
        holder: object = memory.slots.get(owner, owner)
        assert finding.holders == (() if owner == "nobody" else (holder,))


@then(parsers.re(r"(?P<count>\d+) blocks? (is|are) named by no table"), converters={"count": int})
def named_by_none(memory: Texts, count: int) -> None:
    lost = memory.pool.allocator.find_unreferenced_blocks(_named(memory))
    assert lost == sorted(block for blocks in memory.last_blocks.values() for block in blocks)
    assert len(lost) == count


@then(parsers.re(r"that gave back (?P<count>\d+) blocks?"), converters={"count": int})
def gave_back(reclaimed: int, count: int) -> None:
    assert reclaimed == count


@then("nothing is leaked")
def nothing_leaked(memory: Memory) -> None:
    assert _leaks(memory) == ({}, [])
    assert memory.pool.audit() == []


@when("requests come, share, fork, are preempted, fail and are aborted", target_fixture="leaks")
def normal_life(server: Server) -> list[object]:
    """What was leaked after each step."""
    leaks: list[object] = []
    for index in range(10):
        prompt = (*random_tokens(32, seed=7), *random_tokens(2 + 3 * index, seed=index))
        samples = 3 if index % 3 == 0 else 1
        sampling = SamplingParams(20, temperature=1.0, seed=index, n=samples)
        server.submit(f"request-{index}", prompt, 20, sampling=sampling)

    for number in range(1000):
        if not server.engine.has_work():
            break
        fault = Fault(server, "before it computes", _everyone if number == 12 else _nobody)
        if number % 7 == 5:
            server.engine.abort(f"request-{number // 7}")
        server.step()
        fault.end()
        leaks.append(_leaks(server.memory))
    return leaks


@then("no step left a leaked block")
def no_leaks(server: Server, leaks: list[object]) -> None:
    assert len(leaks) > 20
    assert all(leak == ({}, []) for leak in leaks)
    everyone = [sample for first in server.sequences.values() for sample in (first, *first.siblings)]
    ends = Counter(sample.finish_reason for sample in everyone)
    assert min(ends[reason] for reason in (FinishReason.ABORTED, FinishReason.FAILED, FinishReason.LENGTH)) > 0
    assert sum(sample.preemptions for sample in everyone) > 0
    done = server.memory.pool.counters()
    assert min(done.hit_tokens, done.cow_copies, done.evicted_blocks) > 0
    assert not server.engine.has_work()


def _everyone(step: StepInput) -> list[SequenceSpec]:
    return list(step.sequences)


def _nobody(_: StepInput) -> list[SequenceSpec]:
    return []


def _named(memory: Memory) -> set[int]:
    return {block for slot in memory.pool.tables.live for block in memory.pool.tables.blocks(slot)}


def _leaks(memory: Memory) -> tuple[dict[object, list[int]], list[int]]:
    allocator = memory.pool.allocator
    gone = dict(allocator.owners.leaked_blocks(memory.pool.tables.live))
    return gone, allocator.find_unreferenced_blocks(_named(memory))
