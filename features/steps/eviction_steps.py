"""Cached texts, and which of them lose their blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from pytest_bdd import given, parsers, then, when

from features.steps.server import Server
from features.steps.sizing_steps import Attempt
from features.steps.support import NAMES, Memory, names_in
from features.steps.texts import Texts
from kvlab.kv.pool import BlockPool
from tests.support.records import counted

_COUNT: dict[str, Callable[[str], object]] = {"count": int, "times": int}


@given(parsers.parse('a text "{name}" of {tokens:d} tokens was stored and freed that are the first of "{other}"'))
def part_came_and_went(memory: Texts, name: str, tokens: int, other: str) -> None:
    memory.arrive(name, memory.tokens[other][:tokens])
    memory.end(name)


@when(parsers.parse("{count:d} texts of up to {most:d} tokens are stored and freed"))
def many_come_and_go(memory: Texts, count: int, most: int) -> None:
    """Half of them begin as an earlier one did. What stays is read after each."""
    chance, known = random.Random(0), [memory.new_tokens_of(most)]
    for index in range(count):
        start = chance.choice(known)[: chance.randint(0, most)] if index % 2 else []
        tokens = [*start, *memory.new_tokens_of(chance.randint(1, most))][:most]
        known.append(tokens)
        memory.arrive("stranger", tokens)
        assert torch.equal(memory.read("stranger"), memory.written["stranger"])
        memory.end("stranger")
        for name in memory.slots:
            assert torch.equal(memory.read(name), memory.kept[name])


@when("its pool serves texts", target_fixture="memory")
def serves_texts(attempt: Attempt) -> Texts:
    assert attempt.engine is not None
    assert isinstance(attempt.engine.pool, BlockPool)
    return Texts(attempt.engine.pool)


@when(parsers.parse('a request "{name}" of {prompt:d} prompt tokens and {output:d} output tokens arrives'))
def request_arrives(server: Server, name: str, prompt: int, output: int) -> None:
    server.submit(name, tuple(range(1, prompt + 1)), output)


@then(parsers.re(NAMES + r" are evicted, and the others are not"), converters={"names": names_in})
def are_evicted(memory: Texts, names: list[str]) -> None:
    """Of all texts there were; each is cached as a whole or not at all."""
    gone = [memory.tokens[name] for name in names]
    for name, tokens in memory.tokens.items():
        whole = len(tokens) // memory.pool.block_size
        assert memory.cached_blocks(name) == (0 if tokens in gone else whole), name


@then(parsers.parse('"{name}" is the text that lost blocks'))
def lost_blocks(memory: Texts, name: str) -> None:
    lost = {other for other in ("alice", "bob") if memory.cached_blocks(other) < 2}
    assert lost == {name}


@then(parsers.re(r"(?P<count>\d+) blocks? (was|were) evicted"), converters=_COUNT)
def evicted(memory: Memory, count: int) -> None:
    assert memory.pool.counters().evicted_blocks == count


@then(parsers.re(r"(?P<bound>at least|more than) (?P<count>\d+) blocks were evicted"), converters=_COUNT)
def evicted_many(memory: Memory, bound: str, count: int) -> None:
    assert memory.pool.counters().evicted_blocks >= count + (bound == "more than")


@then(parsers.re(r"blocks were evicted (?P<times>\d+) times?, (?P<count>\d+) blocks in all"), converters=_COUNT)
def evicted_times(memory: Memory, times: int, count: int) -> None:
    done = memory.pool.counters()
    assert (done.evictions, done.evicted_blocks) == (times, count)


@then("no step reclaimed a block")
def none_reclaimed(server: Server) -> None:
    assert server.records
    assert {(counted(record).evictions, counted(record).evicted_blocks) for record in server.records} == {(0, 0)}


@then(
    parsers.re(r"that step evicted (?P<times>\d+) times? and reclaimed (?P<count>\d+) blocks?"), converters=_COUNT
)
def step_evicted(server: Server, times: int, count: int) -> None:
    assert (counted(server.records[-1]).evictions, counted(server.records[-1]).evicted_blocks) == (times, count)


@then(
    parsers.re(
        r"the step log has (?P<times>\d+) evictions? and (?P<count>\d+) reclaimed blocks?, as the pool counted"
    ),
    converters=_COUNT,
)
def log_evicted(server: Server, times: int, count: int) -> None:
    done = server.memory.pool.counters()
    assert sum(counted(record).evictions for record in server.records) == done.evictions == times
    assert sum(counted(record).evicted_blocks for record in server.records) == done.evicted_blocks == count
